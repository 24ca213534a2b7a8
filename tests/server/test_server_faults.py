"""What goes wrong around a server: clients that leave, an engine that dies, a full queue, keys, and the end."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from engine.tiny_directory import text_of
from refusals import refused
from server.serving import OPTIONS, Served, events, metric, texts, until
from server.test_document_routes import DOCUMENTS, ask, ready, upload

import kvsift
from kvsift.cli.main import main
from kvsift.server.run import listen

SLOW = "quest:budget=128:score_by=mean_std"  # composed on a CPU
ENDLESS = {"prompt": "Stop", "max_tokens": 4000}  # four seconds and more


def running(client: httpx.Client) -> float:
    text = client.get("/metrics").text
    return metric(text, "kvsift_requests_running") + metric(text, "kvsift_requests_waiting")


def begin(server: Served, body: dict, headers: str = "") -> socket.socket:
    """A request whose answer nobody has read."""
    address = urlsplit(server.url)
    data = json.dumps(body).encode()
    connection = socket.create_connection((address.hostname, address.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n{headers}"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def rest(connection: socket.socket) -> bytes:
    """Everything until the server closes or ends the body."""
    data = bytearray()
    while not data.endswith(b"0\r\n\r\n") and (part := connection.recv(1 << 16)):
        data += part
    connection.close()
    return bytes(data)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_row(server: Served, client: httpx.Client, stream: bool) -> None:
    before = metric(client.get("/metrics").text, "kvsift_cancelled_total")
    connection = begin(server, {**ENDLESS, "stream": stream})
    until(lambda: running(client) == 1)
    connection.close()
    started = time.monotonic()
    until(lambda: running(client) == 0)
    assert time.monotonic() - started < 2
    assert metric(client.get("/metrics").text, "kvsift_cancelled_total") == before + 1


def test_a_client_that_does_not_read_stops_nobody(server: Served, client: httpx.Client, alone: kvsift.LLM) -> None:
    connection = begin(server, {**ENDLESS, "stream": True, "logprobs": 5})
    whole = alone.generate("Hello", max_new_tokens=30).text
    response = client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 30})
    assert response.json()["choices"][0]["text"] == whole
    connection.close()
    until(lambda: running(client) == 0)


def test_malformed_requests_leave_the_server_well(server: Served, client: httpx.Client) -> None:
    def refused(status: int, text: str, content: bytes, **headers: str) -> None:
        response = client.post("/v1/chat/completions", content=content, headers=headers)
        assert (response.status_code, text in response.json()["error"]["message"]) == (status, True), response.text

    refused(400, "is not JSON", b"{")
    refused(400, "is not JSON", b"\xff\xfe")
    refused(400, "is not JSON", b'{"messages": [{"role": "user", "content": "\\ud800"}]}')
    refused(400, "is not JSON", b"[" * 100_000)
    refused(400, "JSON object", b"[]")
    refused(400, "messages is missing", b"{}")
    refused(415, "must be application/json", b"{}", **{"content-type": "text/plain"})
    refused(403, "is not 'evil.example'", b"{}", host="evil.example")
    refused(413, "larger than 16 MB", b" " * ((16 << 20) + 1))
    chunked = client.post("/v1/completions", content=(b" " * (1 << 20) for _ in range(17)))
    assert chunked.status_code == 413
    garbage = socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port))
    garbage.sendall(b"\x16\x03\x01 no http\r\n\r\n")
    assert b"400" in garbage.recv(100)
    garbage.close()
    assert client.get("/health").status_code == 200
    assert running(client) == 0


def test_answers_and_documents_go_on_when_the_engine_is_killed(
    server: Served, client: httpx.Client, alone: kvsift.LLM
) -> None:
    """One has sent text; one has not, as it is not streamed. Documents are read again."""
    document = upload(client, "Survivor. " + text_of(1500))["id"]
    ready(client, document)
    streamed = {"prompt": "Stop", "max_tokens": 600, "temperature": 0.5, "seed": 5, "logprobs": 0, "stream": True}
    whole = alone.generate("Stop", max_new_tokens=600, sampling=kvsift.Sampling(0.5, seed=5), logprobs=0)
    pair = {"prompt": text_of(400), "max_tokens": 300, "n": 2, "temperature": 0.3, "seed": 1}
    both = alone.generate(text_of(400), n=2, max_new_tokens=300, sampling=kvsift.Sampling(0.3, seed=1))
    engine, before = server.engine(), metric(client.get("/metrics").text, "kvsift_engine_restarts")
    with ThreadPoolExecutor(1) as pool, server.client() as other:
        with client.stream("POST", "/v1/completions", json=streamed) as response:
            stream = events(response)
            chunks = [next(stream) for _ in range(5)]
            waiting = pool.submit(other.post, "/v1/completions", json=pair)
            until(lambda: running(client) == 2)
            os.kill(engine, signal.SIGKILL)
            until(lambda: client.get("/health").json()["status"] == "restarting")
            refusal = client.post("/v1/completions", json={"prompt": "a"})
            assert (refusal.status_code, refusal.headers["retry-after"]) == (503, "2")
            assert client.get(f"{DOCUMENTS}/{document}").status_code == 200
            chunks += list(stream)
        assert texts(chunks) == [whole.text]
        values = [value for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]
                  for value in choice["logprobs"]["token_logprobs"]]  # fmt: skip
        assert values == pytest.approx([each.logprob for each in whole.logprobs], rel=1e-4)
        assert [choice["text"] for choice in waiting.result().json()["choices"]] == [each.text for each in both]
    assert server.engine() != engine
    assert metric(client.get("/metrics").text, "kvsift_engine_restarts") == before + 1
    assert ready(client, document)["status"] == "ready"
    assert ask(client, document)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 1472
    client.delete(f"{DOCUMENTS}/{document}")


@pytest.fixture(scope="module")
def guarded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with keys, a short queue and little time to end, on IPv6."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys").write_text("first\n\nsecond\n")
    options = (
        "--api-key-file",
        str(folder / "keys"),
        "--max-waiting",
        "1",
        "--drain",
        "2",
        "--host",
        "::1",
        "--plan",
        SLOW,
    )
    served = Served(folder, str(model), *OPTIONS, *options, KVSIFT_API_KEY="third")
    yield served
    served.stop()


def test_keys_open_the_server(guarded: Served) -> None:
    assert guarded.url.startswith("http://[::1]:")
    for key, status in [("first", 200), ("second", 200), ("third", 200), ("fourth", 401), ("fïrst", 401)]:
        with httpx.Client(base_url=guarded.url) as client:
            response = client.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()})
            assert response.status_code == status, key
            assert client.get("/health").status_code == 200
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["type"] == "authentication_error"


def test_what_one_key_has_read_is_read_again_for_another(guarded: Served) -> None:
    body, cached = {"prompt": text_of(300), "max_tokens": 2}, []
    for key in ("first", "second", "first"):
        with guarded.client(authorization=f"Bearer {key}") as client:
            usage = client.post("/v1/completions", json=body).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 256]


def test_a_full_queue_and_the_end(guarded: Served, alone: kvsift.LLM) -> None:
    """Eight endless requests decode and one waits; the tenth is refused. After SIGTERM those that can, end."""
    with guarded.client(authorization="Bearer first") as client:
        connections = []
        for _ in range(9):
            until(lambda: metric(client.get("/metrics").text, "kvsift_requests_waiting") == 0)
            connections.append(begin(guarded, {**ENDLESS, "stream": True}, "Authorization: Bearer first\r\n"))
            until(lambda: running(client) == len(connections))
        refusal = client.post("/v1/completions", json={"prompt": "a"})
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refusal.headers["retry-after"]) >= 1
        for connection in connections[:8]:
            connection.close()
        until(lambda: running(client) == 1)
        engine, body = guarded.engine(), {"prompt": "Hello", "max_tokens": 100, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response, guarded.client() as other:
            stream = events(response)
            first = next(stream)
            os.kill(engine, signal.SIGSTOP)  # or the answer could end before the server hears of its own end
            guarded.process.send_signal(signal.SIGTERM)
            until(lambda: other.get("/health").json() == {"status": "draining"})
            os.kill(engine, signal.SIGCONT)
            chunks = [first, *stream]
        assert texts(chunks) == [alone.generate("Hello", plan=SLOW, max_new_tokens=100).text]
    assert guarded.process.wait(12) == 0
    assert not Path(f"/proc/{engine}").exists()
    assert b'"code":"server_draining"' in rest(connections[8])[-300:]
    log = guarded.log.read_text()
    assert "finishing answers, 2 in progress" in log
    assert "Stop" not in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--host 0.0.0.0", "there is no API key"),
        ("--prt 1", "did you mean '--port'"),
        ("m --engine vlm", "did you mean 'vllm'"),
        ("--engine vllm", "needs a MODEL"),
        ("m --engine vllm --max-waiting 1 --open", "--max-waiting, --open: options of --engine kvsift"),
        ("--plan qest:budget=4", "did you mean 'quest'"),
        ("--api-key-file nowhere", "API keys nowhere cannot be read"),
        ("tests --port 0", "holds no config.json"),  # by the engine process
    ],
)
def test_options_that_are_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: str, text: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvsift", "serve", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert text in capfd.readouterr().err


def test_a_port_that_is_taken_is_refused() -> None:
    with listen("127.0.0.1", 0) as taken, refused("unavailable: 127.0.0.1"):
        listen("127.0.0.1", taken.getsockname()[1])


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kvsift.cli.serve.find_spec", lambda name: None if name == "uvicorn" else name)
    test_options_that_are_refused(monkeypatch, capfd, "", "lacks (uvicorn). Install them: pip install 'kvsift[serve]'")


@pytest.mark.parametrize(("more", "dense_below"), [("", None), (" --dense-below auto", None), (" --dense-below 7", 7)])
def test_options_of_vllm_are_passed_on(monkeypatch: pytest.MonkeyPatch, more: str, dense_below: int | None) -> None:
    started: list[list[str]] = []

    def execute(path: str, command: list[str]) -> None:
        started.append(command)
        raise SystemExit(0)

    monkeypatch.setattr("kvsift.cli.serve.find_spec", lambda name: name)
    monkeypatch.setattr("os.execv", execute)
    given = "m --engine vllm --plan quest:budget=128 --port 81 --dtype float32 --max-model-len 512"
    monkeypatch.setattr(sys, "argv", ["kvsift", "serve", *(given + more).split()])
    with pytest.raises(SystemExit):
        main()
    passed = ["--host", "127.0.0.1", "--port", "81", "--dtype", "float32", "--max-model-len", "512"]
    assert started[0][-8:] == passed
    settings = json.loads(started[0][-9])["kvsift"]
    assert settings["plan"].endswith("quest:budget=128")
    assert settings.get("dense_below") == dense_below
