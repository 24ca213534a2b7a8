"""Tasks from local files, as recipes name them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from kvsift.errors import InputError, unknown
from kvsift.eval.loaders import LOADERS

FILE_KEYS = "kind", "path", "limit", "max_tokens", "name"


@dataclass(frozen=True)
class TaskFile:
    """A task from a local file in its published format.

    Attributes:
        kind: of the format: a name in ``eval.loaders.LOADERS``.
        path: of the file, or of a directory of files.
        limit: at most so many samples of it.
        name: of the task in results; that of the file unless given.
        max_tokens: longer contexts lose their middle; None leaves them as they are.
    """

    kind: str
    path: str
    limit: int
    name: str
    max_tokens: int | None = None


def task_file(table: object, recipe: str) -> TaskFile:
    """A file as a recipe names it.

    Raises:
        InputError: if it is not there, or a key or a value makes no sense.
    """
    if not isinstance(table, dict) or not {"kind", "path"} <= table.keys():
        raise InputError(f"files of the recipe {recipe} are tables with kind and path; got {table!r}.")
    for key in table:
        if key not in FILE_KEYS:
            raise unknown(f"key of a file of the recipe {recipe}", key, FILE_KEYS)
    kind, path, limit, most = table["kind"], Path(table["path"]), table.get("limit", 100), table.get("max_tokens")
    if kind not in LOADERS:
        raise unknown("kind of file", str(kind), LOADERS)
    whole_number("limit", limit, 1)
    if most is not None:
        whole_number("max_tokens", most, 1)
    if not path.exists():
        raise InputError(f"the recipe {recipe} names the file {path}, which does not exist.")
    return TaskFile(kind, str(path), limit, table.get("name", path.stem), most)


def digest(path: Path) -> str:
    """Of what is in a file, or in all files of a directory with their names."""
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    found = [(str(each.relative_to(path.parent)), hashlib.sha256(each.read_bytes()).hexdigest()) for each in files]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def whole_number(key: str, value: object, least: int) -> None:
    """Refuse a value of a recipe that is no whole number, or less than it may be."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{key}={value!r} of a recipe must be a whole number, {least} or more.")
