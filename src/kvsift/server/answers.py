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
from kvsift.server.responses import SparsityUsage, TokenCounts, Usage
from kvsift.server.schemas import AnyRequest, ChatRequest

DONE = b"data: [DONE]\n\n"


class AnswerForm:
    """The form of the answer to one request.

    Args:
        request: its body.
        model: name of the served model.
    """

    def __init__(self, request: AnyRequest, model: str) -> None:
        self._is_chat, self._request = isinstance(request, ChatRequest), request
        self._head = {"created": int(time()), "model": model, "system_fingerprint": f"kvsift-{__version__}"}
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid4().hex}"
        self._begun: set[int] = set()

    def whole(self, job: ServerJob) -> dict[str, Any]:
        """Return the answer to a request that has ended."""
        choices = [self._choice(piece) for piece in job.take()]
        name = "chat.completion" if self._is_chat else "text_completion"
        return {"id": self._id, "object": name, **self._head, "choices": choices, "usage": usage(job, self._request)}

    def chunks(self, job: ServerJob) -> bytes:
        """Return events of a stream for what is new."""
        num_tokens = sum(len(answer.ids) for answer in job.answers)
        numbers = _token_counts(job, num_tokens) if self._request.wants_running_usage else None
        return b"".join(self._event([choice], numbers) for piece in job.take() for choice in self._deltas(piece))

    def last(self, job: ServerJob) -> bytes:
        """Return the end of a stream."""
        return (self._event([], usage(job, self._request)) if self._request.wants_usage else b"") + DONE

    def _choice(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        text: dict[str, Any] = {"message": message} if self._is_chat else {"text": piece.text}
        return {"index": piece.index, **text, "logprobs": self._logprobs(piece), "finish_reason": piece.finish}

    def _deltas(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """A choice with text, if there is any, and one with the end."""
        index, first = piece.index, piece.index not in self._begun
        if piece.text or piece.logprobs or first:
            self._begun.add(index)
            role = {"role": "assistant"} if first else {}
            delta = {"delta": {**role, "content": piece.text}} if self._is_chat else {"text": piece.text}
            yield {"index": index, **delta, "logprobs": self._logprobs(piece), "finish_reason": None}
        if piece.finish is not None:
            text: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
            yield {"index": index, **text, "logprobs": None, "finish_reason": piece.finish}

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
            "top_logprobs": [_by_text(top) for *_, top in piece.logprobs],
            "text_offset": [offset for *_, offset, _ in piece.logprobs],
        }


def event(body: Mapping[str, Any]) -> bytes:
    """Return one server-sent event, in ASCII: clients that read lines of text end them at U+0085 and U+2028 too."""
    return b"data: " + _encode(body) + b"\n\n"


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
