"""Results on disk: files that may be compressed with xz, samples that survive an interrupted run, results of benches.

A result of a bench is a folder with a summary to read and to compare, and the raw samples beside it. ``summary.json``
holds kind, recipe, machine, versions, commit and points; in it a list of samples is its median, spread and count.
``samples.json.xz`` holds those lists. ``load`` puts both together, so a table is made of what was measured.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from statistics import median
from typing import Any

from kvsift.atomic_files import settle, write_atomically
from kvsift.errors import (
    DamagedFile,
    MissingFile,
    MissingPackage,
    Unavailable,
    UnreadableFile,
    UnwritableFile,
    WrongFile,
)
from kvsift_lab.numbers import spread

SUMMARY, RAW = "summary.json", "samples.json"  # the latter ends in .xz where Python has lzma
ABOUT = {"recipe", "versions", "gpu", "bandwidth", "settings"}  # of the result, not samples
MANY = 16  # a longer list is no part of a summary, whatever it holds
ON_ONE_LINE = 120  # characters of a record in a result file


def compressed(path: Path) -> Path:
    """Return the path of a file that is compressed with xz."""
    return path.with_name(path.name + ".xz")


def stored(path: Path) -> Path:
    """Return the path, or that of the compressed file if only that exists."""
    return compressed(path) if not path.exists() and compressed(path).exists() else path


def read_json(path: Path) -> Any:
    """Return the document of a JSON file, plain or compressed; of ``name.json`` and ``name.json.xz``, the plain one.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is no JSON; RecursionError if it is nested too deeply.
        InputError: if it is damaged.
    """
    source = stored(path)
    return json.loads(_decompressed(source) if source.suffix == ".xz" else source.read_bytes())


def whole_lines(path: Path) -> bytes:
    """Return the finished lines of a file, plain or compressed. A killed process may leave both: the longer one counts,
    since lines are only appended after all of them are in the plain one.

    Raises:
        OSError: if it is missing or cannot be read.
        InputError: if it is damaged.
    """
    lines = _decompressed(compressed(path)) if compressed(path).exists() else b""
    if path.exists() or not lines:
        lines = max(path.read_bytes(), lines, key=len)
    return lines[: lines.rfind(b"\n") + 1]


def _decompressed(source: Path) -> bytes:
    try:
        import lzma

        return lzma.decompress(source.read_bytes())
    except ImportError:  # some builds of Python have none
        raise MissingPackage(f"{source} is compressed and this Python has no lzma. Unpack it: xz -d {source}") from None
    except lzma.LZMAError as error:
        raise DamagedFile(f"{source} cannot be unpacked ({error}). Copy it from its source again.") from None


class SampleFile:
    """A file of whole lines, open for appending in one process at a time. An unfinished line of a killed process is
    dropped; a compressed file is decompressed before the first appended line.

    Attributes:
        text: its whole lines.
        dropped: bytes of the unfinished line after them.

    Raises:
        InputError: if another process is appending, or the compressed file is damaged.
        OSError: if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _locked(path)
        try:
            lines, plain = whole_lines(path), path.read_bytes()
            self.text = lines.decode(errors="replace")
            self._compressed = not plain.startswith(lines)  # the plain file is empty, or a part of a copy
            self.dropped = 0 if self._compressed else len(plain) - len(lines)
            # what is to be written before the first line, and where
            self._before, self._stop = (lines, 0) if self._compressed else (b"", len(lines))
            if not self._compressed:
                os.ftruncate(self._file, self._stop)
                compressed(path).unlink(missing_ok=True)
                settle(path.parent)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, line: str) -> None:
        """Append a line and flush it to the disk.

        Raises:
            OSError: if the disk is full; the lines are unchanged then.
        """
        data, written = self._before + (line + "\n").encode(), 0
        try:
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._stop + written)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._stop)  # needs no room
            raise
        self._before, self._stop = b"", self._stop + len(data)
        if self._compressed:
            settle(self.path.parent)
            compressed(self.path).unlink()
            self._compressed = False

    def close(self, finished: bool = False) -> None:
        """Release the lock; compress the file if it is ``finished``.

        Raises:
            OSError: if the disk is full; the file stays plain then.
        """
        try:
            if finished and not self._compressed and self._stop:
                import lzma

                lines = self.path.read_bytes()
                write_atomically(compressed(self.path), lzma.compress(lines, preset=6 | lzma.PRESET_EXTREME))
                self._compressed = True
            if self._compressed:
                self.path.unlink(missing_ok=True)
        finally:
            os.close(self._file)


def _locked(path: Path) -> int:
    """Open the file under an exclusive lock; create it if missing."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise Unavailable(f"another process is writing to {path}. Wait for it, or give another --out.") from None
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            return file
        os.close(file)  # another process has compressed it between the two steps


def save(path: Path, result: dict[str, Any]) -> None:
    """Write the folder of a result of a bench.

    Raises:
        OSError: if it cannot be written; the old files stay.
    """
    lists: list[Any] = []
    summary = _summary(result, lists)
    samples, name = json.dumps(lists).encode(), RAW
    with suppress(ImportError):  # some builds of Python have none
        import lzma

        samples, name = lzma.compress(samples, preset=lzma.PRESET_EXTREME), f"{RAW}.xz"
    path.mkdir(exist_ok=True)
    write_atomically(path / name, samples)
    write_atomically(path / SUMMARY, document(summary) + "\n")


def load(path: Path) -> dict[str, Any]:
    """Return a result of a bench with its samples, from a folder or from one file, which may be compressed with xz.

    Raises:
        InputError: if there is none, or it cannot be read.
    """
    try:
        result, samples = read_json(path / SUMMARY if path.is_dir() else path), []
        if path.is_dir() and stored(path / RAW).exists():
            samples = read_json(path / RAW)
        for (*outer, last), values in samples:
            with suppress(LookupError):  # of a point that is not in the summary yet: the process was killed
                reduce(getitem, outer, result)[last] = values
    except FileNotFoundError:
        raise MissingFile(f"the result file {path} does not exist.") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise WrongFile(f"the result {path} is not JSON: {error}") from None
    except (OSError, ValueError, LookupError) as error:
        raise UnreadableFile(f"the result {path} cannot be read: {error}") from None
    return dict(result)


def is_folder(path: Path) -> bool:
    """Whether a result of this path is a folder, not one file, which ends in .json or exists."""
    return path.is_dir() or not (path.suffix == ".json" or path.exists())


def check(path: Path) -> None:
    """Refuse a folder that cannot be one of a result, before anything is measured.

    Raises:
        InputError: if it holds other files, or its parent is missing.
    """
    if not path.parent.is_dir():
        raise UnwritableFile(f"--out {path}: the directory {path.parent} does not exist.")
    if path.exists() and any(path.iterdir()) and not (path / SUMMARY).exists():
        raise UnwritableFile(f"--out {path} exists and is no result. Name a new folder, or a file that ends in .json.")


def document(result: Any) -> str:
    """Return a result as JSON for a file: indented, what is short and holds nothing nested on one line."""

    def joined(match: re.Match[str]) -> str:
        text = re.sub(r"\n\s*", " ", match[0])
        return text if len(text) <= ON_ONE_LINE or text[0] == "[" else match[0]

    return re.sub(r"\[[\s\d.,eE+-]+\]|\{[^{}\[\]]*\}", joined, json.dumps(result, indent=1))


def _summary(value: Any, lists: list[Any], *place: str | int) -> Any:
    """Return a value in which lists of samples are numbers about them; ``lists`` takes these lists, each after its
    place: keys and indices from the outside."""
    if place and _is_raw(value, place[-1]):
        lists.append((place, value))
        return _about(value)
    if isinstance(value, dict):
        return {
            key: each if not place and key in ABOUT else _summary(each, lists, *place, key)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_summary(each, lists, *place, index) for index, each in enumerate(value)]
    return value


def _is_raw(value: Any, key: str | int) -> bool:
    """Whether this is a list of samples: numbers, or records under the key ``samples``."""
    if not isinstance(value, list) or len(value) < 2:
        return False
    if any(isinstance(each, dict) for each in value):
        return key == "samples"
    return len(value) > MANY or (_are_numbers(value) and any(isinstance(each, float) for each in value))


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(each, int | float) for each in values)


def _about(values: list[Any]) -> dict[str, Any]:
    if all(isinstance(each, dict) for each in values):
        medians = {
            key: median(each[key] for each in values)
            for key, first in (values[0] if values else {}).items()
            if isinstance(first, int | float) and all(isinstance(each.get(key), int | float) for each in values)
        }
        return {"count": len(values), "medians": medians}
    if not _are_numbers(values):
        return {"count": len(values)}
    return {
        "median": median(values),
        "spread": round(spread(values), 4) if median(values) else 0.0,
        "count": len(values),
    }
