"""Routes of a server whose engine is not started."""

import asyncio
import subprocess
import sys
from typing import Any

import httpx

from kvsift.server.app import build
from kvsift.server.schemas import ChatRequest
from kvsift.server.settings import ServerSettings

APPS: dict[str, Any] = {}  # by settings: each takes half a second to build


def answers(settings: ServerSettings, *requests: tuple[str, str, dict]) -> list[httpx.Response]:
    """Responses of a server whose engine is not started."""
    app = APPS.get(repr(settings)) or APPS.setdefault(repr(settings), build(settings)[0])

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return [await client.request(method, path, headers=headers) for method, path, headers in requests]

    return asyncio.run(ask())


def test_a_server_that_loads_says_so() -> None:
    health, models, text, page = answers(
        ServerSettings(),
        ("GET", "/health", {}),
        ("GET", "/v1/models", {}),
        ("POST", "/v1/completions", {}),
        ("GET", "/", {}),
    )
    assert (health.status_code, health.json()) == (503, {"status": "loading"})
    for response in (models, text):
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert response.json()["error"]["code"] == "server_loading"
    assert page.status_code == 200  # it waits by itself


def test_the_description_names_every_field_of_a_request() -> None:
    [response] = answers(ServerSettings(), ("GET", "/openapi.json", {}))
    schemas = response.json()["components"]["schemas"]
    assert set(schemas["ChatRequest"]["properties"]) == set(ChatRequest.model_fields)
    references = set(response.text.split('"#/components/schemas/')[1:])
    assert {reference.partition('"')[0] for reference in references} <= set(schemas)


def test_the_server_process_loads_neither_torch_nor_transformers() -> None:
    code = "import kvsift.server.run, sys; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_sample_is_that_of_the_embedded_model() -> None:
    asked = "GET", "/v1/sample", {}
    [embedded] = answers(ServerSettings(), asked)
    assert embedded.status_code == 200
    assert set(embedded.json()) == {"name", "text", "questions", "about"}
    [other] = answers(ServerSettings(model={"model": "elsewhere"}), asked)
    assert (other.status_code, other.json()["error"]["code"]) == (404, "no_sample")
