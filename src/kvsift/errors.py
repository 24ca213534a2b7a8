"""Errors that say what was given, what is possible and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class KVSiftError(Exception):
    """Anything kvsift refuses: the message is for the user, and complete without a traceback."""


class InputError(KVSiftError, ValueError):
    """Something the user gave cannot be used."""


class LogitsError(KVSiftError, ArithmeticError):
    """The logits of a model are such that no token can be chosen from them; the answer ends with this error."""


class NothingSkipped(KVSiftError, RuntimeError):
    """A sparse plan ran and read everything; raised under ``strict``."""


def unknown(what: str, given: str, known: Iterable[str]) -> InputError:
    """The error for a name that is not known, with the nearest known one."""
    names = sorted(known)
    near = get_close_matches(str(given), names, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return InputError(f"unknown {what} {given!r}{hint} Known: {', '.join(names)}")


def one_line(error: Exception) -> str:
    """The message of an error on one line of at most 300 characters, without the full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    detail = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])  # "Validation error for field 'x':\n    ..."
    text = " ".join(detail.split()).rstrip(".")
    if isinstance(error, KeyError):
        text = f"it has no {text}"
    return text if len(text) <= 300 else text[:300] + " ..."
