"""The OpenAPI description of the routes, from the schemas of their bodies."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from kvsift import __version__
from kvsift.server.schemas import ChatRequest, CompletionRequest

REFUSALS = {
    "400": "A field is wrong, or the prompt too long.",
    "401": "An API key is needed.",
    "403": "The Host header is not allowed.",
    "404": "There is no such model.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "429": "Too many requests are waiting.",
    "500": "The answer failed.",
    "503": "The server is loading, restarting or draining.",
}


def description() -> dict[str, Any]:
    """Return the document."""
    schemas = [(schema, "validation") for schema in (CompletionRequest, ChatRequest)]
    _, definitions = models_json_schema(schemas, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    error = {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvsift", "version": __version__},
        "paths": {
            "/v1/completions": {"post": _answering("Continue a text", "CompletionRequest")},
            "/v1/chat/completions": {"post": _answering("Answer a chat", "ChatRequest")},
            "/v1/models": {"get": _getting("The served model", "application/json")},
            "/health": {"get": _getting("Whether requests are taken", "application/json")},
            "/metrics": {"get": _getting("Counters for Prometheus", "text/plain")},
            "/openapi.json": {"get": _getting("This document", "application/json")},
        },
        "components": {
            "schemas": {**definitions["$defs"], "Error": error},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _answering(summary: str, schema: str) -> dict[str, Any]:
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    answer = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": "The answer.", "content": answer}, **_refusals(REFUSALS)},
    }


def _getting(summary: str, kind: str) -> dict[str, Any]:
    schema = {"schema": {"type": "object" if kind.endswith("json") else "string"}}
    refusals = _refusals({status: REFUSALS[status] for status in ("401", "403", "503")})
    return {"summary": summary, "responses": {"200": {"description": summary, "content": {kind: schema}}, **refusals}}


def _refusals(texts: dict[str, str]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": text, "content": content} for status, text in texts.items()}
