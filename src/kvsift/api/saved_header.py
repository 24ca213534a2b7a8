"""The header of a saved document: what the document is, and where its tensors are in the file.

The file is one of safetensors: the length of the header, the header as JSON, the tensors. Checksums are the last
tensor: CRC-32 of length and header, then of each tensor before it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from kvsift.errors import DamagedFile, InputError, MissingFile, UnreadableFile, UnwritableFile, WrongFile

FORMAT = 4  # 1: control tokens that a document spelled could be among its tokens; 2 and 3: other layouts of sketches
KEY = "kvsift document"
START = b'{"__metadata__": {"' + KEY.encode()
CHECKSUMS = "checksums"
CHECKSUM_BYTES = 4
MOST_HEADER = 100_000_000  # bytes that safetensors reads


class TensorEntry(NamedTuple):
    """A tensor of the file; ``dtype`` is spelled as safetensors does."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.itemsize


def header_bytes(document: dict[str, Any], entries: Sequence[TensorEntry]) -> bytes:
    """Return length and header of a file with these tensors, whose checksums follow them."""
    header: dict[str, Any] = {"__metadata__": {KEY: json.dumps(document, sort_keys=True)}}
    checksums = TensorEntry(CHECKSUMS, "U8", (CHECKSUM_BYTES * (len(entries) + 1),), 1)
    stop = 0
    for entry in (*entries, checksums):
        start, stop = stop, stop + entry.num_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    return len(text).to_bytes(8, "little") + text


def is_saved_document(path: Path) -> bool:
    """Whether a file begins as one that ``Document.save`` has written."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(8 + len(START))[8:] == START
    except OSError:
        return False


def check_replaceable(path: Path) -> None:
    """Refuse to save a document over a file of another kind (``InputError``)."""
    if path.is_file() and path.stat().st_size and not is_saved_document(path):
        raise UnwritableFile(
            f"a document cannot be saved as {path}: a file that is not a saved document is there, and would be lost. "
            "Give another name, or remove it."
        )


def read_header(path: Path) -> bytes:
    """Return length and header of a saved document.

    Raises:
        InputError: if it cannot be read, or is none.
    """
    try:
        if not path.is_file():  # a pipe would never end
            what = "does not exist" if not path.exists() else "is a directory" if path.is_dir() else "is no file"
            raise MissingFile(f"{path} {what}. Give the file that Document.save has written.")
        if not is_saved_document(path):
            path.open("rb").close()  # or it cannot be read
            raise WrongFile(
                f"{path} is not a saved document, or its first bytes are damaged. To read a text: llm.read."
            )
        with path.open("rb") as file:
            length = file.read(8)
            return length + file.read(min(int.from_bytes(length, "little"), MOST_HEADER))
    except OSError as error:
        raise UnreadableFile(f"the saved document {path} cannot be read: {error.strerror}.") from None


def document_of(path: Path, header: bytes) -> dict[str, Any]:
    """Return the document of a header.

    Raises:
        InputError: if the header is damaged, or of a format that is not known here.
    """
    try:
        document: dict[str, Any] = json.loads(json.loads(header[8:])["__metadata__"][KEY])
        written, by = int(document["format"]), document["kvsift"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise damaged(path, "its header cannot be read") from None
    if written > FORMAT:
        raise WrongFile(
            f"{path} was saved by kvsift {by} in format {written}, and this kvsift reads format {FORMAT}. Update "
            "kvsift, or read its text again."
        )
    if written < FORMAT:
        reason = (
            "control tokens that a text spells can end turns" if written == 1 else "page summaries have another layout"
        )
        raise WrongFile(
            f"{path} was saved by kvsift {by} in format {written}, in which {reason}. Read its text again and save it."
        )
    return document


def damaged(path: Path, reason: str) -> InputError:
    """Return the error for a file that is not as it was written."""
    return DamagedFile(
        f"the saved document {path} is damaged: {reason}. Copy it again from where it was saved, or read the document "
        "again and save it."
    )
