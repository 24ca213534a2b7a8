"""A server in a process of its own, and short ways to ask it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from engine.tiny_directory import CHAT_TEMPLATE, write_model

PLAN = "quest:budget=96:window=32"
OPTIONS = "--plan", PLAN, "--threads", "1", "--chunk-size", "64", "--device", "cpu", "--dense-below", "0"
WORKER = sys.executable, str(Path(__file__).parent / "fake_worker.py")
SCRIPTED = (
    "from kvsift.server import run, settings, supervisor;"
    f"supervisor.WORKER = {WORKER};"
    "run.serve(settings.ServerSettings(port=0, names=['tiny']))",
)
JSON = {"content-type": "application/json; charset=utf-8"}


class Served:
    """``kvsift serve`` on a free port; its log is a file. With
    ``SCRIPTED`` as arguments, the engine process has no model (``fake_worker``)."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.log = folder / "server.log"
        command = [sys.executable, "-m", "kvsift", "serve", "--port", "0", *arguments]
        if arguments == SCRIPTED:
            command = [sys.executable, "-c", *SCRIPTED]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
            )
        found = until(lambda: re.search(r" at (http://\S+) ", self.log.read_text()) or self.process.poll(), 60)
        assert isinstance(found, re.Match), self.log.read_text()
        self.url = found[1]

    def client(self, **headers: str) -> httpx.Client:
        """A client of its own connections."""
        return httpx.Client(base_url=self.url, headers={**JSON, **headers}, timeout=60)

    def engine(self) -> int:
        """The engine process."""
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=True
        )
        [pid] = listed.stdout.split()
        return int(pid)

    def stop(self) -> None:
        """End the process, if it lives."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(20)


def write_endless_model(folder: Path) -> Path:
    """A tiny model named tiny with a chat template and a token per byte, which never ends by itself."""
    directory = write_model(folder / "tiny", chat_template=CHAT_TEMPLATE)
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token": None}))
    return directory


def until(found: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Wait for something that is true."""
    stop = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < stop, "waited in vain"
        time.sleep(0.02)
    return value


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream, which must end as such; comments are skipped."""
    lines = (line for line in response.iter_lines() if line and not line.startswith(":"))
    for line in lines:
        assert line.startswith("data: "), line
        if line == "data: [DONE]":
            assert list(lines) == []
            return
        yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream has no end")


def texts(chunks: list[dict[str, Any]], count: int = 1) -> list[str]:
    """The texts of the choices of a stream."""
    found = [""] * count
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        found[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return found


def metric(text: str, name: str) -> float:
    """A number of /metrics."""
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))
