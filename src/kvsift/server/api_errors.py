"""Errors of the HTTP interface, in the form of OpenAI's."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from kvsift.server.response_bodies import Error, ErrorType

MEANINGS = {
    400: "A field is wrong, or the prompt too long.",
    401: "An API key is needed.",
    403: "The Host header is not allowed.",
    404: "There is no such model or document.",
    405: "The route takes another method.",
    408: "The request comes too slowly.",
    413: "The body is too large.",
    415: "The body is of another type than those that are read.",
    429: "Too many requests are waiting.",
    431: "The headers are too large.",
    500: "The answer failed.",
    503: "The server is loading, restarting, draining, or has no connections left.",
}
ALWAYS = 403, 405, 408, 431, 503  # whatever is asked for
HEADERS = {401: "WWW-Authenticate", 405: "Allow", 429: "Retry-After", 503: "Retry-After"}


class ApiError(Exception):
    """A request that is refused, or failed.

    Attributes:
        status: HTTP status.
        message, code, param: as OpenAI's clients show them.
        retry_after: seconds after which the request may succeed; None: never.
        headers: headers of the response.
    """

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"
        if status == 408:  # the rest of the request would be taken for the next one
            self.headers["connection"] = "close"

    def as_dict(self) -> Error:
        """Return the body of the response."""
        return {"error": {"message": self.message, "type": self._type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the response."""
        return JSONResponse(self.as_dict(), self.status, self.headers)

    @property
    def _type(self) -> ErrorType:
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


class ClientLeft(ApiError):
    """The client has closed the connection; the response is counted, and never delivered."""

    def __init__(self) -> None:
        super().__init__(499, "the client has left.", "client_closed_request")


def unavailable(why: str, retry_after: int) -> ApiError:
    """Return the error of a server that takes no requests at the moment."""
    return ApiError(503, f"the server is {why}. Try again later.", f"server_{why}", retry_after=retry_after)


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a route to requests that it refuses, besides those of every route, for its OpenAPI
    document."""
    found: dict[int | str, dict[str, Any]] = {}
    for status in sorted({*ALWAYS, *statuses}):
        found[status] = {"model": Error, "description": MEANINGS[status]}
        if name := HEADERS.get(status):
            found[status]["headers"] = {name: {"schema": {"type": "integer" if status > 405 else "string"}}}
    return found
