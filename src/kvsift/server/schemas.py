"""Bodies of requests: what is supported, and what is known but has to be left at its neutral value. Other fields are
ignored, unless they seem to be misspelled or ask for what is not here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator
from pydantic_core import from_json

from kvsift.errors import unknown
from kvsift.server.api_errors import ApiError
from kvsift.server.tool_calls import Dialect

MOST_ROWS = 64  # answers of one request
MOST_TOKENS = 1_000_000  # of an answer; the model's positions are fewer
COMPLETION_TOKENS = 16  # OpenAI's default
MOST_LOGPROBS = 20
MOST_FIELDS = 100  # of any object: each that is wrong would be an error of its own
MOST_PARTS = 100_000  # objects and lists of a body
FIRST_ERROR = Field(fail_fast=True)  # of a list
MOST_TOOLS = 128
MOST_MESSAGES = 2048  # agents need many
MISSPELLED = 0.8  # similarity (difflib) to a known field
NOT_HERE = {  # fields of other servers, without which answers would be others
    "allowed_token_ids", "bad_words", "background", "conversation", "format", "guided_choice", "guided_grammar",
    "guided_json", "guided_regex", "include_stop_str_in_output", "length_penalty", "logits_processors",
    "max_new_tokens", "max_output_tokens", "min_tokens", "mirostat", "num_predict", "output_config", "output_format",
    "prompt_logprobs", "response_format", "stop_sequences", "tfs_z", "top_a", "truncate_prompt_tokens", "typical_p",
    "use_beam_search",
}  # fmt: skip
ELSEWHERE = {  # fields of other routes, without which answers would be others, and the values that change none
    "best_of": 1, "echo": False, "frequency_penalty": 0, "ignore_eos": False, "input": "", "instructions": "",
    "logit_bias": {}, "logprobs": False, "max_completion_tokens": None, "max_tokens": None, "messages": [], "min_p": 0,
    "n": 1, "presence_penalty": 0, "reasoning_effort": None, "repetition_penalty": 1, "seed": None, "stop": [],
    "stop_token_ids": [], "structured_outputs": {}, "suffix": "", "system": "", "tools": [], "top_k": -1,
}  # fmt: skip
ECHOES = {  # of answers, as clients send them back, and hints for caches that others have
    "annotations", "cache_control", "encrypted_content", "id", "index", "refusal", "signature", "status",
}  # fmt: skip
SCHEMA_REFERENCE = "#/components/schemas/{model}"  # in the OpenAPI document


def neutral(*values: Any) -> Any:
    """Return the type of a known field that has no effect here: it must be null, or one of these values."""

    def check(value: Any) -> None:
        if value is not None and not any(type(value) is type(other) and value == other for other in values):
            leave = f" unless it is {', '.join(map(repr, values))}" if values else ""
            raise ValueError(f"is not supported by this server; leave it out{leave}")

    return Annotated[Any, AfterValidator(check), WithJsonSchema({"enum": [None, *values]})]


class Strict(BaseModel):
    """A JSON object without unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Body(BaseModel):
    """A JSON object whose unknown fields are ignored (``ignored_fields``)."""

    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="Every event has the tokens so far; as of vLLM.")
    include_obfuscation: neutral(False) = None  # type: ignore[valid-type]


class NamedSchema(Body):
    """A JSON schema of an answer."""

    name: str | None = Field(None, max_length=256)
    description: str | None = None
    definition: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = Field(None, description="Answers keep to the schema in any case.")


class ResponseFormat(Body):
    """What the text of an answer is."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def check_schema(self) -> ResponseFormat:
        """Refuse a type without its schema, and a schema of another type."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('needs json_schema={"schema": ...} with type="json_schema", and with that alone')
        return self


class StructuredOutputs(Strict):
    """What the text of an answer is; as of vLLM."""

    json_schema: dict[str, Any] | bool | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = Field(None, description="Of the whole answer, in the syntax of Rust's regex.")
    choice: list[str] | None = Field(None, min_length=1, max_length=1000)
    grammar: str | None = Field(None, description="In the syntax of Lark, or of llama.cpp (GBNF).")

    @model_validator(mode="after")
    def check_one(self) -> StructuredOutputs:
        """Refuse several, and none."""
        given = [self.json_schema is not None, self.json_object, self.regex, self.choice, self.grammar]
        if sum(map(bool, given)) != 1:
            raise ValueError("must have one of json, json_object, regex, choice and grammar")
        return self

    def fields(self) -> dict[str, str]:
        """Return the fields of a ``Grammar``."""
        if self.choice is not None:
            return {"kind": "choice", "text": json.dumps(self.choice)}
        if self.regex is not None:
            return {"kind": "regex", "text": self.regex}
        if self.grammar is not None:
            return {"kind": "grammar", "text": self.grammar}
        schema = {"type": "object"} if self.json_schema is None else self.json_schema
        return {"kind": "json_schema", "text": schema if isinstance(schema, str) else json.dumps(schema)}


class Sparsity(Strict):
    """The plan of one request."""

    plan: Annotated[str, Field(max_length=400)] | None = None
    min_recovery: Annotated[float, Field(gt=0, le=1)] | None = None
    passages: bool | None = None
    exact: bool | None = None


Stop = Annotated[str, Field(max_length=256)]


TokenName = Annotated[str, Field(pattern=r"^\d{1,9}$")]


class TextRequest(Body):
    """Fields that all requests for text share."""

    model: str | None = Field(None, max_length=400)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=16)
    stop: Stop | Annotated[list[Stop], FIRST_ERROR] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], FIRST_ERROR] | None = Field(None, max_length=64)
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out of the text; by default only bos, eos and others with such a role."
    )
    seed: int | None = Field(None, ge=0, lt=1 << 62)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False, description="0, greedy, by default.")
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    sparsity: Annotated[str, Field(max_length=400)] | Sparsity | None = None
    user: str | None = Field(None, max_length=1024)
    safety_identifier: str | None = Field(
        None, max_length=1024, description="Whose request it is, as user: without API keys, users get equal shares."
    )
    prompt_cache_key: str | None = Field(
        None, max_length=1024, description="Prompts share what was read with those of the same key alone."
    )
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.001, le=1000)
    logit_bias: dict[TokenName, Annotated[float, Field(ge=-100, le=100)]] | None = None
    top_k: int | None = Field(None, ge=-1, description="-1 and 0: all.")
    min_p: float | None = Field(None, ge=0, le=1)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    ignore_eos: bool | None = Field(None, description="Go on after the end of the text, for load tests.")

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of a ``Sampling``, but the seed; those that are left out have its defaults."""
        names = "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        given["logit_bias"] = self.logit_bias and [[int(token), bias] for token, bias in self.logit_bias.items()]
        given["top_k"] = None if self.top_k is None else max(self.top_k, 0)
        return {name: value for name, value in given.items() if value is not None}

    @property
    def grammar(self) -> dict[str, str] | None:
        """Fields of the ``Grammar`` of the answer; None: any text is one."""
        if self.structured_outputs is not None:
            return self.structured_outputs.fields()
        if self.response_format is None or self.response_format.type == "text":
            return None
        named = self.response_format.json_schema
        return {"kind": "json_schema", "text": json.dumps({"type": "object"} if named is None else named.definition)}

    @property
    def samples(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def end_user(self) -> str:
        """Whose request it is, as far as the client says so."""
        return self.safety_identifier or self.user or ""

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every event of a stream has the tokens so far."""
        return self.wants_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def plan(self) -> Sparsity:
        """The plan that the request names."""
        return Sparsity(plan=self.sparsity) if isinstance(self.sparsity, str) else self.sparsity or Sparsity()

    @model_validator(mode="after")
    def check(self) -> TextRequest:
        """Refuse fields that need or exclude each other."""
        if self.samples > 1 and not self.temperature:
            raise ValueError(f"n={self.n} greedy answers are the same one; give a temperature above 0")
        if len(self.stops) > 16:
            raise ValueError(f"stop has {len(self.stops)} texts, and may have 16")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream=true")
        if self.stream_options is not None and self.stream_options.continuous_usage_stats and not self.wants_usage:
            raise ValueError("stream_options.continuous_usage_stats needs include_usage=true")
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError("response_format and structured_outputs both say what the answer is; give one of them")
        if self.plan.passages:
            self._check_passages()
            if self.plan.exact:
                raise ValueError("sparsity.exact reads everything, so there are no passages; leave one of them out")
        return self

    def _check_passages(self) -> None:
        """Refuse a request whose answer would not have its passages."""
        if getattr(self, "document", None) is None:
            raise ValueError("sparsity.passages are those of a document; name one in a chat: POST /v1/documents")
        if self.samples > 1:
            raise ValueError(f"sparsity.passages are those of one answer, and n={self.n}")
        if self.stream and not self.wants_usage:
            raise ValueError("sparsity.passages come with the usage; set stream_options.include_usage")


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], FIRST_ERROR]


class CompletionRequest(TextRequest):
    """Body of POST /v1/completions."""

    prompt: str | Annotated[list[str], FIRST_ERROR] | TokenIds | Annotated[list[TokenIds], FIRST_ERROR]
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: neutral(1) = None  # type: ignore[valid-type]
    echo: bool | None = Field(None, description="Begin with the prompt, and with its log-probabilities, if asked for.")
    max_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS, description="0: nothing but the echo.")
    suffix: neutral("") = None  # type: ignore[valid-type]

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as text or tokens."""
        if isinstance(self.prompt, str) or all(isinstance(part, int) for part in self.prompt):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    @property
    def num_logprobs(self) -> int | None:
        """The likeliest tokens to return with each token; None: no log-probabilities."""
        return self.logprobs

    @model_validator(mode="after")
    def check_prompts(self) -> CompletionRequest:
        """Refuse empty prompts, and too many."""
        if not all(self.prompts):
            raise ValueError("the prompt is empty")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 needs echo=true, without which there would be no answer")
        if self.echo and (self.plan.exact or self.grammar is not None):
            raise ValueError("echo, which begins with the prompt, takes neither a format of the answer nor exact")
        if (rows := len(self.prompts) * self.samples) > MOST_ROWS:
            raise ValueError(f"{rows} answers are asked for, and one request may have {MOST_ROWS}")
        return self

    def prompt_fields(self) -> dict[str, Any]:
        """Return the fields of an ``AnswerRequest`` that have the prompts and their limit."""
        return {
            "prompts": self.prompts,
            "max_tokens": COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens,
        }


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """A call of a function by the model, and its arguments as JSON."""

    name: str = Field(max_length=256)
    arguments: str = ""

    def parsed(self) -> dict[str, Any]:
        """Return the arguments."""
        value = json.loads(self.arguments or "{}")
        if not isinstance(value, dict):
            raise ValueError
        return value

    @model_validator(mode="after")
    def check_arguments(self) -> CalledFunction:
        """Refuse arguments that no template could write."""
        try:
            self.parsed()
        except (ValueError, RecursionError):
            raise ValueError(f"the arguments of the call of {self.name[:80]!r} are no JSON object") from None
        return self


class ToolCall(Body):
    """A call of a tool in a message of the assistant."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    """A message of a chat. That of an assistant may have no content, as clients repeat it; it is empty then."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], FIRST_ERROR] | None = None
    reasoning_content: str | None = Field(None, description="Of the assistant, for templates that write it.")
    tool_calls: Annotated[list[ToolCall], FIRST_ERROR] | None = Field(None, max_length=MOST_TOOLS)
    tool_call_id: str | None = Field(None, max_length=256, description="The call that a message of a tool answers.")
    name: str | None = Field(None, max_length=256)
    audio: neutral() = None  # type: ignore[valid-type]
    function_call: neutral() = None  # type: ignore[valid-type]

    @model_validator(mode="after")
    def check_content(self) -> ChatMessage:
        """Refuse a message of others without content, and calls of others."""
        if self.content is None and self.role != "assistant":
            raise ValueError("has none: the content of a message is text, and only that of an assistant may be null")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are those of an assistant, and the role is {self.role!r}")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message with its content as one text, as chat templates read it."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.reasoning_content and self.role == "assistant":
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function",
                 "function": {"name": call.function.name, "arguments": call.function.parsed()}}
                for call in self.tool_calls
            ]  # fmt: skip
        return message


class Function(Body):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Arguments of forced calls keep to the schema in any case.")


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Return the tool as chat templates read it."""
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        about = {"description": self.function.description or "", "parameters": parameters}
        return {"type": "function", "function": {"name": self.function.name, **about}}


class FunctionName(Body):
    """The name of a function."""

    name: str


class ToolChoice(Body):
    """The function that has to be called."""

    type: Literal["function"]
    function: FunctionName


TemplateVariables = dict[str, bool | int | float | str | None]


class ChatRequest(TextRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    document: str | None = Field(None, max_length=80, description="Id of a document, before the first message.")
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: Annotated[list[Tool], FIRST_ERROR] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: neutral([]) = None  # type: ignore[valid-type]
    function_call: neutral("none", "auto") = None  # type: ignore[valid-type]
    modalities: neutral(["text"]) = None  # type: ignore[valid-type]
    audio: neutral() = None  # type: ignore[valid-type]
    web_search_options: neutral() = None  # type: ignore[valid-type]
    continue_final_message: bool | None = Field(None, description="Go on with the last message, the assistant's.")
    add_generation_prompt: bool | None = Field(None, description="Whether the answer is a message of its own.")
    reasoning_effort: str | None = Field(None, max_length=16, description="For chat templates that read it.")
    chat_template_kwargs: TemplateVariables | None = Field(None, description="Variables of the chat template.")

    @property
    def used_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else list(self.tools or ())

    @property
    def required_tools(self) -> list[Tool]:
        """The tools of which one has to be called; none: no call is required."""
        if isinstance(self.tool_choice, ToolChoice):
            return [tool for tool in self.used_tools if tool.function.name == self.tool_choice.function.name]
        return self.used_tools if self.tool_choice == "required" else []

    @property
    def num_logprobs(self) -> int | None:
        """The likeliest tokens to return with each token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def check_fields(self) -> ChatRequest:
        """Refuse fields that need or exclude each other."""
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs need logprobs=true")
        if None not in (both := (self.max_tokens, self.max_completion_tokens)) and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        continues, begins = bool(self.continue_final_message), self.add_generation_prompt
        if begins is not None and begins == continues:
            raise ValueError("add_generation_prompt is the opposite of continue_final_message; give the latter alone")
        if continues and (self.messages[-1].role != "assistant" or not self.messages[-1].content or self.plan.passages):
            raise ValueError("continue_final_message goes on with a text of the assistant, and without passages")
        if "tools" in (self.chat_template_kwargs or ()):
            raise ValueError("tools are a field of their own, not one of chat_template_kwargs")
        if self.tool_choice not in (None, "none", "auto") and not self.required_tools:
            raise ValueError("tool_choice asks for a call, and tools have no such function")
        own = super().grammar
        if own is not None and self.required_tools:
            raise ValueError("tool_choice asks for a call, and not for an answer of a format; leave one of them out")
        if own is not None and own["kind"] != "json_schema" and self.used_tools:
            raise ValueError("beside tools an answer can be JSON, and of no other format; give tool_choice='none'")
        return self

    @property
    def grammar(self) -> dict[str, str] | None:
        """As of other requests; calls that are required, or may come in place of an answer of a format, are a JSON
        list."""
        own = super().grammar
        if own is None and not self.required_tools:
            return None
        if own is not None and not self.used_tools:
            return own
        calls = [
            {"type": "object",
             "properties": {"name": {"const": tool.function.name},
                            "arguments": {"$id": f"tool:{number}", **(tool.function.parameters or {"type": "object"})}},
             "required": ["name", "arguments"], "additionalProperties": False}
            for number, tool in enumerate(self.required_tools or self.used_tools)
        ]  # fmt: skip
        is_one = self.parallel_tool_calls is False or isinstance(self.tool_choice, ToolChoice)
        most = {"maxItems": 1} if is_one else {}
        schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most}
        if own is not None:
            answer = json.loads(own["text"])
            schema = {"anyOf": [schema, answer if isinstance(answer, bool) else {"$id": "answer:0", **answer}]}
        return {"kind": "json_schema", "text": json.dumps(schema)}

    def prompt_fields(self) -> dict[str, Any]:
        """Return the fields of an ``AnswerRequest`` that have the prompt and its limit."""
        most = self.max_completion_tokens or self.max_tokens
        continues = bool(self.continue_final_message)
        asked = {"max_tokens": most, "document": self.document, "continues": continues}
        return {"messages": self.plain_messages(), **asked}

    def plain_messages(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates read them. Results of tools have their names."""
        names = {call.id: call.function.name for message in self.messages for call in message.tool_calls or ()}
        messages = [message.plain() for message in self.messages]
        for message, given in zip(messages, self.messages):
            if given.role == "tool":
                message["tool_call_id"] = given.tool_call_id or ""
                message["name"] = given.name or names.get(given.tool_call_id or "", "")
        return messages

    def template_variables(self, dialect: Dialect) -> dict[str, Any]:
        """Return the variables of a chat template.

        Raises:
            ApiError: for tools, if the model calls them in a format that is not known.
        """
        variables: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            efforts: dict[str, Any] = {
                "reasoning_effort": self.reasoning_effort,
                "enable_thinking": self.reasoning_effort != "none",
            }
            variables = {name: value for name, value in efforts.items() if name in dialect.variables} | variables
        if self.used_tools:
            if dialect.has_tools and dialect.tools is None and self.grammar is None:
                text = "the model calls tools in a format that this server does not read"
                text += "; leave tools out, or start it with --tool-parser."
                raise ApiError(400, text, "unsupported_parameter", "tools")
            variables["tools"] = [tool.plain() for tool in self.used_tools]
        return variables


class TokenizeRequest(Body):
    """Body of POST /tokenize."""

    model: str | None = Field(None, max_length=400)
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    tools: Annotated[list[Tool], FIRST_ERROR] | None = Field(None, max_length=MOST_TOOLS)
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: bool | None = Field(None, description="Those that the tokenizer adds to a prompt.")
    add_generation_prompt: neutral(True) = None  # type: ignore[valid-type]
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def check(self) -> TokenizeRequest:
        """Refuse two texts, and none."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either a prompt or messages")
        return self

    def text_or_chat(self) -> str | ChatRequest:
        """Return the text, or the chat, whose tokens are asked for."""
        if self.messages is None:
            return self.prompt or ""
        return ChatRequest.model_validate(
            {name: getattr(self, name) for name in ("messages", "tools", "chat_template_kwargs")}
        )


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: str | None = Field(None, max_length=400)
    tokens: TokenIds


class DocumentRequest(Strict):
    """Body of POST /v1/documents."""

    text: str
    name: str | None = Field(None, max_length=400)


AnyRequest = CompletionRequest | ChatRequest
Schema = TypeVar("Schema", bound=BaseModel)


def json_body(schema: type[BaseModel], *other_types: str) -> dict[str, Any]:
    """Return what the OpenAPI document says of the body of a route, which may also be a file of other types."""
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": SCHEMA_REFERENCE.format(model=schema.__name__)}}}
    content |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in other_types}
    return {"requestBody": {"required": True, "content": content}}


def parse(schema: type[Schema], body: bytes) -> Schema:
    """Return the request in a body.

    Raises:
        ApiError: 400, with what is wrong and the nearest legal choice.
    """
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}.", "invalid_json") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the body must be a JSON object.", "invalid_json")
    _check_sizes(given)
    return validated(schema, given)


def validated(schema: type[Schema], given: dict[str, Any]) -> Schema:
    """As ``parse``, of an object."""
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise _refusal(schema, error) from None


def ignored_fields(value: Any, is_strict: bool = False, path: str = "") -> Iterator[str]:
    """Yield the unknown fields of a request.

    Raises:
        ApiError: for one that seems to be misspelled, or asks for what is not here; for any if it ``is_strict``.
    """
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for each in value:
            yield from ignored_fields(each, is_strict, path)
    if not isinstance(value, BaseModel):
        return
    for name, given in (value.model_extra or {}).items():
        if path and name in ECHOES and not is_strict:
            continue
        is_refused = bool(get_close_matches(name[:80], type(value).model_fields, 1, MISSPELLED))
        if name in NOT_HERE:
            is_refused = bool(given)
        elif name in ELSEWHERE and not path:
            is_refused = given != ELSEWHERE[name] and (bool(given) or ELSEWHERE[name] is None)
        ours = not path and bool(given) and {name, "sparsity"} <= {*Sparsity.model_fields, *type(value).model_fields}
        if given is not None and (is_strict or is_refused or ours):
            text = str(unknown("field", name[:80], type(value).model_fields))
            text = f'{name} is a field of sparsity; give {{"sparsity": {{"{name}": ...}}}}.' if ours else text
            raise ApiError(400, text, "unknown_parameter", name[:80])
        yield f"{path}{name[:80]}"
    for name in type(value).model_fields:
        yield from ignored_fields(getattr(value, name), is_strict, f"{path}{name}.")


def _check_sizes(given: dict[str, Any]) -> None:
    """Refuse objects of very many fields, and very many values (``ApiError``): to check them takes seconds, in which
    the server answers no other request."""
    unchecked: list[Any] = [given]
    seen = 0
    while unchecked:
        value = unchecked.pop()
        seen += 1
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            raise ApiError(400, f"an object has {len(value)} fields, and may have {MOST_FIELDS}.", "invalid_value")
        if len(value) > MOST_TOKENS:
            raise ApiError(400, f"a list has {len(value)} values, and may have {MOST_TOKENS}.", "invalid_value")
        if seen > MOST_PARTS:
            raise ApiError(400, f"the body has more than {MOST_PARTS} objects and lists.", "invalid_value")
        parts = value.values() if isinstance(value, dict) else value
        unchecked += [part for part in parts if type(part) in (dict, list)]


def _refusal(schema: type[BaseModel], error: ValidationError) -> ApiError:
    """The error of the first field that is wrong; roles first, then unknown fields, then the innermost."""
    found = error.errors(include_url=False, include_input=False)
    first = min(found, key=lambda e: (e["loc"][-1:] != ("role",), e["type"] != "extra_forbidden", -len(e["loc"])))
    names = [str(part) for part in first["loc"]]
    if names[-1:] == ["role"] and first["type"] == "literal_error":
        text = f"{'.'.join(names)} must be {first['ctx']['expected']}."
        return ApiError(400, text, "invalid_value", ".".join(names))
    if "content" in names[1:]:
        text = 'the content of a message is text, or a list of {"type": "text", "text": ...}; no other parts are taken.'
        return ApiError(400, text, "invalid_value", ".".join(names[:3]))
    if first["type"] == "extra_forbidden":
        known = schema if len(names) == 1 else StructuredOutputs if names[0] == "structured_outputs" else Sparsity
        text = str(unknown("field", names[-1][:80], known.model_fields))
        return ApiError(400, text, "unknown_parameter", names[-1][:80])
    param = names[0] if names else None
    if param in ("messages", "tools"):
        param = ".".join(names[:3] if param == "messages" else names)
    if param == "prompt":
        text = "prompt must be text, a list of texts, a list of token ids, or a list of such lists."
        return ApiError(400, text, "invalid_value", param)
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing.", "missing_required_parameter", param)
    if first["type"] != "value_error":
        return ApiError(400, f"{param}: {first['msg']}.", "invalid_value", param)
    reason = str(first["ctx"]["error"])
    if param is None:
        return ApiError(400, f"{reason}.", "invalid_value")
    return ApiError(400, f"{param} {reason}.", "unsupported_parameter", param)
