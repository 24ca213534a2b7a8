"""Local files as tasks of recipes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from kvsift.errors import InputError, unknown
from kvsift_lab.eval.loaders import LOADERS

FILE_KEYS = "kind", "path", "limit", "max_tokens", "name"


@dataclass(frozen=True)
class TaskFile:
    """A task from a local file in its published format.

    Attributes:
        kind: the format, a name in ``eval.loaders.LOADERS``.
        path: of a file or a directory of files.
        limit: the most samples to use.
        name: of the task in results; by default that of the file.
        max_tokens: longer contexts lose their middle; None: no limit.
    """

    kind: str
    path: str
    limit: int
    name: str
    max_tokens: int | None = None


def task_file(table: object, recipe: str) -> TaskFile:
    """Return a task from its table in a recipe.

    Raises:
        InputError: if the file is missing, or a key or value is wrong.
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
    """Return the digest of a file, or of all files of a directory with their names."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    digests = [(str(file.relative_to(path.parent)), hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def whole_number(key: str, value: object, least: int) -> None:
    """Refuse a value of a recipe that is not a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{key}={value!r} of a recipe must be a whole number, {least} or more.")
