"""The page at / and its files, served from memory."""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

CSP = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"  # text of documents cannot become HTML
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # kept, and asked for again: a new version is seen at once
}
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def _load() -> dict[str, tuple[bytes, dict[str, str]]]:
    """Content and headers of each file by the path of its route. Files are told apart by their content, as their times
    may be those of a build."""
    page = {}
    for file in sorted(files("kvsift.server").joinpath("page").iterdir(), key=lambda file: file.name):
        if kind := KINDS.get("." + file.name.rpartition(".")[2]):
            data = file.read_bytes()
            tag = f'"{blake2b(data, digest_size=12).hexdigest()}"'
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            page[path] = data, {**HEADERS, "content-type": f"{kind}; charset=utf-8", "etag": tag}
    return page


PAGE = _load()


async def page_file(request: Request) -> Response:
    """Return a file of the page, unless the browser has it."""
    data, headers = PAGE[request.scope["path"]]
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    return Response(status_code=304, headers=headers) if headers["etag"] in known else Response(data, headers=headers)
