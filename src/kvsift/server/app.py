"""The HTTP interface: a FastAPI application, whose OpenAPI document comes from its routes and their bodies."""

from __future__ import annotations

import re
from functools import cache
from time import time
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp

from kvsift import __version__
from kvsift.server.answer_routes import BODIES, IGNORED, add_answer_routes, check_model
from kvsift.server.api_errors import ApiError, refusals
from kvsift.server.document_routes import PATH, about_documents, add_document_routes, text_of
from kvsift.server.metrics import Metrics
from kvsift.server.middleware import REQUEST_ID, AccessMiddleware
from kvsift.server.page_files import PAGE, page_file
from kvsift.server.response_bodies import Error, Health, Model, ModelList, SampleDocument
from kvsift.server.sample_document import sample
from kvsift.server.schemas import SCHEMA_REFERENCE, DocumentRequest
from kvsift.server.settings import ServerSettings
from kvsift.server.supervisor import Supervisor

NOT_SERVED = re.compile(r"/v1/(embeddings|images|audio|moderations|batches|files|realtime)\b")
DOCUMENT = re.compile(rf"{PATH}/[^/]*(/\w+)?$")


def build(settings: ServerSettings) -> tuple[ASGIApp, Supervisor]:
    """Return the application, and the supervisor that has to run beside it."""
    metrics = Metrics()
    supervisor = Supervisor(settings, metrics.ended)
    metrics.follow(supervisor)
    return application(settings, supervisor, metrics), supervisor


def application(settings: ServerSettings, supervisor: Supervisor, metrics: Metrics) -> ASGIApp:
    """Return the application with its checks."""
    handlers: Any = {ApiError: _refused, HTTPException: _no_route, Exception: _failed}
    app = FastAPI(openapi_url=None, exception_handlers=handlers)
    add_answer_routes(app, supervisor, settings.is_strict)
    add_document_routes(app, supervisor)
    _add_model_routes(app, supervisor, has_sample=settings.model.get("model") is None)
    _add_other_routes(app, supervisor, metrics)
    known = {getattr(route, "path", "") for route in app.routes}

    def count(path: str, status: int) -> None:
        route = DOCUMENT.sub(PATH + r"/{id}\1", path)
        metrics.responses.labels(route if route in known else "other", str(status)).inc()

    checked = AccessMiddleware(app, settings.keys, settings.hosts, count)
    if not settings.origins:
        return checked
    # Clients have headers of their own, such as x-stainless-lang. None gives a page more rights than its key does.
    return CORSMiddleware(
        checked, list(settings.origins), allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"],
        expose_headers=["retry-after", REQUEST_ID, IGNORED],
    )  # fmt: skip


def _add_model_routes(app: FastAPI, supervisor: Supervisor, has_sample: bool) -> None:
    started = int(time())

    def model_of(name: str) -> Model:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "kvsift",
            "max_model_len": supervisor.positions,
            "plans": supervisor.plans.names,
            "documents": about_documents(),
            "has_sample": has_sample,
        }

    def check_loaded() -> None:
        if not supervisor.ready.is_set():
            supervisor.check_open()

    @app.get("/v1/models", responses=refusals(401))
    async def list_models() -> ModelList:
        check_loaded()
        return {"object": "list", "data": [*map(model_of, supervisor.names)]}

    @app.get("/v1/models/{model:path}", responses=refusals(401, 404))
    async def get_model(model: str) -> Model:
        check_loaded()
        check_model(model, supervisor)
        return model_of(model)

    @app.get("/v1/sample", responses=refusals(401, 404))
    async def get_sample() -> SampleDocument:
        """Return a document for the embedded model."""
        if not has_sample:
            raise ApiError(404, "only the embedded model has a sample document.", "no_sample")
        return sample()


def _add_other_routes(app: FastAPI, supervisor: Supervisor, metrics: Metrics) -> None:
    either = {**refusals(), 503: {**refusals()[503], "model": Health | Error}}

    @app.get("/health", response_model=Health, responses=either, openapi_extra={"security": []})
    async def get_health() -> Response:
        """Say whether requests are taken."""
        state = supervisor.state
        is_ready = state == "ready"
        return JSONResponse({"status": state}, 200 if is_ready else 503, {} if is_ready else {"retry-after": "5"})

    @app.get("/metrics", response_class=Response, responses={**text_of("text/plain"), **refusals(401)})
    async def get_metrics() -> Response:
        """Return counters for Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/openapi.json", responses=refusals(401))
    async def get_openapi_document() -> dict[str, Any]:
        """Return this document."""
        return document()

    @cache
    def document() -> dict[str, Any]:
        return _openapi_document(app)

    for path in PAGE:
        get = app.get(
            path, response_class=Response, responses={**text_of("text/html"), **refusals()}, name="page",
            description="Return the page for browsers.", include_in_schema=path == "/",
        )  # fmt: skip
        get(page_file)


def _openapi_document(app: FastAPI) -> dict[str, Any]:
    """What FastAPI knows of the routes, with the bodies of requests (``parse``) and API keys (``AccessMiddleware``)."""
    document = get_openapi(title="kvsift", version=__version__, routes=app.routes)
    bodies = [(schema, "validation") for schema in (*BODIES, DocumentRequest)]
    _, definitions = models_json_schema(bodies, ref_template=SCHEMA_REFERENCE)  # type: ignore[arg-type]
    components = document["components"]
    components["schemas"] |= definitions["$defs"]
    for operation in (each for path in document["paths"].values() for each in path.values()):
        operation["responses"].pop("422", None)  # which FastAPI adds; a wrong field is a 400
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {**document, "security": [{}, {"key": []}]}


async def _refused(request: Request, error: ApiError) -> Response:
    is_anthropic = request.url.path.startswith("/v1/messages")  # whose clients look for a type
    return (
        JSONResponse({"type": "error", **error.as_dict()}, error.status, error.headers)
        if is_anthropic
        else error.response()
    )


async def _no_route(request: Request, error: HTTPException) -> Response:
    is_method = error.status_code == 405
    text = f"{request.url.path[:80]} does not take {request.method}." if is_method else "there is no such route."
    if (found := NOT_SERVED.match(request.url.path)) is not None:
        text = f"this server answers with text, and has no {found[1]}."
    refusal = ApiError(error.status_code, f"{text} /openapi.json lists the routes.", "not_found")
    headers = {"allow": ", ".join(sorted(_methods_at(request)))} if is_method else error.headers
    return JSONResponse(refusal.as_dict(), error.status_code, headers)


def _methods_at(request: Request) -> set[str]:
    """Methods that the path of a request takes, of all its routes."""
    found = (route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE)
    methods = {method for route in found for method in route.methods or ()}
    return methods | {"HEAD"} if "GET" in methods else methods


async def _failed(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server failed; its log has the reason.", "server_failed").response()
