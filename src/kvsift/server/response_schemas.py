"""JSON schemas of what the server answers, for its OpenAPI description."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
NOTHING: Schema = {"type": "null"}


def _object(**properties: Schema) -> Schema:
    """Return the schema of an object that has all of these properties, and no others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NOTHING]}


def _one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


ERROR_TYPES = "invalid_request_error", "authentication_error", "rate_limit_error", "server_error"
TOKEN = {"token": TEXT, "logprob": NUMBER, "bytes": _or_null(_list(WHOLE))}
SPARSITY = _object(
    plan=TEXT,
    density=_or_null(NUMBER),
    visible_tokens=_or_null(NUMBER),
    recovery=_or_null(NUMBER),
    bytes_read=WHOLE,
    bytes_dense=WHOLE,
    guard_events=WHOLE,
    reuse=_object(cached_tokens=WHOLE, why_not=_or_null(TEXT)),
)
SPARSITY["properties"]["passages"] = _reference("Passages")  # if they were asked for
SPANS = _list({"type": "array", "prefixItems": [WHOLE, WHOLE, NUMBER], "minItems": 3, "maxItems": 3})
CHAT_LOGPROBS = _object(content=_list(_object(**TOKEN, top_logprobs=_list(_object(**TOKEN)))), refusal=NOTHING)
LOGPROBS = _object(
    tokens=_list(TEXT),
    token_logprobs=_list(NUMBER),
    top_logprobs=_list({"type": "object", "additionalProperties": NUMBER}),
    text_offset=_list(WHOLE),
)
MESSAGE = _object(role=_one_of("assistant"), content=TEXT, refusal=NOTHING)


def _choice(logprobs: Schema, **text: Schema) -> Schema:
    return _object(index=WHOLE, **text, logprobs=_or_null(logprobs), finish_reason=_one_of("stop", "length"))


def _answer(name: str, choice: Schema) -> Schema:
    head = {"id": TEXT, "object": _one_of(name), "created": WHOLE, "model": TEXT, "system_fingerprint": TEXT}
    return _object(**head, choices=_list(choice), usage=_reference("Usage"))


SCHEMAS: dict[str, Schema] = {
    "Error": _object(
        error=_object(message=TEXT, type=_one_of(*ERROR_TYPES), param=_or_null(TEXT), code=TEXT),
    ),
    "Usage": _object(
        prompt_tokens=WHOLE,
        completion_tokens=WHOLE,
        total_tokens=WHOLE,
        prompt_tokens_details=_object(cached_tokens=WHOLE),
        sparsity=SPARSITY,
    ),
    "Completion": _answer("text_completion", _choice(LOGPROBS, text=TEXT)),
    "ChatCompletion": _answer("chat.completion", _choice(CHAT_LOGPROBS, message=MESSAGE)),
    "Model": _object(
        id=TEXT,
        object=_one_of("model"),
        created=WHOLE,
        owned_by=TEXT,
        max_model_len=_or_null(WHOLE),
        plans=_list(TEXT),
        documents=_object(max_bytes=WHOLE, kinds=_list(TEXT)),
        has_sample=BOOLEAN,
    ),
    "ModelList": _object(object=_one_of("list"), data=_list(_reference("Model"))),
    "Document": _object(
        id=TEXT,
        object=_one_of("document"),
        name=TEXT,
        created=WHOLE,
        bytes=WHOLE | {"description": "As uploaded."},
        characters=WHOLE | {"description": "Unicode code points of its text."},
        tokens=_or_null(WHOLE),
        status=_one_of("reading", "ready", "failed"),
        read_tokens=WHOLE,
        seconds_left=_or_null(NUMBER),
        error=_or_null(TEXT),
        pinned=BOOLEAN | {"description": "Its keys and values stay cached."},
        kept=BOOLEAN | {"description": "It is on the disk, and served again after a restart of the server."},
        why_not_kept=_or_null(TEXT),
    ),
    "DocumentList": _object(object=_one_of("list"), data=_list(_reference("Document"))),
    "DeletedDocument": _object(id=TEXT, object=_one_of("document"), deleted=_one_of(True)),
    "Passages": _object(
        characters=WHOLE,
        all=SPANS,
        layers={"type": "object", "additionalProperties": SPANS},
        note=_or_null(TEXT),
    ),
    "Sample": _object(name=TEXT, text=TEXT, questions=_list(TEXT), about=TEXT),
    "Health": _object(status=_one_of("ready", "loading", "restarting", "draining")),
}
"""By name; errors of a stream are events with an ``Error``."""
