"""Errors of the HTTP interface, in the form of OpenAI's."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that is refused, or failed.

    Attributes:
        status: of HTTP.
        message, code, param: as OpenAI's clients show them.
        retry_after: seconds after which the request may succeed; None: never.
    """

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 408:  # what is left of the request would be read as the next one
            headers["connection"] = "close"
        return {**headers, "www-authenticate": "Bearer"} if self.status == 401 else headers

    def as_dict(self) -> dict[str, Any]:
        """Return the body of the response."""
        return {"error": {"message": self.message, "type": self._type, "param": self.param, "code": self.code}}

    @property
    def _type(self) -> str:
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


def unavailable(why: str, retry_after: int) -> ApiError:
    """Return the error of a server that takes no requests at the moment."""
    return ApiError(503, f"the server is {why}. Try again later.", f"server_{why}", retry_after=retry_after)
