"""Bodies of responses, from which FastAPI makes their part of the OpenAPI document. Those of requests are in
``schemas``."""

from __future__ import annotations

from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,  # pydantic needs this one before Python 3.12
)

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

Count = Annotated[int, Field(ge=0)]
ErrorType = Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
Span = tuple[Count, Count, float]  # first character, the one after the last, and how much of it was selected


@with_config(ConfigDict(extra="forbid"))
class ResponseBody(TypedDict):
    """A JSON object without further fields."""


class ErrorDetails(ResponseBody):
    message: str
    type: ErrorType
    param: str | None
    code: str


class Error(ResponseBody):
    """The error of any request; in a stream it is an event."""

    type: NotRequired[Annotated[Literal["error"], Field(description="In Anthropic's form.")]]
    error: ErrorDetails


class Health(ResponseBody):
    status: Literal["ready", "loading", "restarting", "draining"]


class DocumentKinds(ResponseBody):
    max_bytes: Count
    kinds: list[str]


class Model(ResponseBody):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count | None
    plans: list[str]
    documents: DocumentKinds
    has_sample: bool


class ModelList(ResponseBody):
    object: Literal["list"]
    data: list[Model]


class SampleDocument(ResponseBody):
    name: str
    text: str
    questions: list[str]
    about: str


class DocumentObject(ResponseBody):
    id: str
    object: Literal["document"]
    name: str
    created: Count
    bytes: Annotated[Count, Field(description="As uploaded.")]
    characters: Annotated[Count, Field(description="Unicode code points of its text.")]
    tokens: Count | None
    status: Literal["reading", "ready", "failed"]
    read_tokens: Count
    seconds_left: float | None
    error: str | None
    pinned: Annotated[bool, Field(description="Its keys and values stay cached.")]
    kept: Annotated[bool, Field(description="It is on the disk, and served again after a restart of the server.")]
    why_not_kept: str | None


class DocumentList(ResponseBody):
    object: Literal["list"]
    data: list[DocumentObject]


class DeletedDocument(ResponseBody):
    id: str
    object: Literal["document"]
    deleted: Literal[True]


class CachedTokens(ResponseBody):
    cached_tokens: Count


class PrefixReuse(CachedTokens):
    why_not: str | None


class PassageSpans(ResponseBody):
    characters: Count
    all: list[Span]
    layers: dict[str, list[Span]]
    note: str | None


class SparsityUsage(ResponseBody):
    plan: str
    density: float | None
    visible_tokens: float | None
    recovery: float | None
    bytes_read: Count
    bytes_dense: Count
    guard_events: Count
    reuse: PrefixReuse
    exact: NotRequired[Annotated[list[dict[str, Any]], Field(description="Of each answer, if it was asked for.")]]
    passages: NotRequired[Annotated[PassageSpans, Field(description="If they were asked for.")]]


class TokenCounts(ResponseBody):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class Usage(TokenCounts):
    prompt_tokens_details: CachedTokens
    sparsity: SparsityUsage


class ChatToken(ResponseBody):
    token: str
    logprob: float
    bytes: list[Count] | None


class ChosenChatToken(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(ResponseBody):
    content: list[ChosenChatToken]
    refusal: None


class CompletionLogprobs(ResponseBody):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class AnswerChoice(ResponseBody):
    index: Count
    finish_reason: Literal["stop", "length", "tool_calls"]


class CompletionChoice(AnswerChoice):
    text: str
    logprobs: CompletionLogprobs | None


class FunctionCall(ResponseBody):
    name: str
    arguments: Annotated[str, Field(description="JSON, as far as the model wrote it.")]


class AnswerToolCall(ResponseBody):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(ResponseBody):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[AnswerToolCall]]


class ChatChoice(AnswerChoice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class AnswerBody(ResponseBody):
    id: str
    created: Count
    model: str
    system_fingerprint: str
    usage: Usage


class Completion(AnswerBody):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(AnswerBody):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class MessageUsage(ResponseBody):
    input_tokens: Count
    cache_read_input_tokens: Count
    cache_creation_input_tokens: Count
    output_tokens: Count
    sparsity: SparsityUsage


class MessageBody(ResponseBody):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: Annotated[list[dict[str, Any]], Field(description="Blocks: text, thinking and tool_use.")]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use"]
    stop_sequence: None
    usage: MessageUsage


class InputTokens(ResponseBody):
    input_tokens: Count


class ResponseUsage(ResponseBody):
    input_tokens: Count
    input_tokens_details: CachedTokens
    output_tokens: Count
    output_tokens_details: dict[str, Count]
    total_tokens: Count
    sparsity: SparsityUsage


@with_config(ConfigDict(extra="allow"))
class ResponseObject(TypedDict):
    """A response, with fields of its request."""

    id: str
    object: Literal["response"]
    created_at: Count
    model: str
    status: Literal["completed", "incomplete"]
    output: Annotated[list[dict[str, Any]], Field(description="Items: message, reasoning and function_call.")]
    usage: ResponseUsage


class TokenList(ResponseBody):
    count: Count
    max_model_len: Count | None
    tokens: list[Count]
    token_strs: list[str] | None


class DetokenizedText(ResponseBody):
    prompt: str
