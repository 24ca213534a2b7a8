"""The routes of documents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import FastAPI, Query
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from kvsift.errors import unknown
from kvsift.server.answers import DONE, event
from kvsift.server.api_errors import ApiError, refusals
from kvsift.server.bodies import MOST_BYTES, body_of, charset_of_body, kind_of_body
from kvsift.server.response_bodies import DeletedDocument, DocumentKinds, DocumentList, DocumentObject
from kvsift.server.schemas import DocumentRequest, json_body, parse
from kvsift.server.served_document import ServedDocument
from kvsift.server.streams import STREAM, EventResponse, while_connected
from kvsift.server.supervisor import Supervisor
from kvsift.server.uploads import KINDS, Extraction, NoText, decoded, kind_of, readable_kinds, shown_name

PATH = "/v1/documents"
EVENT_S, COMMENT_S = 0.2, 1.0  # least time between two events; most time without one


def about_documents() -> DocumentKinds:
    """Return what may be uploaded."""
    return {"max_bytes": MOST_BYTES, "kinds": readable_kinds()}


def text_of(kind: str) -> dict[int | str, dict[str, Any]]:
    """Return the response of a route that answers with text, for its OpenAPI document."""
    return {200: {"content": {kind: {"schema": {"type": "string"}}}}}


def add_document_routes(app: FastAPI, supervisor: Supervisor) -> None:
    """Add the routes over the documents of a supervisor."""
    documents, extraction = supervisor.documents, Extraction()
    one, lost = PATH + "/{id}", refusals(401, 404)

    def find(key: str, request: Request) -> ServedDocument:
        return documents.get(key, request.scope["owner"])

    @app.get(PATH, responses=refusals(401))
    async def list_documents(request: Request) -> DocumentList:
        """Return the documents of the API key."""
        return {"object": "list", "data": [each.as_dict() for each in documents.of(request.scope["owner"])]}

    @app.post(
        PATH, responses=refusals(400, 401, 404, 413, 415, 429, 500), openapi_extra=json_body(DocumentRequest, *KINDS)
    )
    async def upload_document(
        request: Request, name: Annotated[str | None, Query(description="Of the file, to be shown.")] = None
    ) -> DocumentObject:
        """Take a document, which is read at once."""
        owner = request.scope["owner"]
        supervisor.check_open()
        for other in request.query_params:
            if other != "name":
                text = str(unknown("query parameter", other[:80], ["name"]))
                raise ApiError(400, text, "unknown_parameter", other[:80])
        content_type, charset = kind_of_body(request), charset_of_body(request)
        data = await body_of(request)
        if content_type == "application/json":
            asked = parse(DocumentRequest, data)
            name, text, num_bytes = shown_name(asked.name, "text"), asked.text, len(asked.text.encode())
        else:
            name, num_bytes = shown_name(name, "document"), len(data)
            kind = kind_of(content_type, name, data)
            text = "" if kind == "pdf" else decoded(data, kind, charset)
            if kind in ("html", "pdf"):
                content = text.encode() if kind == "html" else data
                try:
                    text = await while_connected(request.receive, extraction.text(kind, content, owner))
                except NoText as error:
                    return documents.add_failed(name, data, owner, str(error)).as_dict()
        if not text.strip():
            raise ApiError(400, "the document is empty; there is nothing to ask about.", "invalid_document")
        return documents.add(name, text, num_bytes, owner).as_dict()

    @app.get(one, responses=lost)
    async def get_document(id: str, request: Request) -> DocumentObject:
        """Return a document."""
        return find(id, request).as_dict()

    @app.delete(one, responses=lost)
    async def delete_document(id: str, request: Request) -> DeletedDocument:
        """Delete a document."""
        document = find(id, request)
        documents.delete(document)
        return {"id": document.key, "object": "document", "deleted": True}

    @app.get(one + "/text", response_class=Response, responses={**text_of("text/plain"), **refusals(400, 401, 404)})
    async def get_text(id: str, request: Request) -> Response:
        """Return the text of a document, into which passages index."""
        document = find(id, request)
        if not document.text:
            raise ApiError(400, f"this document has no text: {document.error}", "document_failed")
        return PlainTextResponse(
            document.text, headers={"x-content-type-options": "nosniff", "cache-control": "no-store"}
        )

    @app.get(one + "/events", response_class=Response, responses={200: STREAM, **lost})
    async def get_events(id: str, request: Request) -> Response:
        """Return how far a document is read, as server-sent events, until it is ready or has failed."""
        return EventResponse(_events_of(find(id, request)))


async def _events_of(document: ServedDocument) -> AsyncIterator[bytes]:
    """The document as it changes during prefill, until it is ready or has failed."""
    while document.status == "reading":
        changed = document.changed  # before the event is made
        yield event(document.as_dict())
        await asyncio.sleep(EVENT_S)
        while not changed.is_set():
            try:
                async with asyncio.timeout(COMMENT_S):
                    await changed.wait()
            except TimeoutError:
                yield b": waiting\n\n"
    yield event(document.as_dict()) + DONE
