"""A soak: many clients, some of them hostile, and an engine that is killed now and then.

    python -m soak [--minutes 10] [--clients 64] [--questions 50]

The time is cut into ten rounds (four, if short). In the first half the engine is killed in the middle of every round;
in the second half one engine lives. Every round ends in a calm: clients finish and wait, so rows and pages have to be
nought, and memory is compared: of the server from the end of the first fifth on, of the engine between the calms of its
long life, without the first. The last round ends in SIGTERM instead. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from server.serving import Served
from soak.clients import Course, ask_on
from soak.questions import PLANS, questions, write_chat_model
from soak.villains import VILLAINS, delete, documents, haunt
from soak.watch import Calm, calm, engine

LEAK = 1.05  # of memory, after the warm-up
KEEP_TOKENS, PAGE_SIZE = 8192, 16
OPTIONS = (
    *(
        "--plan",
        PLANS[0],
        *(f"--allow-plan={plan}" for plan in PLANS[1:]),
        "--threads",
        "1",
        "--device",
        "cpu",
        "--dense-below",
        "0",
    ),
    *("--keep-tokens", str(KEEP_TOKENS), "--max-waiting", "48", "--drain", "20"),
)


class Soak:
    """One soak of a server."""

    def __init__(self, served: Served, course: Course, seconds: float, num_clients: int) -> None:
        self._served, self._course, self._seconds = served, course, seconds
        self._num_clients, self._rounds = num_clients, 10 if seconds >= 120 else 4
        self._rng = random.Random(0)
        self.calms: list[Calm] = []
        self.exit_code: int | None = None
        self._calm_s = 0.0  # that the last calm took

    async def run(self) -> None:
        """Run all rounds."""
        course, begun = self._course, time.monotonic()
        clients = [asyncio.create_task(ask_on(course, number)) for number in range(self._num_clients)]
        clients += [asyncio.create_task(haunt(course, each, number)) for number, each in enumerate(VILLAINS)]
        watched = asyncio.create_task(self._watch(clients))
        for number in range(self._rounds):
            course.gate.set()
            await self._round(number)
            if number < self._rounds - 1:
                await self._calm(time.monotonic() - begun)
        await self._end(clients)
        watched.cancel()

    async def _watch(self, clients: Sequence[asyncio.Task[None]]) -> None:
        """A client that fails is a mistake of the soak, which ends."""
        done, _ = await asyncio.wait(clients, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if task.exception() is not None:
                task.print_stack()
                os._exit(3)

    async def _round(self, number: int) -> None:
        length = max(self._seconds / self._rounds - self._calm_s, self._seconds / self._rounds / 2)
        await asyncio.sleep(length / 2)
        if number < self._rounds / 2:
            os.kill(engine(self._served.process.pid), signal.SIGKILL)
            self._course.counts["engines killed"] += 1
        await asyncio.sleep(length / 2)

    async def _calm(self, seconds: float) -> None:
        self._course.gate.clear()
        begun = time.monotonic()
        stop = time.monotonic() + 120
        while self._course.busy and time.monotonic() < stop:
            await asyncio.sleep(0.1)
        if self._course.busy:
            self._course.fault(f"{self._course.busy} requests have no end")
        for key in await documents(self._course):
            await delete(self._course, key)
        found = await calm(self._served.url, self._served.process.pid, seconds)
        self.calms.append(found)
        if found.seqs or found.loose or found.kept > KEEP_TOKENS // PAGE_SIZE:
            self._course.fault(f"left behind: {found}")
        print(_line(found), flush=True)
        self._calm_s = time.monotonic() - begun

    async def _end(self, clients: Sequence[asyncio.Task[None]]) -> None:
        """End the server under load."""
        course, pid = self._course, engine(self._served.process.pid)
        course.is_ending = True
        self._served.process.send_signal(signal.SIGTERM)
        _, waiting = await asyncio.wait(clients, timeout=40)
        if waiting:
            course.fault(f"{len(waiting)} clients have no end")
        self.exit_code = await asyncio.to_thread(self._served.process.wait, 30)
        if self.exit_code:
            course.fault(f"exit code {self.exit_code}")
        if pid and Path(f"/proc/{pid}").exists():
            course.fault("the engine outlives the server")
        if "Traceback" in (log := self._served.log.read_text()):
            course.fault("the log has a traceback:\n" + log[log.index("Traceback") - 300 :][:3000])

    def growth(self) -> list[tuple[str, int, int]]:
        """What is compared: its name, bytes after the warm-up, and bytes at the end."""
        if self._rounds < 10:
            return []  # too short to tell
        old = [each for each in self.calms if each.pid == self.calms[-1].pid][1:]
        server = self.calms[1:]
        return [("server", server[0].server, server[-1].server), ("engine", old[0].engine, old[-1].engine)]


def _line(found: Calm) -> str:
    mega = f"server {found.server / 1e6:6.1f} MB  engine {found.engine / 1e6:7.1f} MB"
    counts = f"sequences {found.seqs}  loose pages {found.loose}  kept pages {found.kept}"
    return f"{found.seconds:6.0f} s  {mega} at {found.life:4.0f} s  {counts}"


def main() -> int:
    """Run a soak as the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--questions", type=int, default=50)
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model = write_chat_model(Path(folder, "model"))
        asked = questions(model, options.questions)
        print(f"{len(asked)} questions answered alone in {time.monotonic() - begun:.0f} s", flush=True)
        served = Served(Path(folder), str(model), *OPTIONS)
        course = Course(served.url, asked)
        soak = Soak(served, course, options.minutes * 60, options.clients)
        try:
            asyncio.run(soak.run())
        finally:
            served.process.kill()
            served.process.wait()
    return _report(soak, course)


def _report(soak: Soak, course: Course) -> int:
    for name, before, after in soak.growth():
        if after > LEAK * before:
            course.fault(f"memory of the {name} grew from {before / 1e6:.1f} to {after / 1e6:.1f} MB")
        print(f"{name:28}{before / 1e6:8.1f} MB -> {after / 1e6:.1f} MB ({after / before - 1:+.1%})")
    if not course.counts["answers that call tools"]:
        course.fault("no answer called a tool")
    for name, count in sorted(course.counts.items()):
        print(f"{name:28}{count:8}")
    print(f"{'exit code of the server':28}{soak.exit_code!s:>8}")
    for text in course.wrong[:20]:
        print(text)
    print("FAILED" if course.wrong else "passed")
    return bool(course.wrong)


if __name__ == "__main__":
    sys.exit(main())
