"""Clients that are slow, that send too much or something else, and that are too many. No engine."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvsift.server import bodies, connections
from kvsift.server.api_errors import ApiError
from kvsift.server.bodies import json_of
from kvsift.server.connections import Connection, raise_file_limit
from kvsift.server.run import WebServer, listen

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def size(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the length of the body, and at length if the path says so."""
    request = Request(scope, receive)
    response: Response
    try:
        length = len(await json_of(request)) if scope["method"] == "POST" else 0
        response = Response(str(length) + "." * int(scope["path"][1:] or 0), media_type="text/plain")
    except ApiError as error:
        response = Response(json.dumps(error.as_dict()), error.status, error.headers)
    await response(scope, receive, send)


def serving(test: Callable[[Streams, Callable[[], Awaitable[Streams]]], Awaitable[None]]) -> None:
    """Run a test beside a server; its arguments are a connection to that, and what makes others."""

    async def run() -> None:
        with listen("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            config = uvicorn.Config(
                size, log_level="warning", lifespan="off", ws="none", http=Connection, timeout_keep_alive=1,
            )  # fmt: skip
            web = WebServer(config)
            served = asyncio.create_task(web.serve(sockets=[listener]))
            try:
                async with asyncio.timeout(20):
                    streams = await asyncio.open_connection("127.0.0.1", port)
                    await test(streams, lambda: asyncio.open_connection("127.0.0.1", port))
                    streams[1].close()
                    await nobody(web)
            finally:
                web.should_exit = True
                await served

    asyncio.run(run())


async def nobody(web: WebServer) -> None:
    """Wait until no connection is left."""
    while web.server_state.connections:
        await asyncio.sleep(0.02)


async def rest(streams: Streams) -> bytes:
    """All that the server sends until it closes."""
    reader, writer = streams
    data = bytearray()
    with suppress(ConnectionError):  # what was written after the end is answered by RST
        while part := await reader.read(1 << 16):
            data += part
    writer.close()
    return bytes(data)


async def dripped(streams: Streams, data: bytes) -> bytes:
    """Send byte by byte, until the server closes; returns what it has sent."""
    read = asyncio.create_task(rest(streams))
    for byte in data:
        if read.done():
            return read.result()
        streams[1].write(bytes([byte]))
        await asyncio.sleep(0.02)
    raise AssertionError("the server has taken it all")


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of a response."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split()[0])
    return int(head.split()[1]), await reader.readexactly(length)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    monkeypatch.setattr(connections, "STALL_S", 0.3)
    monkeypatch.setattr(bodies, "BODY_S", 0.3)


@pytest.mark.parametrize("first", [b"", GET], ids=["first", "second"])
def test_headers_that_come_byte_by_byte_end_in_time(quick: None, first: bytes) -> None:
    @serving
    async def _(streams: Streams, connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = streams
        if first:
            writer.write(first)
            assert await answer(reader) == (200, b"0")
        data = await dripped((reader, writer), HEAD)
        assert data.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in data


def test_a_connection_that_says_nothing_is_closed(quick: None) -> None:
    @serving
    async def _(streams: Streams, connect: Callable[[], Awaitable[Streams]]) -> None:
        assert await rest(streams) == b""


def test_a_body_that_comes_byte_by_byte_ends_in_time(quick: None) -> None:
    @serving
    async def _(streams: Streams, connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = streams
        writer.write(HEAD + b"Content-Length: 1000\r\n\r\n")
        data = await dripped((reader, writer), b" " * 1000)
        assert b" 408 " in data
        assert b"a second for every 32 KB" in data


def test_a_large_body_may_take_longer(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SLOWEST", 1000)

    @serving
    async def _(streams: Streams, connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = streams
        writer.write(HEAD + b"Content-Length: 2000\r\n\r\n")
        for _ in range(10):  # 0.5 s and more
            writer.write(b" " * 200)
            await asyncio.sleep(0.05)
        assert await answer(reader) == (200, b"2000")


def test_a_refused_body_that_never_ends_is_not_awaited(quick: None) -> None:
    @serving
    async def _(streams: Streams, connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = streams
        writer.write(HEAD + b"Content-Length: 99999999\r\n\r\n")
        assert (await answer(reader))[0] == 413
        assert await dripped((reader, writer), b" " * 1000) == b""


def test_an_answer_that_nobody_reads_is_dropped(quick: None) -> None:
    kept: list[asyncio.StreamWriter] = []

    @serving
    async def _(streams: Streams, connect: Callable[[], Awaitable[Streams]]) -> None:
        _, writer = await connect()
        writer.write(GET.replace(b"/ ", b"/50000000 "))
        kept.append(writer)  # open, until the server has no connection


def test_an_answer_that_is_read_slowly_is_read_to_its_end(quick: None) -> None:
    """It takes far longer than a client may read nothing."""

    @serving
    async def _(streams: Streams, connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = streams
        writer.write(GET.replace(b"/ ", b"/30000000 "))
        length = 0
        while part := await reader.read(1 << 20):
            length += len(part)
            await asyncio.sleep(0.02)
        assert length > 30_000_000


def test_pipelined_requests_are_answered_in_order() -> None:
    @serving
    async def _(streams: Streams, connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = streams
        posts = [HEAD + b"Content-Length: %d\r\n\r\n" % length + b" " * length for length in range(40)]
        writer.write(b"".join(posts) + GET)
        assert [await answer(reader) for _ in range(41)] == [(200, b"%d" % length) for length in (*range(40), 0)]


def test_what_follows_a_declared_body_is_no_part_of_it() -> None:
    @serving
    async def _(streams: Streams, connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = streams
        writer.write(HEAD + b"Content-Length: 4\r\n\r\n" + b" " * 100 + b"\r\n\r\n")
        assert await answer(reader) == (200, b"4")
        status, body = await answer(reader)
        assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_http")
        assert await reader.read() == b""


CHUNKED = b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n"


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (HEAD + CHUNKED, "the request has both Content-Length and Transfer-Encoding. The connection is closed."),
        (GET[:-2] + b"X: a\n", "a line of the headers ends without a carriage return. The connection is closed."),
        (GET[:-2] + b"X: a\r\n b\r\n", "a header is continued in the next line. The connection is closed."),
        (GET[:-2] + b"X : a\r\n", "illegal header line: 'X : a'. The connection is closed."),
        (
            GET[:-2] + b"X " + b"a" * 5000 + b"\r\n",
            "illegal header line: 'X " + "a" * 176 + ". The connection is closed.",
        ),
    ],
    ids=["two lengths", "bare line feed", "folded", "space in a name", "long"],
)
def test_an_ambiguous_request_is_refused_and_what_follows_it_is_not_answered(
    capfd: pytest.CaptureFixture[str], head: bytes, reason: str
) -> None:
    @serving
    async def _(streams: Streams, connect: Callable[[], Awaitable[Streams]]) -> None:
        for before in (b"", GET):
            reader, writer = await connect()
            writer.write(before + head + b"\r\n0\r\n\r\n" + GET)
            if before:
                assert await answer(reader) == (200, b"0")
            status, body = await answer(reader)
            assert (status, json.loads(body)["error"]["message"]) == (400, reason)
            assert await reader.read() == b""
            writer.close()

    assert capfd.readouterr().err == "", "clients could fill the log"


def test_an_upgrade_is_answered_as_a_plain_request_and_not_logged(capfd: pytest.CaptureFixture[str]) -> None:
    @serving
    async def _(streams: Streams, connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = streams
        writer.write(GET[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert await answer(reader) == (200, b"0")

    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["without an end", "in one packet"])
@pytest.mark.parametrize("size", [70_000, 1 << 20])
def test_headers_of_a_megabyte_are_refused(size: int, end: bytes) -> None:
    @serving
    async def _(streams: Streams, connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = streams
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * size + end)
        status, body = await answer(reader)
        assert (status, json.loads(body)["error"]["message"][:28]) == (431, "headers are larger than 64 K")


def test_more_connections_than_are_taken_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "most", 3)

    @serving
    async def _(streams: Streams, connect: Callable[[], Awaitable[Streams]]) -> None:
        idle = [streams, await connect(), await connect()]
        reader, writer = await connect()
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5" in head.lower()
        assert b'"code":"server_busy"' in await reader.read()
        idle[0][1].close()
        await asyncio.sleep(0.1)
        reader, writer = await connect()
        writer.write(GET)
        assert await answer(reader) == (200, b"0")
        for _, each in (*idle, (reader, writer)):
            each.close()


def test_an_answer_on_a_connection_that_is_kept_does_not_wait_for_an_acknowledgement() -> None:
    """Head and body are two packets; the second one would wait 40 ms for a client that acknowledges late."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_connections_are_fewer_than_files() -> None:
    assert 1 <= raise_file_limit() <= connections.MOST_CONNECTIONS
