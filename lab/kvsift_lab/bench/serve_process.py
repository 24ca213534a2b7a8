"""``kvsift serve`` in a process of its own, on a free port."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep

from kvsift.errors import InputError
from kvsift_lab.bench.serve import ServeRecipe

START_S = 600.0  # for a large model to be loaded
STOP_S = 30.0
NO_SERVER = (
    "kvsift bench serve starts kvsift serve, whose packages this Python lacks. Install them: pip install "
    "'kvsift[serve]'."
)


def command_of(recipe: ServeRecipe) -> list[str]:
    """Return the command of the server of a recipe."""
    model = [] if recipe.model is None else [recipe.model]
    threads = [] if recipe.threads is None else ["--threads", str(recipe.threads)]
    allowed = [word for plan in recipe.plans for word in ("--allow-plan", plan)]
    others = ["--plan", "dense", "--port", "0", "--keep-tokens", str(recipe.keep_tokens)]
    return [sys.executable, "-m", "kvsift", "serve", *model, *others, *allowed, *threads]


@contextmanager
def running_server(recipe: ServeRecipe) -> Iterator[str]:
    """Yield the address of a server that is ready; it ends with the block.

    Raises:
        InputError: if it does not start.
    """
    if find_spec("uvicorn") is None or find_spec("starlette") is None:
        raise InputError(NO_SERVER)
    with tempfile.TemporaryDirectory(prefix="kvsift-bench-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as file:
            process = subprocess.Popen(command_of(recipe), stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            yield _wait(process, log)
        finally:
            _end(process)


def _wait(process: subprocess.Popen[bytes], log: Path) -> str:
    stop = monotonic() + START_S
    while process.poll() is None and monotonic() < stop:
        if found := re.search(r" at (http://\S+) ", log.read_text(errors="replace")):
            return found[1]
        sleep(0.05)
    said = log.read_text(errors="replace").strip().splitlines()
    raise InputError(f"the server does not start: {said[-1] if said else 'it says nothing'}")


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGINT):  # the second one ends answers in progress
        if process.poll() is None:
            process.send_signal(number)
            sleep(0.2)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
