"""HTTP by hand, so that clients may break it anywhere, and see everything that a server sends."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class Lost(Exception):
    """The connection ended before the answer did."""


@dataclass
class Head:
    """Status and headers, by lower-case name, of a response."""

    status: int
    headers: dict[str, str]


class Wire:
    """A connection to a server."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._writer: asyncio.StreamWriter | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._writer is not None and not self._reader.at_eof()

    async def connect(self) -> None:
        """Open it."""
        self._reader, self._writer = await asyncio.open_connection(self._address.hostname, self._address.port)

    async def ask(self, method: str, route: str, data: bytes = b"") -> None:
        """Send a request."""
        head = f"{method} {route} HTTP/1.1\r\nHost: {self._address.netloc}\r\nContent-Type: application/json\r\n"
        await self.send(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    async def send(self, data: bytes) -> None:
        """Send bytes; what a server closes meanwhile is found out when its answer is read."""
        self._writer.write(data)
        with suppress(ConnectionError):
            await self._writer.drain()

    async def head(self) -> Head:
        """Read status and headers.

        Raises:
            Lost: if there are none.
        """
        try:
            lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Lost("no response") from error
        pairs = (line.split(": ", 1) for line in lines[1:] if line)
        return Head(int(lines[0].split()[1]), {name.lower(): value for name, value in pairs})

    async def pieces(self, head: Head) -> AsyncIterator[bytes]:
        """Read a body.

        Raises:
            Lost: if it is not complete.
        """
        try:
            if head.headers.get("transfer-encoding") != "chunked":
                yield await self._reader.readexactly(int(head.headers["content-length"]))
                return
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            assert await self._reader.readexactly(2) == b"\r\n"
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Lost("the response is not complete") from error

    async def body(self, head: Head) -> bytes:
        """Read all of a body."""
        return b"".join([piece async for piece in self.pieces(head)])

    async def events(self, head: Head) -> AsyncIterator[dict[str, Any] | None]:
        """Read server-sent events; None for the one that says that they are done."""
        rest = b""
        async for piece in self.pieces(head):
            *lines, rest = (rest + piece).split(b"\n\n")
            for line in lines:
                if not line.startswith(b":"):
                    text = line.removeprefix(b"data: ")
                    yield None if text == b"[DONE]" else json.loads(text)
        assert not rest, rest

    async def read(self, count: int) -> bytes:
        """Read at most so many bytes; none: the server has closed."""
        try:
            return await self._reader.read(count)
        except ConnectionError:
            return b""

    def half_close(self) -> None:
        """Say that nothing more is sent."""
        self._writer.write_eof()

    def close(self, rudely: bool = False) -> None:
        """Close; rudely: by RST."""
        if self._writer is None:
            return
        if rudely:
            linger = struct.pack("ii", 1, 0)
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._writer.transport.abort() if rudely else self._writer.close()
        self._writer = None
