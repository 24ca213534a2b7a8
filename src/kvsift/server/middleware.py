"""Middleware of every request: Host allow-list, API key and request id. Plain ASGI, which hides no disconnect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from hmac import compare_digest
from socket import gethostname
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvsift.server.api_errors import ApiError
from kvsift.server.page_files import PAGE
from kvsift.server.settings import address_of, salt_of

HOST = re.compile(r"(\[(?P<address>[0-9a-fA-F:.]+)\]|(?P<name>[A-Za-z0-9._~-]+))(:\d{0,5})?")
REQUEST_ID = "x-request-id"  # of every response: the client's own, if it is valid
VALID_ID = re.compile(r"[A-Za-z0-9_.:/+=-]{1,128}")
WITHOUT_KEY = {"/health", *PAGE}  # the page asks for the key, and sends it with what it fetches


class AccessMiddleware:
    """Answers requests from other hosts, or without an API key, in place of the application.

    Args:
        app: the application.
        keys: API keys; none: no key is asked for.
        hosts: names by which clients may address the server, besides addresses and this machine's names.
        count: called with path and status of every response.
    """

    def __init__(
        self, app: ASGIApp, keys: Iterable[str], hosts: Iterable[str], count: Callable[[str, int], None]
    ) -> None:
        self._app, self._count = app, count
        self._salts = [salt_of(key.encode()) for key in keys]
        self._hosts = {"localhost", gethostname().lower(), *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        if scope["type"] != "http":
            return

        if scope["method"] == "HEAD":  # as GET; uvicorn leaves out the body
            scope = {**scope, "method": "GET"}
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        request_id = given if VALID_ID.fullmatch(given) else uuid4().hex

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope["path"], message["status"])
                message["headers"] = [*message["headers"], (REQUEST_ID.encode(), request_id.encode())]
            await send(message)

        try:
            self._check_host(headers.get("host", ""))
            scope["owner"] = self._client(scope, headers)
        except ApiError as error:
            await error.response()(scope, receive, counted)
        else:
            await self._app(scope, receive, counted)

    def _check_host(self, host: str) -> None:
        """Refuse names that are not this server's: a web page elsewhere may have one that leads here. An address in
        numbers is what it says."""
        found = HOST.fullmatch(host)  # malformed (RFC 9110 7.2) if it is none
        name = "" if found is None else (found["address"] or found["name"]).lower()
        if name not in self._hosts and address_of(name) is None:
            text = f"this server is not {host[:80]!r}. Use its address, or start it with --allow-host."
            raise ApiError(403, text, "host_not_allowed")

    def _client(self, scope: Scope, headers: Headers) -> tuple[str, str]:
        """The client whose share of the engine is counted, and the salt of the prefixes and documents that it shares.

        Raises:
            ApiError: without one of the API keys.
        """
        peer = str((scope.get("client") or ["local"])[0])
        if not self._salts or scope["path"] in WITHOUT_KEY:
            return peer, ""
        scheme, _, key = headers.get("authorization", f"bearer {headers.get('x-api-key', '')}").partition(" ")
        salt = salt_of(key.strip().encode("latin-1"))  # as headers are decoded
        known = [compare_digest(salt, other) for other in self._salts]  # all of them, whichever it is
        if scheme.lower() != "bearer" or not any(known):
            text = "this server needs an API key, as in: Authorization: Bearer KEY."
            raise ApiError(401, text, "invalid_api_key")
        return salt, salt
