"""Connections with limits: how long a client may take, how much it may send as headers, and how many there may be."""

from __future__ import annotations

import logging
import re
import resource
import sys
from asyncio import TimerHandle, Transport
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvsift.server.api_errors import ApiError

HEAD_S = 30.0  # from the connection, or the first byte after an answer, to the end of the headers
STALL_S, STALL_BYTES = 60.0, 1 << 16  # a client that reads less than that in this time is left
LINGER_S = 2.0  # that a refused client has to receive the reason: a connection closed before all is read ends by RST
HEAD_BYTES = 1 << 16
MOST_CONNECTIONS = 4096
OTHER_FILES = 64  # that the process has open, besides connections
MOST_REASON = 200  # characters of a refusal that quotes a request
QUOTED = re.compile(r"bytearray\(b(.*)\)", re.DOTALL)  # in messages of h11

# Warnings of uvicorn are about single requests, which anybody may send without end, and the client has its response.
# The levels of loggers below uvicorn's own are reset by ``uvicorn.Config``.
LOGGER = logging.getLogger("kvsift.requests")
LOGGER.setLevel(logging.ERROR)


def raise_file_limit() -> int:
    """Let the process open as many files as it may; returns how many connections that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + OTHER_FILES
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(most - OTHER_FILES, 1)


class StrictConnection(h11.Connection):
    """Requests as RFC 9112 has them: what h11 tolerates beyond that, a proxy before the server may read differently."""

    def next_event(self) -> Any:
        """Return the next event.

        Raises:
            h11.RemoteProtocolError: for a head that is too large, or ambiguous.
        """
        if self.their_state is not h11.IDLE:
            return super().next_event()
        received = self.trailing_data[0]
        event = super().next_event()
        if isinstance(event, h11.Request):
            _check_head(received[: len(received) - len(self.trailing_data[0])], {name for name, _ in event.headers})
        return event


def _check_head(head: bytes, names: set[bytes]) -> None:
    if len(head) > HEAD_BYTES:
        raise h11.RemoteProtocolError("", error_status_hint=431)
    if {b"content-length", b"transfer-encoding"} <= names:
        raise h11.RemoteProtocolError("the request has both Content-Length and Transfer-Encoding")
    if b"\n" in head.replace(b"\r\n", b""):
        raise h11.RemoteProtocolError("a line of the headers ends without a carriage return")
    if b"\r\n " in head or b"\r\n\t" in head:
        raise h11.RemoteProtocolError("a header is continued in the next line")


class Connection(H11Protocol):
    """uvicorn's connection with time limits, strict headers, and errors in OpenAI's form.

    A client that has closed its sending half is taken for one that has left, as a close looks the same.
    """

    most = MOST_CONNECTIONS
    _is_refused = False
    _late: TimerHandle | None = None
    _stalled: TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn, self.logger = StrictConnection(h11.SERVER, HEAD_BYTES), LOGGER

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Take a connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            text = f"the server has {self.most} connections, as many as it takes. Try again later."
            self._refuse(ApiError(503, text, "server_busy", retry_after=5))
            self.transport.close()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take bytes; those behind a refusal are not read."""
        if not self._is_refused and not self.transport.is_closing():
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch()
        self._watch_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._late, self._stalled = _cancelled(self._late), _cancelled(self._stalled)

    def pause_writing(self) -> None:
        """The client reads more slowly than it is written to."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._stalled = _cancelled(self._stalled)
        if self.cycle is not None and self.cycle.response_complete:
            self._watch_reader()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, and headers that do not end (h11 says 431 then)."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        reason = QUOTED.sub(r"\1", str(error or msg)).rstrip(".")[:MOST_REASON]
        if status == 431:
            reason = f"headers are larger than {HEAD_BYTES >> 10} KB"
        self._refuse(ApiError(status, f"{reason}. The connection is closed.", "invalid_http"))

    def _watch(self) -> None:
        """Limit the time to the end of the next headers, while no request is answered and the connection is not idle.
        The rest of a body that is not needed counts as headers."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        is_idle = self.timeout_keep_alive_task is not None and self.conn.their_state is h11.IDLE
        if self._is_refused:
            return
        if is_answering or self.transport.is_closing():
            self._late = _cancelled(self._late)
        elif not is_idle and self._late is None:
            self._late = self.loop.call_later(HEAD_S, self._give_up)

    def _watch_reader(self) -> None:
        """Limit the time in which the client reads what is buffered, while nothing is added to it."""
        if self._stalled is None and (size := self.transport.get_write_buffer_size()):
            self._stalled = self.loop.call_later(STALL_S, self._check_reader, size)

    def _check_reader(self, before: int) -> None:
        self._stalled = None
        if (size := self.transport.get_write_buffer_size()) and before - size < STALL_BYTES:
            self.transport.abort()
        else:
            self._watch_reader()

    def _give_up(self) -> None:
        self._late = None
        if self.conn.trailing_data[0] and self.conn.their_state is h11.IDLE:
            self._refuse(ApiError(408, f"the headers took longer than {HEAD_S:g} s.", "request_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer before, or instead of, the application, and close a little later."""
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error.headers["connection"] = "close"
            response = error.response()
            head = h11.Response(status_code=error.status, headers=response.raw_headers)
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()
        self._late = self.loop.call_later(LINGER_S, self.transport.close)


def _cancelled(timer: TimerHandle | None) -> TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None
