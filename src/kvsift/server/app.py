"""The routes."""

from __future__ import annotations

import json
import re
import secrets
from functools import partial
from hashlib import blake2b
from time import time
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from kvsift.server.answers import AnswerForm
from kvsift.server.api_errors import ApiError
from kvsift.server.bodies import json_of
from kvsift.server.document_routes import PATH, DocumentRoutes
from kvsift.server.door import REQUEST_ID, Door
from kvsift.server.metrics import Metrics
from kvsift.server.openapi import description
from kvsift.server.page_files import PAGE_FILES
from kvsift.server.sample import sample
from kvsift.server.schemas import AnyRequest, ChatRequest, CompletionRequest, parse
from kvsift.server.settings import ServerSettings
from kvsift.server.streams import EventStream, unless_gone
from kvsift.server.supervisor import Supervisor

GONE = 499  # nobody reads it
DOCUMENT = re.compile(rf"{PATH}/[^/]*(/\w+)?$")


class App:
    """Requests over a supervisor.

    Args:
        settings: of the server.
        supervisor: of the engine process.
        metrics: of both.
    """

    def __init__(self, settings: ServerSettings, supervisor: Supervisor, metrics: Metrics) -> None:
        self._settings, self._supervisor, self._metrics = settings, supervisor, metrics
        self._started = int(time())
        self._routes = {
            **{file.path: file.answer for file in PAGE_FILES},
            "/health": self._health,
            "/metrics": self._count,
            "/openapi.json": self._describe,
            "/v1/models": self._models,
            "/v1/sample": self._sample,
        }
        self._documents = DocumentRoutes(supervisor)

    def asgi(self) -> ASGIApp:
        """Return the application with its checks."""
        routes = [Route(path, endpoint, methods=["GET"]) for path, endpoint in self._routes.items()]
        routes.append(Route("/v1/models/{model:path}", self._models, methods=["GET"]))
        for path, schema in (("/v1/completions", CompletionRequest), ("/v1/chat/completions", ChatRequest)):
            endpoint = partial(self._answer, schema)
            routes.append(Route(path, endpoint, methods=["POST"]))
        routes += self._documents.routes()
        handlers: dict[Any, Any] = {
            ApiError: _refused,
            HTTPException: _not_found,
            ClientDisconnect: _gone,
            Exception: _failed,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        known = {route.path for route in routes}

        def count(path: str, status: int) -> None:
            route = DOCUMENT.sub(PATH + r"/{id}\1", path)
            self._metrics.responses.labels(route if route in known else "other", str(status)).inc()

        door = Door(app, self._settings.keys, self._settings.hosts, count)
        if not self._settings.origins:
            return door
        # Clients have headers of their own, such as x-stainless-lang. None gives a page more rights than its key does.
        return CORSMiddleware(
            door, list(self._settings.origins), allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"],
            expose_headers=["retry-after", REQUEST_ID],
        )  # fmt: skip

    async def _answer(self, schema: type[AnyRequest], request: Request) -> Response:
        supervisor = self._supervisor
        supervisor.check_open()  # before a body of megabytes is read
        asked = parse(schema, await json_of(request))
        job = supervisor.submit(self._message(asked, request), self._num_answers(asked))
        is_streaming = False
        try:
            if not await unless_gone(request.receive, job.wait_accepted()):
                return Response(status_code=GONE)
            form = AnswerForm(asked, supervisor.names[0])
            if asked.stream:
                is_streaming = True
                return EventStream(job, form, supervisor.release)
            if not await unless_gone(request.receive, job.wait_ended()):
                return Response(status_code=GONE)
            return JSONResponse(form.whole(job))
        finally:
            if not is_streaming:
                supervisor.release(job)

    def _num_answers(self, asked: AnyRequest) -> int:
        return asked.samples * (len(asked.prompts) if isinstance(asked, CompletionRequest) else 1)

    def _message(self, asked: AnyRequest, request: Request) -> dict[str, Any]:
        """What the engine is asked.

        Raises:
            ApiError: for another model or plan than those that are served, or a document that cannot be read.
        """
        self._check_model(asked.model)
        client, salt = request.scope["client_name"]
        if (document := getattr(asked, "document", None)) is not None:
            self._supervisor.documents.get(document, (client, salt)).check_readable()
        cache = asked.prompt_cache_key if document is None else None  # else the document would be read anew
        return {
            **asked.message(),
            "n": asked.samples,
            "plan": self._supervisor.plans.index(asked.plan.plan),
            "min_recovery": asked.plan.min_recovery,
            "temperature": asked.temperature or 0.0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "seed": secrets.randbits(48) if asked.seed is None else asked.seed,
            "stop": asked.stops,
            "stop_token_ids": asked.stop_token_ids,
            "skip_special_tokens": asked.skip_special_tokens,
            "ignore_eos": bool(asked.ignore_eos),
            "logprobs": asked.num_logprobs,
            "document": document,
            "passages": bool(asked.plan.passages),
            "exact": bool(asked.plan.exact),
            "client": client if salt else _digest(client, asked.end_user),
            "salt": _digest(salt, cache) if cache else salt,
        }

    def _check_model(self, model: str | None) -> None:
        served = self._supervisor.names
        if model is not None and model not in served:
            text = f"the model {model[:80]!r} is not served here; this server has {', '.join(map(repr, served))}."
            raise ApiError(404, text, "model_not_found", "model")

    async def _models(self, request: Request) -> Response:
        supervisor = self._supervisor
        if not supervisor.ready.is_set():
            supervisor.check_open()
        model = {
            "object": "model",
            "created": self._started,
            "owned_by": "kvsift",
            "max_model_len": supervisor.positions,
            "plans": supervisor.plans.names,
            "documents": self._documents.about(),
            "has_sample": self._has_sample,
        }
        if (name := request.path_params.get("model")) is not None:
            self._check_model(name)
            return JSONResponse({"id": name, **model})
        return JSONResponse({"object": "list", "data": [{"id": each, **model} for each in supervisor.names]})

    @property
    def _has_sample(self) -> bool:
        return self._settings.model.get("model") is None

    async def _sample(self, request: Request) -> Response:
        if not self._has_sample:
            raise ApiError(404, "only the embedded model has a sample document.", "no_sample")
        return JSONResponse(sample())

    async def _health(self, request: Request) -> Response:
        state = self._supervisor.state
        headers = {} if state == "ready" else {"retry-after": "5"}
        return JSONResponse({"status": state}, 200 if state == "ready" else 503, headers)

    async def _count(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _describe(self, request: Request) -> Response:
        return JSONResponse(description())


def build(settings: ServerSettings) -> tuple[ASGIApp, Supervisor]:
    """Return the application, and the supervisor that has to run beside it."""
    metrics = Metrics()
    supervisor = Supervisor(settings, metrics.ended)
    metrics.follow(supervisor)
    return App(settings, supervisor, metrics).asgi(), supervisor


def _digest(*parts: str) -> str:
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


async def _refused(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.as_dict(), error.status, error.headers)


async def _not_found(request: Request, error: HTTPException) -> Response:
    is_method = error.status_code == 405
    text = f"{request.url.path[:80]} does not take {request.method}." if is_method else "there is no such route."
    refusal = ApiError(error.status_code, f"{text} /openapi.json lists the routes.", "not_found")
    headers = {"allow": ", ".join(sorted(_methods_at(request)))} if is_method else error.headers
    return JSONResponse(refusal.as_dict(), error.status_code, headers)


def _methods_at(request: Request) -> set[str]:
    """Methods that the path of a request takes, of all its routes."""
    found = (route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE)
    return {method for route in found for method in route.methods or ()}


async def _failed(request: Request, error: Exception) -> Response:
    refusal = ApiError(500, "the server failed; its log has the reason.", "server_failed")
    return JSONResponse(refusal.as_dict(), refusal.status)


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=GONE)
