"""Anthropic's POST /v1/messages: its requests as those of a chat, and answers in its form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field

from kvsift.server.answers import event, finish_of, parser_of, usage
from kvsift.server.jobs import ServerJob
from kvsift.server.schemas import (
    FIRST_ERROR,
    MOST_MESSAGES,
    MOST_TOKENS,
    MOST_TOOLS,
    Body,
    ChatRequest,
    Sparsity,
    Stop,
    neutral,
    validated,
)
from kvsift.server.tool_calls import AnswerParser, AnswerPart, Dialect, blocks, call_id

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
NOT_ENDED = {"stop_reason": None, "stop_sequence": None}
SAME = "model", "max_tokens", "stream", "temperature", "top_p", "top_k", "sparsity", "document"  # as fields of a chat
EMPTY = {
    "content": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "arguments": ("input_json_delta", "partial_json"),
}


class MessageBlock(Body):
    """A part of a message: text, reasoning, a call of a tool or its result."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str = ""
    content: str | Annotated[list[MessageBlock], FIRST_ERROR] = ""
    is_error: bool | None = None


Content = str | Annotated[list[MessageBlock], FIRST_ERROR]


class AnthropicMessage(Body):
    """A message of a chat."""

    role: Literal["user", "assistant"]
    content: Content

    def chat(self) -> list[dict[str, Any]]:
        """Return the messages of a chat that say the same: results of tools are messages of their own, before it."""
        found = [MessageBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        results = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)}
            for block in found
            if block.type == "tool_result"
        ]
        calls = [
            {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input or {})}}
            for block in found
            if block.type == "tool_use"
        ]
        message: dict[str, Any] = {"role": self.role, "content": text_of(found)}
        if calls:
            message["tool_calls"] = calls
        if reasoning := "\n".join(block.thinking for block in found if block.thinking):
            message["reasoning_content"] = reasoning
        return [*results, message] if calls or not results or message["content"] else results


class MessageTool(Body):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class MessageToolChoice(Body):
    """Whether, and which, tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(Body):
    """Body of POST /v1/messages, and of /v1/messages/count_tokens."""

    model: str | None = Field(None, max_length=400)
    messages: Annotated[list[AnthropicMessage], FIRST_ERROR] = Field(min_length=1, max_length=MOST_MESSAGES)
    system: Content | None = None
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    stream: bool | None = None
    stop_sequences: list[Stop] | None = None
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False, description="0, greedy, by default.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="-1 and 0: all.")
    tools: Annotated[list[MessageTool], FIRST_ERROR] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: MessageToolChoice | None = None
    thinking: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    sparsity: str | Sparsity | None = None
    document: str | None = None
    mcp_servers: neutral([]) = None  # type: ignore[valid-type]
    container: neutral() = None  # type: ignore[valid-type]

    def chat(self, dialect: Dialect) -> ChatRequest:
        """Return the request of a chat that asks the same.

        Raises:
            ApiError: if a chat cannot have such fields.
        """
        messages = [] if self.system is None else [{"role": "system", "content": text_of(self.system)}]
        fields: dict[str, Any] = {
            "messages": messages + [each for message in self.messages for each in message.chat()],
            "stop": self.stop_sequences,
            **{name: getattr(self, name) for name in SAME},
        }
        if self.tools:
            fields["tools"] = [
                {
                    "type": "function",
                    "function": {"name": each.name, "description": each.description, "parameters": each.input_schema},
                }
                for each in self.tools
            ]
        if (choice := self.tool_choice) is not None:
            named = {"type": "function", "function": {"name": choice.name or ""}}
            fields["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.thinking is not None and "enable_thinking" in dialect.variables:
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinking.get("type") != "disabled"}
        if self.metadata is not None:
            fields["user"] = self.metadata.get("user_id")
        return validated(ChatRequest, fields)


def text_of(content: Content) -> str:
    """Return the text of a content."""
    return content if isinstance(content, str) else "\n".join(each.text for each in content if each.type == "text")


class MessagesForm:
    """The form of the answer to one request; arguments as of ``AnswerForm``."""

    def __init__(self, request: ChatRequest, model: str, dialect: Dialect) -> None:
        self._request, self._model, self._dialect = request, model, dialect
        self._id = f"msg_{uuid4().hex}"
        self._parser: AnswerParser | None = None
        self._open, self._index, self._finish = "", -1, "stop"  # kind and number of the last block

    def whole(self, job: ServerJob) -> dict[str, Any]:
        """Return the answer to a request that has ended."""
        [piece] = job.take()
        parser = parser_of(self._request, self._dialect, job)
        content = []
        for kind, text, name in blocks(parser.feed(piece.text, True)):
            if kind == "call":
                content.append({**_tool_use(name), "input": _arguments(text)})
            else:
                content.append({**EMPTY[kind], DELTAS[kind][1]: text})
        return self._message(content, self._reason(job, finish_of(piece, parser)), _usage(job, self._request))

    def chunks(self, job: ServerJob) -> bytes:
        """Return events of a stream for what is new."""
        events = list[dict[str, Any]]()
        if self._parser is None:
            self._parser = parser_of(self._request, self._dialect, job)
            numbers = {"input_tokens": sum(job.prompt_tokens or ()), "output_tokens": 0}
            events.append({"type": "message_start", "message": self._message([], NOT_ENDED, numbers)})
        for piece in job.take():
            for part in self._parser.feed(piece.text, piece.finish is not None):
                events += self._part(part)
            self._finish = finish_of(piece, self._parser) or self._finish
        return b"".join(event(each, each["type"]) for each in events)

    def last(self, job: ServerJob) -> bytes:
        """Return the end of a stream."""
        if job.error is not None:
            return event({"type": "error", **job.error.as_dict()}, "error")
        delta = self._reason(job, self._finish)
        events = [*self._closed(), {"type": "message_delta", "delta": delta, "usage": _usage(job, self._request)}]
        return b"".join(event(each, each["type"]) for each in [*events, {"type": "message_stop"}])

    def _message(self, content: list[Any], reason: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}
        return {**head, **reason, "usage": numbers}

    def _reason(self, job: ServerJob, finish: str | None) -> dict[str, Any]:
        """Why the message ended."""
        stop = job.answers[0].stop
        if finish == "stop" and stop is not None and stop in self._request.stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {**NOT_ENDED, "stop_reason": finish and REASONS[finish]}

    def _part(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        if part.kind == "call" or part.kind != self._open:
            yield from self._closed()
            self._index += 1
            self._open = "arguments" if part.kind == "call" else part.kind
            block = _tool_use(part.text) if part.kind == "call" else EMPTY[part.kind]
            yield {"type": "content_block_start", "index": self._index, "content_block": block}
        if part.kind != "call":
            kind, name = DELTAS[part.kind]
            yield {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, name: part.text}}

    def _closed(self) -> list[dict[str, Any]]:
        return [{"type": "content_block_stop", "index": self._index}] if self._open else []


def _tool_use(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id(), "name": name, "input": {}}


def _arguments(text: str) -> dict[str, Any]:
    """Arguments as an object; those that are none, of an answer that was cut, as Anthropic's documentation has them."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


def _usage(job: ServerJob, request: ChatRequest) -> dict[str, Any]:
    """The numbers of a request; tokens that were cached are not of the input."""
    numbers = usage(job, request)
    cached = numbers["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": numbers["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": numbers["completion_tokens"],
        "sparsity": numbers["sparsity"],
    }
