"""JSON objects over a socket, each after its length in four bytes."""

from __future__ import annotations

import json
from asyncio import IncompleteReadError, StreamReader
from collections.abc import Sequence
from socket import socket
from struct import Struct
from typing import Any

LENGTH = Struct(">I")


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as JSON.

    Raises:
        ValueError, TypeError: if it has none, as NaN has not.
    """
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode()


def pack(message: dict[str, Any]) -> bytes:
    """Return the bytes of a message."""
    return _framed(encode(message))


def pack_step(rows: Sequence[bytes]) -> bytes:
    """Return the bytes of {op: step, rows: [...]}, of rows that were encoded one by one."""
    return _framed(b'{"op":"step","rows":[' + b",".join(rows) + b"]}")


def _framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def receive(connection: socket) -> dict[str, Any] | None:
    """Wait for the next message; None: the other side has closed."""
    header = _exactly(connection, LENGTH.size)
    data = None if header is None else _exactly(connection, LENGTH.unpack(header)[0])
    return None if data is None else json.loads(data)


async def read(reader: StreamReader) -> dict[str, Any] | None:
    """As ``receive``."""
    try:
        data = await reader.readexactly(LENGTH.unpack(await reader.readexactly(LENGTH.size))[0])
    except (IncompleteReadError, ConnectionError):
        return None
    message: dict[str, Any] = json.loads(data)
    return message


def _exactly(connection: socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(min(count - len(parts), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
