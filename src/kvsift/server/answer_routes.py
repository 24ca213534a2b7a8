"""Routes for answers, in the forms of OpenAI and Anthropic, and for tokens."""

from __future__ import annotations

import json
import re
import secrets
import sys
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvsift.server.answers import AnswerForm
from kvsift.server.api_errors import ApiError, refusals
from kvsift.server.bodies import json_of
from kvsift.server.frames import AnswerRequest
from kvsift.server.messages_api import MessagesForm, MessagesRequest
from kvsift.server.response_bodies import (
    ChatCompletion,
    Completion,
    DetokenizedText,
    InputTokens,
    MessageBody,
    ResponseObject,
    TokenList,
)
from kvsift.server.responses_api import KeptResponses, ResponsesForm, ResponsesRequest
from kvsift.server.schemas import (
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Schema,
    TokenizeRequest,
    ignored_fields,
    json_body,
    parse,
)
from kvsift.server.streams import STREAM, EventResponse, Form, answer_events, while_connected
from kvsift.server.supervisor import Supervisor

BODIES: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
IGNORED = "x-kvsift-ignored"  # names of fields of the request
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")  # others are shown as JSON, in ASCII
MOST_NAMES = 32  # in that header, and lines about them in the log
MOST_UNKNOWN = 1000  # fields of a request: to look for known ones like them takes time
EVENTS = (
    "With stream=true, server-sent events in the form of the route: chunks, the usage last if stream_options asks for "
    "it, then [DONE], or typed events. An answer that fails ends with an event that has an Error instead. Lines that "
    "begin with a colon say how far the prompt is read."
)


def add_answer_routes(app: FastAPI, supervisor: Supervisor, is_strict: bool) -> None:
    """Add the routes.

    Args:
        app: the application.
        supervisor: its engine.
        is_strict: refuse unknown fields.
    """
    logged, kept = set[str](), KeptResponses()

    def post(path: str, model: Any, schema: type[BaseModel], has_stream: bool = True) -> Any:
        responses = refusals(400, 401, 404, 413, 415, 429, 500)
        if has_stream:
            responses[200] = {"description": EVENTS, **STREAM}
        return app.post(path, response_model=model, responses=responses, openapi_extra=json_body(schema))

    async def read(schema: type[Schema], request: Request) -> Schema:
        supervisor.check_open()  # before a body of megabytes is read
        given = parse(schema, await json_of(request))
        unknown = [*islice(ignored_fields(given, is_strict), MOST_UNKNOWN)]
        if len(unknown) == MOST_UNKNOWN:
            raise ApiError(400, f"the body has {MOST_UNKNOWN} or more unknown fields.", "unknown_parameter")
        names = [*dict.fromkeys(unknown)][:MOST_NAMES]
        request.state.ignored = names
        for name in names:
            if name not in logged and len(logged) < MOST_NAMES:
                logged.add(name)
                print(f"kvsift: requests have a field {name!r}, which is ignored.", file=sys.stderr)
        return given

    async def answer(request: Request, body: AnyRequest, form: Form) -> Response:
        job = supervisor.submit(_answer_request(body, request.scope["owner"], supervisor))
        names = request.state.ignored
        if isinstance(body, ChatRequest) and body.reasoning_effort and not supervisor.dialect.variables:
            names += ["reasoning_effort"]  # the chat template does not read it
        shown = [name if PLAIN_NAME.fullmatch(name) else json.dumps(name) for name in names]
        headers = {IGNORED: ", ".join(shown)} if names else {}
        is_streaming = False
        try:
            await while_connected(request.receive, job.wait_accepted() if body.stream else job.wait_ended())
            if body.stream:
                is_streaming = True
                return EventResponse(answer_events(job, form), partial(supervisor.release, job), headers)
            return JSONResponse(form.whole(job), headers=headers)
        finally:
            if not is_streaming:
                supervisor.release(job)

    @post("/v1/completions", Completion, CompletionRequest)
    async def complete_text(request: Request) -> Response:
        body = await read(CompletionRequest, request)
        return await answer(request, body, AnswerForm(body, supervisor.names[0]))

    @post("/v1/chat/completions", ChatCompletion, ChatRequest)
    async def answer_chat(request: Request) -> Response:
        body = await read(ChatRequest, request)
        return await answer(request, body, AnswerForm(body, supervisor.names[0], supervisor.dialect))

    @post("/v1/messages", MessageBody, MessagesRequest)
    async def answer_message(request: Request) -> Response:
        """Answer in the form of Anthropic's API."""
        body = (await read(MessagesRequest, request)).chat(supervisor.dialect)
        return await answer(request, body, MessagesForm(body, supervisor.names[0], supervisor.dialect))

    @post("/v1/responses", ResponseObject, ResponsesRequest)
    async def respond(request: Request) -> Response:
        """Answer in the form of OpenAI's newer API."""
        given, (_, salt) = await read(ResponsesRequest, request), request.scope["owner"]
        body = given.chat(kept.get(salt, given.previous_response_id))
        form = ResponsesForm(body, supervisor.names[0], supervisor.dialect, given, salt, kept)
        return await answer(request, body, form)

    async def tokens_of(request: Request, body: ChatRequest | str, **options: bool) -> dict[str, Any]:
        if isinstance(body, str):
            asked = AnswerRequest(prompts=[body])
        else:
            asked = _answer_request(body, request.scope["owner"], supervisor)
        return await supervisor.convert({"op": "tokenize", "request": vars(asked), "special": True, **options})

    @post("/v1/messages/count_tokens", InputTokens, MessagesRequest, has_stream=False)
    async def count_tokens(request: Request) -> Response:
        """Return the number of tokens of a prompt, in the form of Anthropic's API."""
        body = (await read(MessagesRequest, request)).chat(supervisor.dialect)
        found = await tokens_of(request, body, pieces=False)
        return JSONResponse({"input_tokens": len(found["tokens"])})

    @post("/tokenize", TokenList, TokenizeRequest, has_stream=False)
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a text, or of the prompt of a chat, in the form of vLLM."""
        body = await read(TokenizeRequest, request)
        check_model(body.model, supervisor)
        special, pieces = body.add_special_tokens is not False, bool(body.return_token_strs)
        found = await tokens_of(request, body.text_or_chat(), special=special, pieces=pieces)
        tokens = found["tokens"]
        about = {"count": len(tokens), "max_model_len": supervisor.positions}
        return JSONResponse({**about, "tokens": tokens, "token_strs": found["pieces"]})

    @post("/detokenize", DetokenizedText, DetokenizeRequest, has_stream=False)
    async def detokenize(request: Request) -> Response:
        """Return the text of tokens, in the form of vLLM."""
        body = await read(DetokenizeRequest, request)
        check_model(body.model, supervisor)
        found = await supervisor.convert({"op": "detokenize", "tokens": body.tokens})
        return JSONResponse({"prompt": found["text"]})


def _answer_request(body: AnyRequest, owner: tuple[str, str], supervisor: Supervisor) -> AnswerRequest:
    """Return what the engine is asked.

    Raises:
        ApiError: for another model or plan than those that are served, or a document that cannot be read.
    """
    check_model(body.model, supervisor)
    client, salt = owner
    prompt = body.prompt_fields()
    if isinstance(body, ChatRequest):
        prompt["variables"] = body.template_variables(supervisor.dialect)
    document = prompt.get("document")
    if document is not None:
        supervisor.documents.get(document, owner).check_readable()
    finds_calls = isinstance(body, ChatRequest) and bool(body.used_tools)
    request = AnswerRequest(
        **prompt,
        num_samples=body.samples,
        plan=supervisor.plans.index(body.plan.plan),
        min_recovery=body.plan.min_recovery,
        sampling={**body.sampling, "seed": secrets.randbits(48) if body.seed is None else body.seed},
        options={
            "stop": body.stops,
            "stop_token_ids": body.stop_token_ids,
            # delimiters of calls may be special tokens
            "skip_special_tokens": None if finds_calls else body.skip_special_tokens,
            "logprobs": body.num_logprobs,
            "passages": bool(body.plan.passages),
            "exact": bool(body.plan.exact),
            "grammar": body.grammar,
        },
        echo=isinstance(body, CompletionRequest) and bool(body.echo),
        ignore_eos=bool(body.ignore_eos),
        client=client if salt else _digest(client, body.end_user),
        salt=salt,
    )
    if document is None and body.prompt_cache_key:  # a document would be prefilled again with another salt
        return replace(request, salt=_digest(salt, body.prompt_cache_key))
    return request


def check_model(model: str | None, supervisor: Supervisor) -> None:
    """Refuse requests for another model (``ApiError``)."""
    if model is not None and model not in supervisor.names:
        names = ", ".join(map(repr, supervisor.names))
        text = f"the model {model[:80]!r} is not served here; this server has {names}."
        raise ApiError(404, text, "model_not_found", "model")


def _digest(*parts: str) -> str:
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
