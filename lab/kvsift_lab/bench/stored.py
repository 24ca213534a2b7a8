"""Results of benches on disk: a folder with a summary to read and to compare, and the raw samples beside it.

``summary.json`` holds kind, recipe, machine, versions, commit and points; in it a list of samples is its median, spread
and count. ``samples.json.xz`` holds those lists. ``load`` puts both together, so a table is made of what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from statistics import median
from typing import Any

from kvsift.engine.atomic_files import write_atomically
from kvsift.errors import InputError
from kvsift_lab.bench.numbers import document, spread

SUMMARY, SAMPLES = "summary.json", "samples.json"  # the latter ends in .xz where Python has lzma
ABOUT = {"recipe", "versions", "gpu", "bandwidth", "settings"}  # of the result, not samples
MANY = 16  # a longer list is no part of a summary, whatever it holds


def save(path: Path, result: dict[str, Any]) -> None:
    """Write the folder of a result.

    Raises:
        OSError: if it cannot be written; the old files stay.
    """
    samples, name = json.dumps(list(_samples(result))).encode(), SAMPLES
    with suppress(ImportError):  # some builds of Python have none
        import lzma

        samples, name = lzma.compress(samples, preset=lzma.PRESET_EXTREME), f"{SAMPLES}.xz"
    path.mkdir(exist_ok=True)
    write_atomically(path / name, samples)
    write_atomically(path / SUMMARY, document(_without(result)) + "\n")


def load(path: Path) -> dict[str, Any]:
    """Return a result with its samples, from a folder or from one file, which may be compressed with xz.

    Raises:
        InputError: if there is none, or it cannot be read.
    """
    try:
        if not path.is_dir():
            return _read(path)
        result, samples = _read(path / SUMMARY), []
        with suppress(FileNotFoundError):
            samples = _read(path / SAMPLES)
        for (*outer, last), values in samples:
            with suppress(LookupError):  # of a point that is not in the summary yet: the process was killed
                reduce(getitem, outer, result)[last] = values
    except FileNotFoundError:
        raise InputError(f"the result file {path} does not exist.") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"the result {path} is not JSON: {error}") from None
    except (OSError, ValueError, LookupError, EOFError, ImportError) as error:
        raise InputError(f"the result {path} cannot be read: {error}") from None
    return result


def is_folder(path: Path) -> bool:
    """Whether a result of this path is a folder, not one file, which ends in .json or exists."""
    return path.is_dir() or not (path.suffix == ".json" or path.exists())


def check(path: Path) -> None:
    """Refuse a folder that cannot be one of a result, before anything is measured.

    Raises:
        InputError: if it holds other files, or its parent is missing.
    """
    if not path.parent.is_dir():
        raise InputError(f"--out {path}: the directory {path.parent} does not exist.")
    if path.exists() and any(path.iterdir()) and not (path / SUMMARY).exists():
        raise InputError(f"--out {path} exists and is no result. Name a new folder, or a file that ends in .json.")


def _read(path: Path) -> Any:
    """Return JSON from a file, or from the one with .xz behind its name if only that exists."""
    if not path.exists():
        path = path.with_name(f"{path.name}.xz")
    data = path.read_bytes()
    if path.suffix == ".xz":
        import lzma

        try:
            data = lzma.decompress(data)
        except lzma.LZMAError as error:
            raise ValueError(error) from None
    return json.loads(data)


def _is_raw(value: Any, key: str | int) -> bool:
    """Whether this is a list of samples: numbers, or records under the key ``samples``."""
    if not isinstance(value, list) or len(value) < 2:
        return False
    if any(isinstance(each, dict) for each in value):
        return key == "samples"
    return len(value) > MANY or (_are_numbers(value) and any(isinstance(each, float) for each in value))


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(each, int | float) for each in values)


def _samples(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield every list of samples, after its place: keys and indices from the outside."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        if _is_raw(each, key):
            yield (*place, key), each
        elif place or key not in ABOUT:
            yield from _samples(each, (*place, key))


def _without(value: Any, key: str | int = "", outermost: bool = True) -> Any:
    """Return a result in which lists of samples are numbers about them."""
    if _is_raw(value, key):
        return _about(value)
    if isinstance(value, dict):
        return {k: each if outermost and k in ABOUT else _without(each, k, False) for k, each in value.items()}
    return [_without(each, 0, False) for each in value] if isinstance(value, list) else value


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
