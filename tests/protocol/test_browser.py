"""OpenAI's client for JavaScript in a browser, on a page of another origin that ``--cors-origin`` admits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from page.conftest import browser  # noqa: F401
from protocol.conftest import MODULES, node
from server.serving import OPTIONS, Served

pytestmark = pytest.mark.protocol
SCENE = """async (baseURL) => {
  const { default: OpenAI } = await import("/openai/index.mjs");
  const options = { apiKey: "secret", dangerouslyAllowBrowser: true, maxRetries: 1, timeout: 20000 };
  const openai = new OpenAI({ baseURL, ...options });
  const body = { model: "tiny", messages: [{ role: "user", content: "Who?" }], max_tokens: 12 };
  try {
    const { data, request_id } = await openai.chat.completions.create(body).withResponse();
    let streamed = "";
    for await (const chunk of await openai.chat.completions.create({ ...body, stream: true })) {
      streamed += chunk.choices[0]?.delta.content ?? "";
    }
    const missing = await openai.models.retrieve("gpt-5").catch((error) => error);
    return {
      text: data.choices[0].message.content, streamed, request_id,
      missing: [missing.constructor.name, missing.status, missing.requestID],
    };
  } catch (error) {
    return { failed: error.constructor.name };
  }
}"""


class QuietHandler(SimpleHTTPRequestHandler):
    """Files without a log."""

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def origins() -> Iterator[list[str]]:
    """Two origins that serve npm's packages."""
    node()
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(MODULES))) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [f"http://127.0.0.1:{server.server_port}" for server in servers]
    for server in servers:
        server.shutdown()


@pytest.fixture(scope="module")
def shared(tiny: Path, origins: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a key that admits pages of the first origin."""
    options = *OPTIONS, "--cors-origin", origins[0]
    served = Served(tmp_path_factory.mktemp("shared"), str(tiny), *options, KVSIFT_API_KEY="secret")
    yield served
    served.stop()


@pytest.fixture
def play(browser: Any, shared: Served) -> Iterator[Callable[[str], dict[str, Any]]]:  # noqa: F811
    """Plays the scene on a page of an origin."""
    page = browser.new_page()

    def scene(origin: str) -> dict[str, Any]:
        page.goto(f"{origin}/openai/package.json")
        return page.evaluate(SCENE, f"{shared.url}/v1")

    yield scene
    page.close()


def test_openais_client_in_a_browser_is_answered(
    play: Callable[[str], dict[str, Any]], origins: list[str], shared: Served
) -> None:
    found = play(origins[0])
    assert found["text"] == found["streamed"] != ""
    assert len(found["request_id"]) == 32
    name, status, request_id = found["missing"]
    assert (name, status, len(request_id)) == ("NotFoundError", 404, 32)


def test_a_page_that_is_not_admitted_gets_nothing(play: Callable[[str], dict[str, Any]], origins: list[str]) -> None:
    assert play(origins[1]) == {"failed": "APIConnectionError"}
