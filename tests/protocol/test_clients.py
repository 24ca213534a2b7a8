"""OpenAI's own clients for Python and JavaScript: answers, streams, retries, aborts, and errors by their types."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from protocol.conftest import node, program
from server.serving import PLAN, Served, metric, until

import kvsift

pytestmark = pytest.mark.protocol
HERE = Path(__file__).parent
Play = Callable[..., subprocess.Popen[str]]


@pytest.fixture(params=["python", "node"])
def play(request: pytest.FixtureRequest) -> Play:
    """Begins a scene of a client."""
    is_python = request.param == "python"
    client = [program("protocol"), str(HERE / "client.py")] if is_python else [node(), str(HERE / "client.mjs")]

    def begin(served: Served, scene: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*client, served.url, scene], stdout=subprocess.PIPE, text=True)

    return begin


def end(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The result of a scene."""
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    return json.loads(output.splitlines()[-1])


def kill_engine(served: Served) -> None:
    os.kill(served.engine(), signal.SIGKILL)
    until(lambda: httpx.get(f"{served.url}/health").json()["status"] == "restarting")


def wait_ready(served: Served) -> None:
    until(lambda: httpx.get(f"{served.url}/health").json()["status"] == "ready", 60)


def test_answers_streamed_and_whole_with_their_usage(play: Play, server: Served, tiny: Path) -> None:
    found = end(play(server, "answers"))
    alone = kvsift.LLM(tiny, plan=PLAN, device="cpu", chunk_size=64, dense_below=0)
    texts = alone.generate("Hello", n=2, max_new_tokens=12, sampling=kvsift.Sampling(1.0, seed=3))
    assert found["texts"] == [answer.text for answer in texts]
    assert found["chat"] == found["streamed"] != ""
    assert found["models"] == ["tiny"]
    for usage in (found["usage"], found["streamed_usage"]):
        assert usage["completion_tokens"] == 12
        assert usage["total_tokens"] == usage["prompt_tokens"] + 12
        assert usage["sparsity"]["plan"].startswith("quest:")
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


def test_refusals_are_typed(play: Play, server: Served) -> None:
    found, bad = end(play(server, "errors")), {"name": "BadRequestError", "status": 400}
    large = found.pop("large")  # no client has a type of its own for it
    assert (large["status"], large["code"]) == (413, "body_too_large")
    assert found == {
        "field": {**bad, "code": "unknown_parameter", "param": "temprature"},
        "value": {**bad, "code": "invalid_value", "param": "n"},
        "model": {"name": "NotFoundError", "status": 404, "code": "model_not_found", "param": "model"},
        "long": {**bad, "code": "context_length_exceeded", "param": None},
        "stream": {**bad, "code": "unsupported_prompt", "param": None},
    }


def test_a_wrong_key_is_an_authentication_error(play: Play, locked: Served) -> None:
    wrong = {"name": "AuthenticationError", "status": 401, "code": "invalid_api_key", "param": None}
    assert end(play(locked, "key")) == {"wrong": wrong, "right": 1}


def test_a_full_line_is_a_rate_limit_that_retries_pass(play: Play, server: Served) -> None:
    found = end(play(server, "busy"))
    assert found["refused"] == {"name": "RateLimitError", "status": 429, "code": "rate_limit_exceeded", "param": None}
    assert found["count"] <= 24 - 8  # rows
    assert found["without_limit"] == []


def test_retries_outlast_an_engine_that_is_restarted(play: Play, server: Served) -> None:
    kill_engine(server)
    found = end(play(server, "down"))
    assert (found["hasty"]["name"], found["hasty"]["status"]) == ("InternalServerError", 503)
    assert found["text"]


def test_an_abort_ends_the_row(play: Play, server: Served) -> None:
    wait_ready(server)
    before = metric(httpx.get(f"{server.url}/metrics").text, "kvsift_cancelled_total")
    end(play(server, "abort"))
    until(lambda: metric(httpx.get(f"{server.url}/metrics").text, "kvsift_cancelled_total") == before + 1)
    until(lambda: metric(httpx.get(f"{server.url}/metrics").text, "kvsift_sequences") == 0)


def test_an_error_in_mid_stream_is_raised(play: Play, server: Served) -> None:
    process = play(server, "lost")
    assert process.stdout.readline() == "begun\n"
    for _ in range(10):  # an answer that has got further between two crashes goes on after them
        if process.poll() is None:
            kill_engine(server)
            wait_ready(server)
    found = end(process)["error"]
    assert (found["name"], found["code"]) == ("APIError", "engine_lost")
    wait_ready(server)
