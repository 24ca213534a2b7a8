"""The OpenAPI description of the routes, from the schemas of their bodies and answers."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from kvsift import __version__
from kvsift.server.response_schemas import SCHEMAS
from kvsift.server.schemas import ChatRequest, CompletionRequest, DocumentRequest
from kvsift.server.uploads import KINDS

REFUSALS = {
    "400": "A field is wrong, or the prompt too long.",
    "401": "An API key is needed.",
    "403": "The Host header is not allowed.",
    "404": "There is no such model or document.",
    "405": "The route takes another method.",
    "408": "The request comes too slowly.",
    "413": "The body is too large.",
    "415": "The body is of another type than those that are read.",
    "429": "Too many requests are waiting.",
    "431": "The headers are too large.",
    "500": "The answer failed.",
    "503": "The server is loading, restarting, draining, or has no connections left.",
}
ALWAYS = "403", "405", "408", "431", "503"  # whatever is asked for
HEADERS = {
    "401": {"WWW-Authenticate": {"schema": {"type": "string"}}},
    "405": {"Allow": {"schema": {"type": "string"}}},
    "429": {"Retry-After": {"schema": {"type": "integer"}}},
    "503": {"Retry-After": {"schema": {"type": "integer"}}},
}
EVENTS = (
    "With stream=true, server-sent events: chunks in OpenAI's form, the usage last if stream_options asks for it, then "
    "[DONE]. An answer that fails ends with an event that has an Error instead. Lines that begin with a colon say how "
    "far the prompt is read."
)
EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
SSE = {"text/event-stream": {"schema": EVENT}}  # of each event


def description() -> dict[str, Any]:
    """Return the document."""
    schemas = [(schema, "validation") for schema in (CompletionRequest, ChatRequest, DocumentRequest)]
    _, definitions = models_json_schema(schemas, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvsift", "version": __version__},
        "paths": {
            "/v1/completions": {"post": _answering("Continue a text", "CompletionRequest", "Completion")},
            "/v1/chat/completions": {"post": _answering("Answer a chat", "ChatRequest", "ChatCompletion")},
            **_documents(),
            "/v1/models": {"get": _getting("The served model", _json("ModelList"), "401")},
            "/v1/models/{model}": {
                "get": {**_getting("A model", _json("Model"), "401", "404"), "parameters": [_path("model")]},
            },
            "/v1/sample": {"get": _getting("A document for the embedded model", _json("Sample"), "401", "404")},
            "/health": {"get": _health()},
            "/metrics": {"get": _getting("Counters for Prometheus", _text("text/plain"), "401")},
            "/openapi.json": {"get": _getting("This document", {"application/json": {"schema": {}}}, "401")},
            "/": {"get": _getting("A page for browsers", _text("text/html"), "401")},
        },
        "components": {
            "schemas": {**definitions["$defs"], **SCHEMAS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _text(kind: str) -> dict[str, Any]:
    return {kind: {"schema": {"type": "string"}}}


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _documents() -> dict[str, Any]:
    shown = {"name": "name", "in": "query", "schema": {"type": "string"}, "description": "Of the file, to be shown."}
    body = _json("DocumentRequest") | {kind: {"schema": {"type": "string", "format": "binary"}} for kind in KINDS}
    upload = {
        "summary": "Upload a document, which is read at once",
        "parameters": [shown],
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": "The document.", "content": _json("Document")}, **_refusals(REFUSALS)},
    }
    lost = "401", "404"
    one = {
        "": {
            "get": _getting("A document", _json("Document"), *lost),
            "delete": _getting("Delete it", _json("DeletedDocument"), *lost),
        },
        "/text": {"get": _getting("Its text, into which passages index", _text("text/plain"), "400", *lost)},
        "/events": {"get": _getting("How far it is read", SSE, *lost)},
    }
    listed = {"get": _getting("Documents of the API key", _json("DocumentList"), "401"), "post": upload}
    paths = {f"/v1/documents/{{id}}{end}": {"parameters": [_path("id")], **methods} for end, methods in one.items()}
    return {"/v1/documents": listed, **paths}


def _answering(summary: str, body: str, answer: str) -> dict[str, Any]:
    content = {**_json(answer), **SSE}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _json(body)},
        "responses": {"200": {"description": EVENTS, "content": content}, **_refusals(REFUSALS)},
    }


def _getting(summary: str, content: dict[str, Any], *refusals: str) -> dict[str, Any]:
    present = {status: text for status, text in REFUSALS.items() if status in (*ALWAYS, *refusals)}
    return {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content}, **_refusals(present)},
    }


def _health() -> dict[str, Any]:
    """The route that needs no key, and says its state under 503."""
    route = _getting("Whether requests are taken", _json("Health"))
    either = {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("Health", "Error")]}
    route["responses"]["503"]["content"] = {"application/json": {"schema": either}}
    return {**route, "security": []}


def _refusals(texts: dict[str, str]) -> dict[str, Any]:
    return {
        status: {"description": text, "content": _json("Error"), "headers": HEADERS.get(status, {})}
        for status, text in texts.items()
    }
