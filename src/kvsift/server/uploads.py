"""Uploaded files as text: what kind a file is, and its text, which a child process makes of HTML and PDF."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from encodings import normalize_encoding
from encodings.aliases import aliases
from importlib.util import find_spec
from weakref import WeakValueDictionary

from kvsift.server.api_errors import ApiError
from kvsift.server.extract import CPU_S

EXTRACT = sys.executable, "-m", "kvsift.server.extract"
EXTRACT_S = 90.0
AT_ONCE = 4  # child processes, of which a client has one
MOST_NAME = 200  # characters
NO_PDF = "this server reads no PDF files; it would with: pip install 'kvsift[pdf]'. Upload their text."
KINDS = {"text/markdown": "markdown", "text/html": "html", "application/pdf": "pdf", "application/octet-stream": None}
ENDINGS = {".html": "html", ".htm": "html", ".xhtml": "html", ".pdf": "pdf", ".md": "markdown", ".markdown": "markdown"}
# Encodings of web pages (encoding.spec.whatwg.org), by Python's names; some are read as supersets of themselves.
SUPERSETS = {
    "ascii": "cp1252", "latin_1": "cp1252", "iso8859_9": "cp1254", "tis_620": "cp874", "windows_874": "cp874",
    "gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs",
    "utf_16": "utf_16_le",
}  # fmt: skip
ENCODINGS = {
    "utf_8", "utf_16_be", "cp866", "koi8_r", "koi8_u", "mac_roman", "mac_cyrillic", "euc_jp", "iso2022_jp",
    *SUPERSETS.values(), *(f"cp125{number}" for number in range(9)),
    *(f"iso8859_{number}" for number in (2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 15, 16)),
}  # fmt: skip
MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
NAMED = re.compile(
    rb"<(?:meta[^>]{0,200}charset|\?xml[^>]{0,200}encoding)\s{0,9}=\s{0,9}[\"']?([A-Za-z0-9_:.-]{1,40})", re.IGNORECASE
)
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


def decoded(data: bytes, kind: str, charset: str | None = None) -> str:
    """Return a file as text: by its byte order mark, the charset of its Content-Type, the one that a page names, or in
    UTF-8.

    Raises:
        ApiError: 400 if it is in another encoding, or the charset is unknown.
    """
    encoding = next((name for mark, name in MARKS.items() if data.startswith(mark)), None)
    if encoding is None and charset:
        if (encoding := encoding_of(charset)) is None:
            text = f"the charset {charset[:40]!r} of the Content-Type is not known. Convert the file to UTF-8."
            raise ApiError(400, text, "invalid_document")
    elif encoding is None and kind == "html" and (named := NAMED.search(data[:4096])):
        encoding = encoding_of(named[1].decode())
        encoding = None if encoding in ("utf_16_le", "utf_16_be") else encoding  # its name is not written in those
    try:
        text = data.decode(encoding or "utf-8")
    except UnicodeDecodeError as error:
        shown = (encoding or "utf-8").removesuffix("-sig").replace("_", "-").upper()
        hint = "Convert it, name its charset in the Content-Type, or upload HTML or PDF as such."
        text = f"the file is not {shown} text (byte {error.start}). {hint}"
        raise ApiError(400, text, "invalid_document") from None
    if "\0" in text:
        raise ApiError(400, "the file is binary; text has no zero bytes.", "invalid_document")
    return text


def encoding_of(label: str) -> str | None:
    """Return Python's name of an encoding of web pages; None for any other label."""
    name = normalize_encoding(label).lower()  # no look-up, which would keep every label that it does not know
    name = aliases.get(name, name)
    name = SUPERSETS.get(name, name)
    return name if name in ENCODINGS else None


class Extraction:
    """Makes text of HTML and PDF files, one of a client and a few in all at a time."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(AT_ONCE)
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()  # of clients that wait

    async def text(self, kind: str, data: bytes, owner: tuple[str, str]) -> str:
        """Return the text of a PDF file, or an HTML file in UTF-8, after those before it of the same client.

        Raises:
            NoText: if there is none, or it takes too long or too much.
        """
        turn = self._turns.setdefault(owner, asyncio.Lock())
        async with turn, self._places:
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
            reason = (
                f"took more than {CPU_S} s of a processor, or too much memory" if child.returncode < 0 else "failed"
            )
            raise NoText(f"reading the {kind} file {reason}.")
        if not text.strip():
            raise NoText(f"the {kind} file has no text.")
        return text.decode()
