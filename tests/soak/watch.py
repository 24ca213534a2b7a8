"""What is seen of a server from outside: its metrics, its processes and their memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from soak.wire import Wire

PAGE = 4096


@dataclass(frozen=True)
class Calm:
    """A moment without requests.

    Attributes:
        seconds: since the beginning.
        server, engine: resident bytes of both processes.
        pid, life: of the engine process, and seconds since it was started.
        seqs: open sequences; loose: pages that are neither free nor kept for later prompts; kept: the latter.
    """

    seconds: float
    server: int
    engine: int
    pid: int
    life: float
    seqs: int
    loose: int
    kept: int


async def metrics(url: str) -> dict[str, float]:
    """The numbers of /metrics, by name with labels."""
    wire = Wire(url)
    await wire.connect()
    await wire.send(f"GET /metrics HTTP/1.1\r\nHost: {url.removeprefix('http://')}\r\n\r\n".encode())
    text = (await wire.body(await wire.head())).decode()
    wire.close()
    pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def total(numbers: dict[str, float], name: str) -> int:
    """The sum over all labels that a name begins with."""
    return int(sum(value for key, value in numbers.items() if key.startswith(name)))


async def calm(url: str, server: int, seconds: float, patience_s: float = 30.0) -> Calm:
    """Wait until nothing is open any more, or as long as that may take, and look."""
    loop = asyncio.get_running_loop()
    stop = loop.time() + patience_s
    while True:
        now = await metrics(url)
        seqs, loose = total(now, "kvsift_sequences"), total(now, 'kvsift_pages{owner="unshared"}')
        requests = total(now, "kvsift_requests_waiting") + total(now, "kvsift_requests_running")
        is_known = bool(now["kvsift_engine_ready"]) and total(now, "kvsift_pages") > 0
        if (is_known and not seqs + loose + requests) or loop.time() > stop:
            break
        await asyncio.sleep(0.3)
    await asyncio.sleep(1.5)  # buffers go, and what was seen is not a second old
    now, pid = await metrics(url), engine(server)
    seqs, loose = total(now, "kvsift_sequences"), total(now, 'kvsift_pages{owner="unshared"}')
    kept = total(now, 'kvsift_pages{owner="kept"}')
    return Calm(seconds, resident(server), resident(pid), pid, age(pid), seqs + requests, loose, kept)


def engine(server: int) -> int:
    """The engine process of a server; 0 while there is none."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(server)], capture_output=True, text=True, check=False)
    return int((listed.stdout.split() or ["0"])[0])


def resident(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def age(pid: int) -> float:
    """Seconds since a process was started."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
