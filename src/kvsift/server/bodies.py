"""Bodies of requests, up to a size, and not too slow."""

from __future__ import annotations

import asyncio
import re

from starlette.requests import ClientDisconnect, Request

from kvsift.server.api_errors import ApiError, ClientLeft

MOST_BYTES = 16 << 20
CHARSET = re.compile(r";\s*charset\s*=\s*[\"']?([^\s;\"']+)", re.IGNORECASE)
BODY_S, SLOWEST = 30.0, 32 << 10  # seconds for a body, and bytes for which it has a second more


def kind_of_body(request: Request) -> str:
    """Return the Content-Type of a request, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def charset_of_body(request: Request) -> str | None:
    """Return the charset that the Content-Type of a request names, if it names one."""
    found = CHARSET.search(request.headers.get("content-type", ""))
    return None if found is None else found[1]


async def json_of(request: Request) -> bytes:
    """As ``body_of``; refused unless it is declared as JSON, which web pages elsewhere cannot do without permission."""
    if (kind := kind_of_body(request)) != "application/json":
        text = f"the body must be application/json; the Content-Type is {kind[:80] or 'missing'}."
        raise ApiError(415, text, "unsupported_media_type")
    return await body_of(request)


async def body_of(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: if it is too large, or too slow, or the client leaves.
    """
    too_large = ApiError(413, f"the body is larger than {MOST_BYTES >> 20} MB.", "body_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MOST_BYTES:
        raise too_large
    parts = bytearray()
    started = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(started + BODY_S) as limit:
            async for part in request.stream():
                parts += part
                if len(parts) > MOST_BYTES:
                    raise too_large
                limit.reschedule(started + BODY_S + len(parts) / SLOWEST)
    except TimeoutError:
        text = f"the body took longer than {BODY_S:g} s and a second for every {SLOWEST >> 10} KB."
        raise ApiError(408, text, "request_timeout") from None
    except ClientDisconnect:
        raise ClientLeft from None
    return bytes(parts)
