"""Checks of hyper-parameters; a refusal names the given value and the possible ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, fields
from difflib import get_close_matches
from functools import cache
from inspect import get_annotations
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
    for each in fields(cls):
        if each.name not in settings:
            continue
        value = settings[each.name]
        kinds = list(_kinds(hints.get(each.name, Any if each.default is None else type(each.default))))
        if any(_is_of(value, kind) for kind in kinds):
            continue
        near = get_close_matches(str(value), [kind for kind in kinds if isinstance(kind, str)], n=1)
        default = str(each.default).lower() if isinstance(each.default, bool) else repr(each.default)
        raise InvalidValue(
            f"{each.name}={value!r} must be {_listed([KINDS.get(kind) or repr(kind) for kind in kinds])}; "
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


def knob(default: Any, least: int | None = None, most: int | None = None, *, also: Sequence[str] = (),
         is_share: bool = False) -> Any:  # fmt: skip
    """Declare a knob of a method whose values ``of_knobs`` checks: a word of its ``Literal``, a flag, a whole number
    from ``least`` to ``most`` or a word of ``also``, or a share; None, if that is the default."""
    return field(default=default, metadata={"limits": (least, most, also), "is_share": is_share})


def of_knobs(method: Any) -> None:
    """Check the knobs of a method that are declared by ``knob``; a class that gives one another default keeps its
    limits."""
    for each in fields(method):
        value, declared = getattr(method, each.name), _declared(type(method), each.name)  # type: ignore[arg-type]
        if declared is None or (value is None and each.default is None):
            continue
        least, most, also = declared["limits"]
        if declared["is_share"]:
            share(each.name, value)
        elif least is not None:
            if value not in also:
                whole(each.name, value, least, most, also)
        elif isinstance(each.default, bool):
            flag(each.name, value)
        else:
            one_of(each.name, value, *_words(type(method), each.name))  # type: ignore[arg-type]


@cache
def _declared(cls: type, name: str) -> Mapping[str, Any] | None:
    """What ``knob`` said of a field where it was last declared by it."""
    found = (vars(base).get("__dataclass_fields__", {}).get(name) for base in cls.__mro__)
    declared = (each.metadata for each in found if each is not None and "limits" in each.metadata)
    return next(declared, None)


@cache
def _words(cls: type, name: str) -> tuple[list[str], bool]:
    """Words that a knob may be, and whether it may be left out, by its annotation in the class that declares it."""
    owner = next(base for base in cls.__mro__ if name in get_annotations(base))
    kinds = list(_kinds(get_type_hints(owner)[name]))
    return [kind for kind in kinds if isinstance(kind, str)], NoneType in kinds


def use_python_numbers(settings: object) -> None:
    """Turn numbers of other libraries, such as NumPy's, in the fields of a frozen dataclass into Python's."""
    for each in fields(settings):  # type: ignore[arg-type]
        object.__setattr__(settings, each.name, python_number(getattr(settings, each.name)))


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


def one_of(name: str, value: object, choices: Sequence[str], or_none: bool = False) -> None:
    """Check one of a few words, which may perhaps be left out."""
    if value not in choices and not (or_none and value is None):
        possible = [*map(repr, choices), *(["left out"] if or_none else [])]
        raise InvalidValue(f"{name}={value!r} must be {_listed(possible)}.")


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
