"""Documents that stay on the disk between starts: a JSON file each, named by its id, with a checksum.

Beside it is what the engine has read (``kept_prompts``), which is made again if it cannot be used.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvsift.engine.atomic_files import reason, write_atomically
from kvsift.errors import InputError
from kvsift.server.served_document import ServedDocument

NAME = re.compile(r"doc-[0-9a-f]{24}")
LEFT = re.compile(rf"{NAME.pattern}\.(json|kvsift)\..*partial")  # by a process that was killed while it wrote
FORM = 1


class DocumentFiles:
    """The folder of ``--documents``.

    Args:
        folder: made if it is not there; only its owner may read what is written.

    Raises:
        InputError: if it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise InputError(f"--documents {folder} cannot be made: {error.strerror}.") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(f"--documents {folder} cannot be written. Give another folder.")

    def load(self) -> Iterator[dict[str, Any]]:
        """Fields of the documents, oldest first; files that are damaged are left out, with a line of the log."""
        found = list[dict[str, Any]]()
        for path in self._folder.glob("doc-*.json"):
            if NAME.fullmatch(path.stem) is None:
                continue
            try:
                found.append(_fields(path.stem, path.read_bytes()))
            except (OSError, ValueError, KeyError, TypeError) as error:
                print(f"kvsift: the document {path.name} is left out: {error}.", file=sys.stderr)
        self._remove_orphans({fields["key"] for fields in found})
        yield from sorted(found, key=lambda fields: (fields["created"], fields["key"]))

    def save(self, document: ServedDocument) -> None:
        """Keep a document; if that fails, a line of the log says so, and it is served until the server ends."""
        content = {
            "name": document.name,
            "owner": list(document.owner),
            "num_bytes": document.num_bytes,
            "created": document.created,
            "text": document.text,
        }
        packed = json.dumps(content, ensure_ascii=False)
        head = json.dumps({"form": FORM, "checksum": _checksum(packed.encode())})
        try:
            write_atomically(self._path(document.key), f"{head}\n{packed}\n")
            self._path(document.key).chmod(0o600)
        except OSError as error:
            print(f"kvsift: the document {document.key} is not kept: {reason(error)}.", file=sys.stderr)

    def delete(self, key: str) -> None:
        """Remove a document."""
        self._path(key).unlink(missing_ok=True)
        self.kept(key).unlink(missing_ok=True)

    def kept(self, key: str) -> Path:
        """Return the file of what the engine has read."""
        return self._path(key).with_suffix(".kvsift")

    def _remove_orphans(self, keys: set[str]) -> None:
        for path in self._folder.iterdir():
            is_orphan = path.suffix == ".kvsift" and NAME.fullmatch(path.stem) and path.stem not in keys
            if is_orphan or LEFT.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        assert NAME.fullmatch(key), "ids are made here, and never come from a client"
        return self._folder / f"{key}.json"


def _fields(key: str, data: bytes) -> dict[str, Any]:
    head, _, packed = data.rstrip(b"\n").partition(b"\n")
    told = json.loads(head)
    if told["form"] != FORM:
        raise ValueError(f"it has form {told['form']}, and this version reads {FORM}")
    if told["checksum"] != _checksum(packed):
        raise ValueError("its checksum is wrong, so it is not whole")
    content: dict[str, Any] = json.loads(packed)
    client, salt = content.pop("owner")
    names = "name", "num_bytes", "created", "text"
    return {"key": key, "owner": (str(client), str(salt)), **{name: content[name] for name in names}}


def _checksum(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
