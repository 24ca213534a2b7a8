"""kvsift serve --engine vllm in processes of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

from vllm_plugin.vllm_environment import ENVIRONMENT

STOCK = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--served-model-name", "embedded")


class Server(NamedTuple):
    url: str
    log: Path

    def read(self, path: str) -> str:
        with urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def metrics(self) -> dict[str, float]:
        """Our counters, without the prefix."""
        lines = [line.split() for line in self.read("/metrics").splitlines() if line.startswith("kvsift:")]
        return {line[0].removeprefix("kvsift:").partition("{")[0]: float(line[1]) for line in lines}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def process(model: Path, log: Path, options: Sequence[str]) -> Iterator[Any]:
    """One process of the command."""
    command = [sys.executable, "-m", "kvsift", "serve", str(model), "--engine", "vllm", *STOCK, *options]
    with log.open("w") as file:
        running = subprocess.Popen(command, env=ENVIRONMENT, stdout=file, stderr=file)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(60)


@contextmanager
def serving(model: Path, log: Path, options: Sequence[str]) -> Iterator[Server]:
    """A server that answers."""
    server = Server(f"http://127.0.0.1:{(port := free_port())}", log)
    with process(model, log, ["--host", "127.0.0.1", "--port", str(port), *options]) as running:
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline:
            assert running.poll() is None, log.read_text()[-5000:]
            try:
                server.read("/health")
                break
            except OSError:
                time.sleep(1)
        else:
            raise AssertionError(log.read_text()[-5000:])
        yield server
