"""Clients that leave, crawl, break rules or send too much. What they may expect is an error in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Awaitable, Callable

from soak.clients import Course
from soak.wire import Lost, Wire

ROUTE = "/v1/completions"
LONG = {"prompt": "Once upon a time.", "max_tokens": 400, "temperature": 3, "stream": True}  # hot, so that it goes on
BEGINNINGS = b"", b"POST /v1/com", b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
ASKER = """
import socket, sys
host, port, data = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
connection = socket.create_connection((host, port))
head = f"POST /v1/completions HTTP/1.1\\r\\nHost: {host}\\r\\nContent-Type: application/json\\r\\n"
connection.sendall(f"{head}Content-Length: {len(data)}\\r\\n\\r\\n".encode() + data)
while connection.recv(1000): print("read", flush=True)
"""


async def resetting(course: Course, rng: random.Random) -> None:
    """Leave by RST in the middle of a stream."""
    wire = await _begun(course)
    await wire.read(rng.choice([1, 300, 2000]))
    wire.close(rudely=True)


async def killed(course: Course, rng: random.Random) -> None:
    """A process that is killed in the middle of a stream."""
    host, _, port = course.url.removeprefix("http://").partition(":")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-E", "-c", ASKER, host, port, json.dumps(LONG), stdout=asyncio.subprocess.PIPE
    )
    await process.stdout.readline()
    await asyncio.sleep(rng.random() / 2)
    if process.returncode is None:
        process.kill()
    await process.wait()


async def crawling(course: Course, rng: random.Random) -> None:
    """Read a byte per second, and leave in the end."""
    wire = await _begun(course)
    for _ in range(rng.choice([3, 8])):
        if not await wire.read(1):
            break
        await asyncio.sleep(1)
    wire.close(rudely=True)


async def half_closing(course: Course, rng: random.Random) -> None:
    """Close the sending half, which is taken for leaving: the server closes, too."""
    wire = await _begun(course)
    wire.half_close()
    try:
        async with asyncio.timeout(30):
            while await wire.read(1 << 16):
                pass
    except TimeoutError:
        course.fault("a half-closed connection stays open")
    wire.close()


async def malformed(course: Course, rng: random.Random) -> None:
    """Bodies that are refused."""
    deep = b'{"prompt": ' + b"[" * 5000
    cases = [b"{", b"[]", b"\xff", deep, b'{"prompt": "a", "n": "2"}', b'{"prmpt": "a"}', b'{"prompt": [1e999]}']
    await _refused(course, rng.choice(cases), 400)


async def oversize(course: Course, rng: random.Random) -> None:
    """A body of 17 MB; one whose prompt is too long by far; one that is tokenised in vain."""
    await _refused(course, b" " * (17 << 20), 413)
    for words in (3_000_000, 120_000):
        await _refused(course, json.dumps({"prompt": "mill " * words}).encode(), 400)


async def idling(course: Course, rng: random.Random) -> None:
    """Connections that say nothing, or not everything, for a while."""
    wires = [Wire(course.url) for _ in range(8)]
    for wire in wires:
        await wire.connect()
        await wire.send(rng.choice(BEGINNINGS))
    await asyncio.sleep(rng.uniform(1, 10))
    for wire in wires:
        wire.close(rudely=rng.random() < 0.5)


async def deleting(course: Course, rng: random.Random) -> None:
    """Delete a document that somebody may be asking about, or that is being read."""
    if keys := await documents(course):
        await delete(course, rng.choice(keys))


async def documents(course: Course) -> list[str]:
    """Ids of all documents."""
    wire = Wire(course.url)
    await wire.connect()
    await wire.ask("GET", "/v1/documents")
    found = json.loads(await wire.body(await wire.head()))
    wire.close()
    return [each["id"] for each in found["data"]]


async def delete(course: Course, key: str) -> None:
    """Delete a document."""
    wire = Wire(course.url)
    await wire.connect()
    await wire.ask("DELETE", f"/v1/documents/{key}")
    head = await wire.head()
    if head.status not in (200, 404):
        course.fault(f"{key} cannot be deleted: {head.status} {(await wire.body(head))!r}")
    wire.close()


VILLAINS: tuple[Callable[[Course, random.Random], Awaitable[None]], ...] = (
    *(resetting, resetting, killed, crawling, crawling),
    *(half_closing, malformed, oversize, idling, deleting),
)


async def haunt(course: Course, villain: Callable[[Course, random.Random], Awaitable[None]], seed: int) -> None:
    """Be one villain again and again, until the server ends."""
    rng = random.Random(seed)
    while not course.is_ending:
        await course.gate.wait()
        course.busy += 1
        try:
            await villain(course, rng)
            course.counts[f"villains: {villain.__name__}"] += 1
        except (Lost, ConnectionError) as error:
            if not course.is_ending:
                course.fault(f"{villain.__name__}: {error}")
        finally:
            course.busy -= 1
        await asyncio.sleep(rng.uniform(0.2, 2))


async def _begun(course: Course) -> Wire:
    wire = Wire(course.url)
    await wire.connect()
    await wire.ask("POST", ROUTE, json.dumps(LONG).encode())
    return wire


async def _refused(course: Course, data: bytes, status: int) -> None:
    """Send a body that is refused, or put off."""
    wire = Wire(course.url)
    await wire.connect()
    head, _ = await asyncio.gather(wire.head(), wire.ask("POST", ROUTE, data))
    error = json.loads(await wire.body(head))["error"]
    if head.status not in (status, 429, 503) or not {"message", "type", "param", "code"} <= error.keys():
        course.fault(f"{data[:40]!r} ({len(data)} bytes) got {head.status} {error} instead of {status}")
    wire.close()
