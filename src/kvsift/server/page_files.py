"""The page at / and its files, served from memory."""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

PREFIX = "/page/"
CSP = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"  # text of documents cannot become HTML
)
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
INDEX = "index.html"


class PageFile:
    """One file of the page.

    Args:
        name: of the file.
        data: its bytes.

    Attributes:
        path: of its route.
    """

    def __init__(self, name: str, data: bytes) -> None:
        self.path = "/" if name == INDEX else PREFIX + name
        self._data, self._tag = data, f'"{blake2b(data, digest_size=12).hexdigest()}"'
        self._headers = {
            "content-type": f"{KINDS[name.rpartition('.')[2]]}; charset=utf-8",
            "content-security-policy": CSP,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",  # kept, and asked for again: a new version is seen at once
            "etag": self._tag,
        }

    async def answer(self, request: Request) -> Response:
        """Return the file, unless the browser has it."""
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self._tag in known:
            return Response(status_code=304, headers=self._headers)
        return Response(self._data, headers=self._headers)


def _read() -> tuple[PageFile, ...]:
    folder = sorted(files("kvsift.server").joinpath("page").iterdir(), key=lambda file: file.name)
    return tuple(PageFile(file.name, file.read_bytes()) for file in folder if file.name.rpartition(".")[2] in KINDS)


PAGE_FILES = _read()
PAGE_PATHS = frozenset(file.path for file in PAGE_FILES)
