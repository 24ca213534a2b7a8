"""Documents that stay on the disk between starts: a JSON file each, named by its id, with a checksum.

Beside it is what the engine has read (``kept_prompts``), which is made again if it cannot be used.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from datetime import datetime
from fcntl import LOCK_EX, LOCK_NB, flock
from hashlib import blake2b
from pathlib import Path
from socket import gethostname
from typing import Any, TextIO

from kvsift.atomic_files import reason, write_atomically
from kvsift.errors import Unavailable, UnwritableFile
from kvsift.server.served_document import ServedDocument

NAME = re.compile(r"doc-[0-9a-f]{24}")
LEFT = re.compile(rf"{NAME.pattern}\.(json|kvsift)\..*partial")  # by a process that was killed while it wrote
FORM = 1
LOCK = "kvsift.lock"  # names the server that has the folder


class DocumentFiles:
    """The folder of ``--documents``, which is this process's alone while the object lives: a start removes what another
    server is writing.

    Args:
        folder: made if it is not there; only its owner may read what is written.

    Raises:
        InputError: if it cannot be written, or another server has it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise UnwritableFile(f"--documents {folder} cannot be made: {error.strerror}.") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UnwritableFile(f"--documents {folder} cannot be written. Give another folder.")
        self._lock = self._locked()

    def _locked(self) -> TextIO:
        """The file of a lock, which the system takes back when the process ends, however it does."""
        try:
            descriptor = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise UnwritableFile(f"--documents {self._folder} cannot be locked: {LOCK}: {error.strerror}.") from None
        lock = os.fdopen(descriptor, "r+", errors="replace")
        try:
            flock(lock, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            holder = lock.read(200).strip() or "a process that has just started"
            lock.close()
            raise Unavailable(
                f"--documents {self._folder} is in use by another kvsift serve: {holder}. Give another folder, or end "
                "that server first."
            ) from None
        except OSError as error:  # of some network disks
            text = f"--documents {self._folder} cannot be locked ({error.strerror}); let no other server use it"
            print(f"kvsift: {text}.", file=sys.stderr)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
        lock.flush()
        return lock

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
        """Keep a document; if that fails, the document and a line of the log say so, and it is served until the server
        ends."""
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
            document.kept, document.why_not_kept = True, None
        except OSError as error:
            document.kept, document.why_not_kept = False, f"{reason(error)}."
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
    header = json.loads(head)
    if header["form"] != FORM:
        raise ValueError(f"it has form {header['form']}, and this version reads {FORM}")
    if header["checksum"] != _checksum(packed):
        raise ValueError("its checksum is wrong, so it is not whole")
    content: dict[str, Any] = json.loads(packed)
    client, salt = content.pop("owner")
    names = "name", "num_bytes", "created", "text"
    owner = str(client), str(salt)
    return {"key": key, "owner": owner, "kept": True, **{name: content[name] for name in names}}


def _checksum(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
