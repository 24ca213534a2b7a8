"""Uploaded files as text: what kind a file is, and its text, which a child process makes of HTML and PDF."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from importlib.util import find_spec

from kvsift.server.api_errors import ApiError

EXTRACT = sys.executable, "-m", "kvsift.server.extract"
EXTRACT_S = 90.0
AT_ONCE = 2  # child processes
MOST_NAME = 200  # characters
NO_PDF = "this server reads no PDF files; it would with: pip install 'kvsift[pdf]'. Upload their text."
KINDS = {"text/markdown": "markdown", "text/html": "html", "application/pdf": "pdf", "application/octet-stream": None}
ENDINGS = {".html": "html", ".htm": "html", ".xhtml": "html", ".pdf": "pdf", ".md": "markdown", ".markdown": "markdown"}
FOREIGN = {
    b"PK\x03\x04": "a zip archive, which Word, Excel and EPUB files are, too",
    b"\xd0\xcf\x11\xe0": "an old Office file",
    b"{\\rtf": "an RTF file",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"GIF8": "a picture",
    b"\x1f\x8b": "a compressed file",
}


class NoText(Exception):
    """A file whose text cannot be made, with the reason."""


def readable_kinds() -> list[str]:
    """Return the kinds of files that are read."""
    return ["text", "markdown", "html", *(["pdf"] if find_spec("pypdf") else [])]


def shown_name(name: str | None, default: str) -> str:
    """Return the name of a file as it is shown: without control characters, and not too long."""
    plain = "".join(character for character in name or "" if character.isprintable()).strip()
    return plain[:MOST_NAME] or default


def kind_of(content_type: str, name: str, data: bytes) -> str:
    """Return the kind of a file: by its content, its declared type, and its name.

    Raises:
        ApiError: 415 for kinds that are not read.
    """
    kinds = ", ".join(readable_kinds())
    if content_type not in KINDS:
        also = " Send it as application/octet-stream with ?name=FILE." if content_type == "text/plain" else ""
        types = ", ".join(["application/json", *KINDS])
        text = f"documents are {types}; the Content-Type is {content_type[:80] or 'missing'}.{also}"
        raise ApiError(415, text, "unsupported_media_type")
    for start, what in FOREIGN.items():
        if data.startswith(start):
            raise ApiError(415, f"the file is {what}; {kinds} are read.", "unsupported_document")
    ending = "." + name.lower().rpartition(".")[2]
    kind = "pdf" if data.lstrip()[:5] == b"%PDF-" else KINDS[content_type] or ENDINGS.get(ending)
    if kind is None:
        begin = data[:200].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
        kind = "html" if begin.startswith((b"<!doctype html", b"<html")) else "text"
    if kind == "pdf" and find_spec("pypdf") is None:
        raise ApiError(415, NO_PDF, "unsupported_document")
    return kind


def decoded(data: bytes) -> str:
    """Return a text file as text.

    Raises:
        ApiError: 400 if it is not UTF-8, or UTF-16 with a byte order mark.
    """
    try:
        text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        text = f"the file is not UTF-8 text (byte {error.start}). Convert it, or upload HTML or PDF as such."
        raise ApiError(400, text, "invalid_document") from None
    if "\0" in text:
        raise ApiError(400, "the file is binary; text has no zero bytes.", "invalid_document")
    return text


class Extraction:
    """Makes text of HTML and PDF files, a few at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def text(self, kind: str, data: bytes) -> str:
        """Return the text of a file.

        Raises:
            NoText: if there is none, or it takes too long or too much.
        """
        async with self._turn:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSIFT")}
            child = await asyncio.create_subprocess_exec(
                *EXTRACT, kind, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment, start_new_session=True
            )
            try:
                async with asyncio.timeout(EXTRACT_S):
                    text, problem = await child.communicate(data)
            except TimeoutError:
                raise NoText(f"the {kind} file takes more than {EXTRACT_S:.0f} s to read.") from None
            finally:
                if child.returncode is None:
                    with suppress(ProcessLookupError):
                        child.kill()
                    await child.wait()
        if child.returncode == 2:
            raise NoText(problem.decode("utf-8", "replace")[-400:] + ".")
        if child.returncode:
            reason = "took too long or too much memory" if child.returncode < 0 else "failed"
            raise NoText(f"reading the {kind} file {reason}.")
        if not text.strip():
            raise NoText(f"the {kind} file has no text.")
        return text.decode()
