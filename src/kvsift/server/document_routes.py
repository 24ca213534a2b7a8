"""The routes of documents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvsift.errors import unknown
from kvsift.server.answers import DONE, event
from kvsift.server.api_errors import ApiError
from kvsift.server.bodies import MOST_BYTES, body_of, charset_of_body, kind_of_body
from kvsift.server.documents import Documents
from kvsift.server.schemas import DocumentRequest, parse
from kvsift.server.served_document import ServedDocument
from kvsift.server.streams import EventResponse, unless_gone
from kvsift.server.supervisor import Supervisor
from kvsift.server.uploads import Extraction, NoText, decoded, kind_of, readable_kinds, shown_name

PATH = "/v1/documents"
EVENT_S, COMMENT_S = 0.2, 1.0  # least time between two events; most time without one
GONE = 499


class DocumentRoutes:
    """Routes over the documents of a supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor, self._extraction = supervisor, Extraction()

    @property
    def _documents(self) -> Documents:
        return self._supervisor.documents

    def routes(self) -> list[Route]:
        """Return all of them."""
        one = PATH + "/{id}"
        return [
            Route(PATH, self._list, methods=["GET"]),
            Route(PATH, self._upload, methods=["POST"]),
            Route(one, self._get, methods=["GET"]),
            Route(one, self._delete, methods=["DELETE"]),
            Route(one + "/text", self._text, methods=["GET"]),
            Route(one + "/events", self._events, methods=["GET"]),
        ]

    @staticmethod
    def about() -> dict[str, Any]:
        """Return what may be uploaded."""
        return {"max_bytes": MOST_BYTES, "kinds": readable_kinds()}

    async def _upload(self, request: Request) -> Response:
        owner = request.scope["client_name"]
        self._supervisor.check_open()
        for name in request.query_params:
            if name != "name":
                raise ApiError(
                    400, str(unknown("query parameter", name[:80], ["name"])), "unknown_parameter", name[:80]
                )
        content_type, charset = kind_of_body(request), charset_of_body(request)
        data = await body_of(request)
        if content_type == "application/json":
            asked = parse(DocumentRequest, data)
            return self._added(asked.text, shown_name(asked.name, "text"), len(asked.text.encode()), owner)
        name = shown_name(request.query_params.get("name"), "document")
        kind = kind_of(content_type, name, data)
        content = data
        if kind != "pdf":
            text = decoded(data, kind, charset)
            if kind != "html":
                return self._added(text, name, len(data), owner)
            content = text.encode()
        texts: list[str] = []

        async def extract() -> None:
            texts.append(await self._extraction.text(kind, content, owner))

        try:
            if not await unless_gone(request.receive, extract()):
                return Response(status_code=GONE)
        except NoText as error:
            return JSONResponse(self._documents.add_failed(name, data, owner, str(error)).as_dict())
        return self._added(texts[0], name, len(data), owner)

    def _added(self, text: str, name: str, num_bytes: int, owner: tuple[str, str]) -> Response:
        if not text.strip():
            raise ApiError(400, "the document is empty; there is nothing to ask about.", "invalid_document")
        return JSONResponse(self._documents.add(name, text, num_bytes, owner).as_dict())

    async def _list(self, request: Request) -> Response:
        data = [document.as_dict() for document in self._documents.of(request.scope["client_name"])]
        return JSONResponse({"object": "list", "data": data})

    def _one(self, request: Request) -> ServedDocument:
        return self._documents.get(request.path_params["id"], request.scope["client_name"])

    async def _get(self, request: Request) -> Response:
        return JSONResponse(self._one(request).as_dict())

    async def _delete(self, request: Request) -> Response:
        document = self._one(request)
        self._documents.delete(document)
        return JSONResponse({"id": document.key, "object": "document", "deleted": True})

    async def _text(self, request: Request) -> Response:
        document = self._one(request)
        if not document.text:
            raise ApiError(400, f"this document has no text: {document.error}", "document_failed")
        headers = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
        return PlainTextResponse(document.text, headers=headers)

    async def _events(self, request: Request) -> Response:
        return DocumentEvents(self._one(request))


class DocumentEvents(EventResponse):
    """How a document is read, as server-sent events, until it is ready or has failed."""

    def __init__(self, document: ServedDocument) -> None:
        super().__init__()
        self._document = document

    async def events(self) -> AsyncIterator[bytes]:
        """Return how far it is, when that changes."""
        document = self._document
        while document.status == "reading":
            news = document.news  # before the document is told
            yield event(document.as_dict())
            await asyncio.sleep(EVENT_S)
            while not news.is_set():
                try:
                    async with asyncio.timeout(COMMENT_S):
                        await news.wait()
                except TimeoutError:
                    yield b": waiting\n\n"
        yield event(document.as_dict()) + DONE
