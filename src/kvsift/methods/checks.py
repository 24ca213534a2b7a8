"""Checks of hyper-parameters; a refusal names the given value and the possible ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from math import inf
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvsift.errors import InvalidValue

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "left out"}


def of_declared_types(cls: type, settings: Mapping[str, object]) -> None:
    """Check that values fit the annotations of a dataclass, as far as these are numbers, flags and words."""
    try:
        hints = get_type_hints(cls)
    except NameError:  # a name imported for type checkers alone: the types of the defaults are used
        hints = {}
    for field in fields(cls):
        if field.name not in settings:
            continue
        value = settings[field.name]
        kinds = list(_kinds(hints.get(field.name, Any if field.default is None else type(field.default))))
        if any(_is_of(value, kind) for kind in kinds):
            continue
        near = get_close_matches(str(value), [kind for kind in kinds if isinstance(kind, str)], n=1)
        default = str(field.default).lower() if isinstance(field.default, bool) else repr(field.default)
        raise InvalidValue(
            f"{field.name}={value!r} must be {_listed([KINDS.get(kind) or repr(kind) for kind in kinds])}; "
            + (f"did you mean {near[0]!r}?" if near else f"by default it is {default}.")
        )


def _kinds(hint: Any) -> Iterator[Any]:
    """Types of KINDS and words that a type hint allows; ``object`` for anything else."""
    if get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _kinds(part)
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        yield hint if hint in KINDS else object


def _is_of(value: object, kind: Any) -> bool:
    if kind is object:
        return True
    expected = kind if isinstance(kind, type) else type(kind)
    if isinstance(value, bool) and expected is not bool:  # a flag is no number
        return False
    return isinstance(value, int | float if expected is float else expected) and (expected is kind or value == kind)


def _listed(choices: Sequence[str]) -> str:
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def use_python_numbers(settings: object) -> None:
    """Turn numbers of other libraries, such as NumPy's, in the fields of a frozen dataclass into Python's."""
    for field in fields(settings):  # type: ignore[arg-type]
        object.__setattr__(settings, field.name, python_number(getattr(settings, field.name)))


def python_number(value: Any) -> Any:
    """Python's number for one of another library, such as NumPy; anything else as it is."""
    if isinstance(value, int | float) and type(value) in (bool, int, float):
        return value
    return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value


def function(name: str, value: object) -> None:
    """Check a function, which may be left out."""
    if value is not None and not callable(value):
        raise InvalidValue(f"{name}={value!r} must be a function, or None.")


def path_of(name: str, value: object) -> Path:
    """Check the name of a file or directory, and return its path."""
    if not isinstance(value, str | PathLike) or "\0" in str(value):
        raise InvalidValue(f"{name}={value!r} must be a path: a str or a pathlib.Path.")
    return Path(value).expanduser()


def whole(name: str, value: object, least: int, most: int | None = None, also: Sequence[str] = ()) -> int:
    """Check a whole number in a range, and return it as Python's; ``also`` are words that are possible instead."""
    number = python_number(value)
    if type(number) is not int or number < least or (most is not None and number > most):
        limits = f"{least} or more" if most is None else f"{least} to {most}"
        words = "".join(f", or {word!r}" for word in also)
        raise InvalidValue(f"{name}={value!r} must be a whole number, {limits}{words}.")
    return number


def one_of(name: str, value: object, choices: Sequence[str]) -> None:
    """Check one of a few words."""
    if value not in choices:
        raise InvalidValue(f"{name}={value!r} must be {_listed([repr(choice) for choice in choices])}.")


def compat(value: object, *modes: str) -> None:
    """Check the name of a compatibility mode, which may be left out."""
    if value is not None and value not in modes:
        raise InvalidValue(f"compat={value!r} must be {_listed([*map(repr, modes), 'left out'])}.")


def flag(name: str, value: object) -> None:
    """Check a flag."""
    if not isinstance(value, bool):
        raise InvalidValue(f"{name}={value!r} must be true or false.")


def share(name: str, value: object) -> None:
    """Check a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidValue(f"{name}={value!r} must be a share: from 0 to 1.")


def prefilter(value: object, what: str) -> None:
    """Check how many times the selection a coarse first ranking keeps; 0 for no such ranking."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value == 0 or 1 <= value < inf):
        raise InvalidValue(f"prefilter={value!r} must be 0 (score every {what}), or 1 or more. 8 is a good start.")
