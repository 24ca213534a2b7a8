"""Answers in OpenAI's form, whole and in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from time import time
from typing import Any
from uuid import uuid4

from kvsift import __version__
from kvsift.server.jobs import Piece, ServerJob
from kvsift.server.response_bodies import SparsityUsage, TokenCounts, Usage
from kvsift.server.schemas import AnyRequest, ChatRequest
from kvsift.server.tool_calls import PLAIN, AnswerParser, AnswerPart, Dialect, blocks, call_id

DONE = b"data: [DONE]\n\n"


def parser_of(request: AnyRequest, dialect: Dialect, job: ServerJob) -> AnswerParser:
    """Return a parser for one answer to a request."""
    if not isinstance(request, ChatRequest):
        return AnswerParser(PLAIN)
    names = {tool.function.name: (tool.function.parameters or {}).get("properties") for tool in request.used_tools}
    most = 1 if request.parallel_tool_calls is False else None
    if request.grammar is not None:  # in which there is no reasoning; calls are JSON
        tools = "json" if request.required_tools else "json-list" if names else None
        return AnswerParser(PLAIN, tools, names, most_calls=most)
    return AnswerParser(dialect, dialect.tools if names else None, names, job.begins_reasoning, most)


class AnswerForm:
    """The form of the answer to one request.

    Args:
        request: its body.
        model: name of the served model.
        dialect: what its answers have besides text.
    """

    def __init__(self, request: AnyRequest, model: str, dialect: Dialect = PLAIN) -> None:
        self._is_chat, self._request, self._dialect = isinstance(request, ChatRequest), request, dialect
        self._head = {"created": int(time()), "model": model, "system_fingerprint": f"kvsift-{__version__}"}
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid4().hex}"
        self._parsers: dict[int, AnswerParser] = {}

    def whole(self, job: ServerJob) -> dict[str, Any]:
        """Return the answer to a request that has ended."""
        choices = [self._choice(job, piece) for piece in job.take()]
        name = "chat.completion" if self._is_chat else "text_completion"
        return {"id": self._id, "object": name, **self._head, "choices": choices, "usage": usage(job, self._request)}

    def chunks(self, job: ServerJob) -> bytes:
        """Return events of a stream for what is new."""
        num_tokens = sum(len(answer.ids) for answer in job.answers)
        numbers = _token_counts(job, num_tokens) if self._request.wants_running_usage else None
        return b"".join(self._event([choice], numbers) for piece in job.take() for choice in self._deltas(job, piece))

    def last(self, job: ServerJob) -> bytes:
        """Return the end of a stream."""
        if job.error is not None:
            return event(job.error.as_dict())
        return (self._event([], usage(job, self._request)) if self._request.wants_usage else b"") + DONE

    def _choice(self, job: ServerJob, piece: Piece) -> dict[str, Any]:
        parser = parser_of(self._request, self._dialect, job)
        found = blocks(parser.feed(piece.text, True))
        text = "".join(block.text for block in found if block.kind == "content")
        body: dict[str, Any] = {"text": text}
        if self._is_chat:
            message = body["message"] = {"role": "assistant", "content": text, "refusal": None}
            del body["text"]
            if reasoning := "".join(block.text for block in found if block.kind == "reasoning"):
                message["reasoning_content"] = reasoning
            if calls := [_call(call_id(), block.name, block.text) for block in found if block.kind == "call"]:
                message |= {"content": text or None, "tool_calls": calls}
        finish = finish_of(piece, parser)
        return {"index": piece.index, **body, "logprobs": self._logprobs(piece), "finish_reason": finish}

    def _deltas(self, job: ServerJob, piece: Piece) -> Iterator[dict[str, Any]]:
        """Choices with text and calls, if there are any, and one with the end."""
        index, first = piece.index, piece.index not in self._parsers
        parser = self._parsers.setdefault(index, parser_of(self._request, self._dialect, job))
        num_calls = parser.num_calls
        parts = parser.feed(piece.text, piece.finish is not None)
        if not parts and (piece.logprobs or first):
            parts = [AnswerPart("content", "")]
        for number, part in enumerate(parts):
            num_calls += part.kind == "call"
            role = {"role": "assistant"} if first and not number else {}
            delta = {"delta": {**role, **_delta(part, num_calls - 1)}} if self._is_chat else {"text": part.text}
            logprobs = None if number else self._logprobs(piece)
            yield {"index": index, **delta, "logprobs": logprobs, "finish_reason": None}
        if piece.finish is not None:
            text: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
            yield {"index": index, **text, "logprobs": None, "finish_reason": finish_of(piece, parser)}

    @cached_property
    def _event_start(self) -> bytes:
        """What all events of a stream begin with."""
        name = "chat.completion.chunk" if self._is_chat else "text_completion"
        return event({"id": self._id, "object": name, **self._head}).removesuffix(b"}\n\n")

    def _event(self, choices: list[dict[str, Any]], numbers: TokenCounts | None = None) -> bytes:
        rest = {"choices": choices, "usage": numbers} if self._request.wants_usage else {"choices": choices}
        return self._event_start + b"," + _encode(rest)[1:] + b"\n\n"

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self._request.num_logprobs is None:
            return None
        if self._is_chat:
            content = [{**_token(text, data, value), "top_logprobs": [_token(*each[:3]) for each in top]}
                       for text, data, value, _, top in piece.logprobs]  # fmt: skip
            return {"content": content, "refusal": None}
        return {
            "tokens": [text for text, *_ in piece.logprobs],
            "token_logprobs": [value for _, _, value, *_ in piece.logprobs],
            "top_logprobs": [None if value is None else _by_text(top) for _, _, value, _, top in piece.logprobs],
            "text_offset": [offset for *_, offset, _ in piece.logprobs],
        }


def finish_of(piece: Piece, parser: AnswerParser) -> str | None:
    """Return why an answer ended; None before."""
    return "tool_calls" if parser.num_calls and piece.finish == "stop" else piece.finish


def _call(key: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


def _delta(part: AnswerPart, number: int) -> dict[str, Any]:
    """A part of a chat; calls have numbers."""
    if part.kind == "call":
        return {"tool_calls": [{"index": number, **_call(call_id(), part.text, "")}]}
    if part.kind == "arguments":
        return {"tool_calls": [{"index": number, "function": {"arguments": part.text}}]}
    return {"content" if part.kind == "content" else "reasoning_content": part.text}


def event(body: Mapping[str, Any], name: str = "") -> bytes:
    """Return one server-sent event, in ASCII: clients that read lines of text end them at U+0085 and U+2028 too."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + _encode(body) + b"\n\n"


def _encode(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def usage(job: ServerJob, request: AnyRequest) -> Usage:
    """Return the numbers of a request: sums over its answers; a prompt counts once, however many its answers."""
    numbers = [answer.usage for answer in job.answers]
    cached = sum(each["cached_tokens"] for each in numbers[:: request.samples])
    first = numbers[0]
    sparsity: SparsityUsage = {
        "plan": first["plan"],
        "density": _mean(numbers, "density"),
        "visible_tokens": _mean(numbers, "visible_tokens"),
        "recovery": _mean(numbers, "recovery"),
        "bytes_read": sum(each["bytes_read"] for each in numbers),
        "bytes_dense": sum(each["bytes_dense"] for each in numbers),
        "guard_events": sum(each["guard_events"] for each in numbers),
        "reuse": {"cached_tokens": cached, "why_not": first["no_reuse"] or None},
    }
    if request.plan.exact:
        sparsity["exact"] = [each["exact"] for each in numbers]
    if request.plan.passages:
        sparsity["passages"] = first["passages"]
    return {
        **_token_counts(job, sum(each["completion_tokens"] for each in numbers)),
        "prompt_tokens_details": {"cached_tokens": cached},
        "sparsity": sparsity,
    }


def _token_counts(job: ServerJob, completion: int) -> TokenCounts:
    prompt = sum(job.prompt_tokens or ())
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _mean(numbers: list[dict[str, Any]], key: str) -> float | None:
    """Mean over tokens that were decoded after a first one; None without any."""
    known = [(each[key], each["completion_tokens"]) for each in numbers if each[key] is not None]
    weight = sum(tokens for _, tokens in known)
    return sum(value * tokens for value, tokens in known) / weight if weight else None


def _by_text(top: list[list[Any]]) -> dict[str, float]:
    """The likeliest tokens by their texts, and by their ids those whose text an earlier one has."""
    values: dict[str, float] = {}
    for text, _, value, token in top:
        values[text if text not in values else f"token_id:{token}"] = value
    return values


def _token(text: str, data: list[int] | None, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": data}
