"""The server process: its socket, its signals, the HTTP server, and the supervisor of the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from kvsift.errors import Unavailable
from kvsift.server.app import build
from kvsift.server.connections import Connection, raise_file_limit
from kvsift.server.settings import ServerSettings
from kvsift.server.supervisor import Supervisor

MMAP_THRESHOLD, LARGE_BYTES = -3, 1 << 18  # M_MMAP_THRESHOLD of glibc
FLUSH_S = 5  # for clients to receive the ends of their answers


class WebServer(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def serve(settings: ServerSettings) -> int:
    """Serve until a signal; returns the exit code.

    Raises:
        InputError: if the address cannot be used, or the engine refuses the settings.
    """
    with listen(settings.host, settings.port) as listener:
        return asyncio.run(_serve(settings, listener))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        InputError: if the address cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise Unavailable(f"port {port} of {host} is taken. Give another --port, or 0 for any free one.") from None
        raise Unavailable(f"{host} port {port} cannot be listened on: {error}.") from None
    # Connections inherit it. asyncio sets it only where a socket names its protocol, which those of create_server do
    # not; without it the body of an answer, and every token of a stream, waits up to 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the address of a server in a form for clients."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _serve(settings: ServerSettings, listener: socket.socket) -> int:
    app, supervisor = build(settings)
    Connection.most = raise_file_limit()
    _return_large_blocks()
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", ws="none", server_header=False,
        timeout_keep_alive=30, timeout_graceful_shutdown=FLUSH_S, http=Connection,
    )  # fmt: skip
    web = WebServer(config)
    ending = Ending(web, supervisor, settings.drain_s)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.begin, number)
    print(f"kvsift: loading the model; {url_of(listener)} answers once it is ready.", file=sys.stderr)
    engine, served = asyncio.create_task(supervisor.run()), asyncio.create_task(web.serve(sockets=[listener]))
    announcement = asyncio.create_task(_announce(supervisor, url_of(listener)))
    try:
        await asyncio.wait([engine, served], return_when=asyncio.FIRST_COMPLETED)
    finally:
        web.should_exit = True
        if not served.done():
            supervisor.abort()
        await served
        supervisor.stop()
        announcement.cancel()
        await engine
    return ending.code


def _return_large_blocks() -> None:
    """Let large blocks go back to the system when they are freed. By default glibc moves them to its heap once one was
    freed, where small blocks keep them: the process then grows with every body of megabytes. Other C libraries are
    left alone."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE_BYTES)


async def _announce(supervisor: Supervisor, url: str) -> None:
    await supervisor.ready.wait()
    plan = supervisor.plans.names[0]
    print(f"kvsift: {supervisor.names[0]} under {plan} at {url} (Ctrl-C ends it)", file=sys.stderr, flush=True)


class Ending:
    """The end of a server: the first signal lets answers in progress end, the second does not.

    Attributes:
        code: the exit code.
    """

    def __init__(self, web: uvicorn.Server, supervisor: Supervisor, drain_s: float) -> None:
        self._web, self._supervisor, self._drain_s = web, supervisor, drain_s
        self._draining: asyncio.Task[None] | None = None
        self.code = 0

    def begin(self, number: int) -> None:
        """Handle a signal."""
        if self._draining is None:
            if running := self._supervisor.num_running + self._supervisor.num_waiting:
                print(f"kvsift: finishing answers, {running} in progress; once more ends them.", file=sys.stderr)
            self._draining = asyncio.create_task(self._drain())
            return
        self.code = 128 + number
        self._supervisor.abort()
        self._web.should_exit = self._web.force_exit = True

    async def _drain(self) -> None:
        await self._supervisor.drain(self._drain_s)
        self._web.should_exit = True
