"""JSON lines with errors that name the file and the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsift.errors import InputError


@dataclass(frozen=True)
class JsonLine:
    """One object of a JSON lines file."""

    path: Path
    number: int
    values: dict[str, Any]

    def error(self, what: str) -> InputError:
        return InputError(f"{self.path}:{self.number}: {what}")

    def text(self, key: str) -> str:
        """Return a field that must be text."""
        value = self._value(key)
        if not isinstance(value, str):
            raise self.error(f"{key!r} must be text, not {_short(value)}.")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a field that must be a list of at least one text."""
        value = self._value(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self.error(f"{key!r} must be a list of texts, at least one, not {_short(value)}.")
        return tuple(value)

    def _value(self, key: str) -> Any:
        if key not in self.values:
            raise self.error(f"no {key!r}; there are {', '.join(map(repr, self.values)) or 'no fields'}.")
        return self.values[key]


def read_lines(path: Path) -> Iterator[JsonLine]:
    """Yield the objects of a file in order; empty lines are skipped.

    Raises:
        InputError: for a line that is not UTF-8, not JSON or not an object.
    """
    if path.is_dir():
        raise InputError(f"{path} is a directory; give one of its files.")
    with path.open("rb") as file:  # only a newline ends a line; text mode has other ends
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                values = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
                raise InputError(f"{path}:{number}: a JSON object per line is expected: {error}.") from None
            if not isinstance(values, dict):
                raise InputError(f"{path}:{number}: a JSON object is expected, not {_short(values)}.")
            yield JsonLine(path, number, values)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
