"""OpenAI's POST /v1/responses: its requests as those of a chat, and answers in its form.

Responses are kept in memory, so that a request may go on with one by ``previous_response_id``.
"""

from __future__ import annotations

from collections import OrderedDict
from time import time
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field

from kvsift.server.answers import event, parser_of, usage
from kvsift.server.api_errors import ApiError
from kvsift.server.jobs import ServerJob
from kvsift.server.schemas import (
    FIRST_ERROR,
    MOST_TOKENS,
    MOST_TOOLS,
    Body,
    ChatRequest,
    Sparsity,
    neutral,
    validated,
)
from kvsift.server.tool_calls import AnswerBlock, AnswerParser, Dialect, blocks, call_id

MOST_KEPT, MOST_CHARACTERS = 1000, 64 << 20  # of responses, the oldest of which are forgotten
SAME = (  # as fields of a chat
    "model", "stream", "temperature", "top_p", "user", "safety_identifier", "prompt_cache_key", "sparsity", "document"
)  # fmt: skip
ECHOED = "instructions", "max_output_tokens", "temperature", "top_p", "previous_response_id", "user", "metadata"
KINDS = {  # of blocks: what their ids begin with, and their part, by which its events are named
    "content": ("msg", "output_text"),
    "reasoning": ("rs", "reasoning_text"),
    "call": ("fc", "function_call_arguments"),
}


class InputPart(Body):
    """A part of a text."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


Text = str | Annotated[list[InputPart], FIRST_ERROR]


class InputItem(Body):
    """A message, a call of a function, its result, or reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | None = None
    summary: Text = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: Text = ""


class ResponseTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Arguments of forced calls keep to the schema in any case.")


class ResponseToolChoice(Body):
    """The function that has to be called."""

    type: Literal["function"]
    name: str


class ResponsesRequest(Body):
    """Body of POST /v1/responses."""

    input: str | Annotated[list[InputItem], FIRST_ERROR]
    model: str | None = Field(None, max_length=400)
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=80)
    store: bool | None = Field(None, description="Keep the response for requests that go on with it.")
    stream: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False, description="0, greedy, by default.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: neutral(0) = None  # type: ignore[valid-type]
    tools: Annotated[list[ResponseTool], FIRST_ERROR] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = Field(None, description="Its format, as response_format of a chat.")
    reasoning: dict[str, Any] | None = Field(None, description="Its effort, as reasoning_effort of a chat.")
    metadata: dict[str, str] | None = None
    user: str | None = Field(None, max_length=1024)
    safety_identifier: str | None = Field(None, max_length=1024)
    prompt_cache_key: str | None = Field(None, max_length=1024)
    sparsity: str | Sparsity | None = None
    document: str | None = None
    background: neutral(False) = None  # type: ignore[valid-type]
    conversation: neutral() = None  # type: ignore[valid-type]
    prompt: neutral() = None  # type: ignore[valid-type]

    def chat(self, before: list[dict[str, Any]]) -> ChatRequest:
        """Return the request of a chat that asks the same after other messages.

        Raises:
            ApiError: if a chat cannot have such fields.
        """
        fields: dict[str, Any] = {name: getattr(self, name) for name in SAME}
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        fields["messages"] = [*system, *before, *_messages(self.input)]
        fields["max_tokens"] = self.max_output_tokens
        fields["parallel_tool_calls"] = self.parallel_tool_calls
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools or ()
        ]
        choice = self.tool_choice
        if isinstance(choice, ResponseToolChoice):
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            fields["tool_choice"] = choice
        fields["reasoning_effort"] = (self.reasoning or {}).get("effort")
        if isinstance(form := (self.text or {}).get("format"), dict) and (kind := form.get("type")) != "text":
            schema = {name: value for name, value in form.items() if name != "type"}
            fields["response_format"] = {"type": kind, **({kind: schema} if kind == "json_schema" else {})}
        return validated(ChatRequest, fields)


def _text(content: Text | None) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


def _messages(given: str | list[InputItem]) -> list[dict[str, Any]]:
    """The messages of a chat that say the same; reasoning, text and calls of one answer are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages = list[dict[str, Any]]()
    for item in given:
        if item.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            continue
        if item.type == "message" and item.role != "assistant":
            messages.append({"role": item.role or "user", "content": _text(item.content)})
            continue
        if not messages or messages[-1]["role"] != "assistant" or item.type == "reasoning":
            messages.append({"role": "assistant", "content": ""})
        last = messages[-1]
        if item.type == "message":
            last["content"] += _text(item.content)
        elif item.type == "reasoning":
            last["reasoning_content"] = _text(item.content) or _text(item.summary)
        else:
            function = {"name": item.name, "arguments": item.arguments}
            last.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
    return messages


class KeptResponses:
    """Messages of responses, without instructions, by API key and id."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], list[dict[str, Any]]] = OrderedDict()
        self._num_characters = 0

    def get(self, salt: str, key: str | None) -> list[dict[str, Any]]:
        """Return the messages of a response; of None there are none.

        Raises:
            ApiError: 404 if it is not kept.
        """
        if key is None:
            return []
        if (found := self._kept.get((salt, key))) is None:
            text = f"the response {key!r} is not kept: this server forgets old ones, and all when it ends."
            raise ApiError(404, text, "response_not_found", "previous_response_id")
        return found

    def keep(self, salt: str, key: str, messages: list[dict[str, Any]]) -> None:
        """Keep the messages of a response."""
        self._kept[salt, key] = messages
        self._num_characters += len(str(messages))
        while len(self._kept) > MOST_KEPT or self._num_characters > MOST_CHARACTERS:
            _, dropped = self._kept.popitem(last=False)
            self._num_characters -= len(str(dropped))


class ResponsesForm:
    """The form of the answer to one request.

    Args:
        chat, model, dialect: as of ``AnswerForm``.
        request: its body.
        salt: its API key.
        kept: keeps the response.
    """

    def __init__(
        self, chat: ChatRequest, model: str, dialect: Dialect, request: ResponsesRequest, salt: str, kept: KeptResponses
    ) -> None:
        self._chat, self._dialect, self._request, self._salt, self._kept = chat, dialect, request, salt, kept
        self._parser: AnswerParser | None = None
        self._items: list[dict[str, Any]] = []
        self._open: AnswerBlock | None = None  # the next item, until it ends
        self._id = ""  # of that item
        self._call_id = ""
        self._status, self._sequence = "completed", -1
        self._head = {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": int(time()),
            "model": model,
            "error": None,
            **{name: getattr(request, name) for name in ECHOED},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": request.model_dump()["tool_choice"] or "auto",
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "text": request.text or {"format": {"type": "text"}},
            "truncation": "disabled",
        }

    def whole(self, job: ServerJob) -> dict[str, Any]:
        """Return the answer to a request that has ended."""
        self.chunks(job)  # events, which are dropped
        return self._ended(job)

    def chunks(self, job: ServerJob) -> bytes:
        """Return events of a stream for what is new."""
        data = b""
        if self._parser is None:
            self._parser = parser_of(self._chat, self._dialect, job)
            begun = {"response": self._response("in_progress", None)}
            data += self._event("response.created", **begun) + self._event("response.in_progress", **begun)
        for piece in job.take():
            parts = self._parser.feed(piece.text, piece.finish is not None)
            for part in parts:
                [(kind, text, name)] = blocks([part])
                kind = "call" if part.kind == "arguments" else kind
                if self._open is None or name or self._open.kind != kind:
                    data += self._close() + self._begin(AnswerBlock(kind, "", name))
                assert self._open is not None
                if text:
                    self._open = self._open._replace(text=self._open.text + text)
                    data += self._text_event("delta", delta=text)
            if piece.finish is not None:
                self._status = "incomplete" if piece.finish == "length" else "completed"
                data += self._close(self._status)
        return data

    def last(self, job: ServerJob) -> bytes:
        """Return the end of a stream."""
        if job.error is not None:
            error = {"code": job.error.code, "message": job.error.message}
            failed = {**self._response("failed", None), "error": error}
            return self._event("response.failed", response=failed)
        return self._event(f"response.{self._status}", response=self._ended(job))

    def _begin(self, block: AnswerBlock) -> bytes:
        self._open, self._id, self._call_id = block, f"{KINDS[block.kind][0]}_{uuid4().hex}", call_id()
        data = self._event("response.output_item.added", output_index=len(self._items), item=self._item("in_progress"))
        if block.kind == "call":
            return data
        return data + self._item_event("response.content_part.added", content_index=0, part=self._part())

    def _close(self, status: str = "completed") -> bytes:
        if (block := self._open) is None:
            return b""
        data = self._text_event("done", **{"arguments" if block.kind == "call" else "text": block.text})
        if block.kind != "call":
            data += self._item_event("response.content_part.done", content_index=0, part=self._part())
        item = self._item(status)
        data += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open = None
        return data

    def _item(self, status: str) -> dict[str, Any]:
        """The item that is open."""
        block = self._open
        assert block is not None
        if block.kind == "call":
            call = {"call_id": self._call_id, "name": block.name, "arguments": block.text}
            return {"id": self._id, "type": "function_call", "status": status, **call}
        content = [] if status == "in_progress" else [self._part()]
        if block.kind == "reasoning":
            return {"id": self._id, "type": "reasoning", "status": status, "summary": [], "content": content}
        return {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self) -> dict[str, Any]:
        assert self._open is not None
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if self._open.kind == "content" else {}
        return {"type": KINDS[self._open.kind][1], "text": self._open.text, **more}

    def _text_event(self, end: str, **fields: Any) -> bytes:
        assert self._open is not None
        kind = self._open.kind
        more: dict[str, Any] = {} if kind == "call" else {"content_index": 0}
        if kind == "content":
            more["logprobs"] = []
        if kind == "call" and end == "done":
            more["name"] = self._open.name
        return self._item_event(f"response.{KINDS[kind][1]}.{end}", **fields, **more)

    def _item_event(self, kind: str, /, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._id, output_index=len(self._items), **fields)

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        self._sequence += 1
        return event({"type": kind, "sequence_number": self._sequence, **fields}, kind)

    def _ended(self, job: ServerJob) -> dict[str, Any]:
        """The whole response, which is kept, if that is not declined."""
        if self._request.store is not False:
            # arguments that were cut are no JSON
            whole = [item for item in self._items if item["type"] == "message" or item["status"] == "completed"]
            items = [InputItem.model_validate(item) for item in whole]
            given = [message.model_dump(exclude_none=True) for message in self._chat.messages]
            given = given[self._request.instructions is not None :]
            self._kept.keep(self._salt, self._head["id"], [*given, *_messages(items)])
        numbers = usage(job, self._chat)
        return self._response(
            self._status,
            {
                "input_tokens": numbers["prompt_tokens"],
                "input_tokens_details": numbers["prompt_tokens_details"],
                "output_tokens": numbers["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": numbers["total_tokens"],
                "sparsity": numbers["sparsity"],
            },
        )

    def _response(self, status: str, numbers: dict[str, Any] | None) -> dict[str, Any]:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        end = {"status": status, "incomplete_details": details, "usage": numbers}
        return {**self._head, **end, "output": self._items}
