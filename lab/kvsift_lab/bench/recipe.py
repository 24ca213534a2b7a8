"""Recipes of benches: frozen dataclasses whose fields are options of the command. Without torch, for a fast --help."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import Field, field, fields
from typing import Any, ClassVar, NamedTuple

from kvsift.errors import InvalidValue, MissingInput, unknown
from kvsift_lab.bench import load

COLD_BYTES = 192 << 20  # read between two samples on a CPU: more than a cache holds
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


class BenchOption(NamedTuple):
    """An option of the command line.

    Attributes:
        default: as written on the command line; None leaves the field at its default.
        help: for ``--help``.
        flag: its name; by default that of the field.
        kind: type of the value on the command line; by default that of ``default``.
        minimum: of a number.
        parse: (value, flag) -> value of the field, or of each field in ``targets``.
        targets: fields that the option fills, if not its own alone.
    """

    default: Any
    help: str
    flag: str = ""
    kind: Any = None
    minimum: int | None = None
    parse: Callable[[Any, str], Any] | None = None
    targets: tuple[str, ...] = ()

    def values(self, name: str, given: Any) -> dict[str, Any]:
        """Return values of fields from a value on the command line."""
        value = given if self.parse is None else self.parse(given, self.flag)
        return dict(zip(self.targets, value)) if self.targets else {name: value}


def option(default: Any, help: str, *, value: Any = None, stored: bool = True, **settings: Any) -> Any:
    """Return a field of a recipe that is an option of the command; ``settings`` as in ``BenchOption``.

    Args:
        value: default of the field, where ``default`` is None.
        stored: whether the result file holds the field.
    """
    spec = BenchOption(default, help, **settings)
    if default is not None:
        value = next(iter(spec.values("", default).values()))
    return field(default=value, metadata={"option": spec, "stored": stored})


class BenchRecipe:
    """Everything that a result depends on. The first line of the docstring is the help of the command. A recipe may
    have ``max_seconds``, after which no new point starts, ``threads`` on the processor, and the ``chart_path``.

    Attributes:
        measured_by: "module:class" of the bench.
    """

    measured_by: ClassVar[str]

    def bench(self) -> Any:
        """Return the bench of this recipe on this machine.

        Raises:
            InputError: if this machine cannot run it.
        """
        return load(self.measured_by).of(self)

    def stored(self) -> dict[str, Any]:
        """Return the fields of the result file; the class makes the same recipe of them."""
        return {each.name: getattr(self, each.name) for each in _fields(self) if each.metadata.get("stored", True)}

    @classmethod
    def options(cls) -> dict[str, BenchOption]:
        """Return the options of the command by field, in order."""
        options = {}
        for each in _fields(cls):
            if spec := each.metadata.get("option"):
                flag, kind = spec.flag or f"--{each.name.replace('_', '-')}", spec.kind or type(spec.default)
                options[each.name] = spec._replace(flag=flag, kind=kind)
        return options

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> BenchRecipe:
        """Return the recipe of a command line, given by field.

        Raises:
            InputError: for values that cannot be used.
        """
        values: dict[str, Any] = {}
        for name, spec in cls.options().items():
            if name in given and given[name] is not None:
                values |= spec.values(name, given[name])
        return cls(**values)


def _fields(recipe: Any) -> tuple[Field[Any], ...]:
    return fields(recipe)


def token_counts(text: str, flag: str) -> tuple[int, ...]:
    """Return the whole numbers of "8K,512,1M".

    Raises:
        InputError: for anything else.
    """
    numbers = []
    for word in names(text):
        match = re.fullmatch(r"(\d+)([kmKM]?)", word)
        if match is None or int(match[1]) == 0:
            raise InvalidValue(f"{flag} {text}: {word!r} is not a token count. Write, for instance, 8K,32K,128K.")
        numbers.append(int(match[1]) * UNITS[match[2].lower()])
    return tuple(numbers)


def counts(text: str, flag: str) -> tuple[int, ...]:
    """Return the whole numbers of "1,4".

    Raises:
        InputError: for anything else.
    """
    if not all(word.isdecimal() and int(word) for word in names(text)):
        raise InvalidValue(f"{flag} {text}: give whole numbers, 1 or more, for instance 1,4.")
    return tuple(map(int, names(text)))


def names(text: str, flag: str = "") -> tuple[str, ...]:
    """Return the words between commas; none of "" and "none"."""
    return () if text == "none" else tuple(word.strip() for word in text.split(",") if word.strip())


def head_counts(text: str, flag: str) -> tuple[int, int]:
    """Return the query heads and KV heads of "32/8".

    Raises:
        InputError: for anything else.
    """
    words = text.split("/")
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        raise InvalidValue(f"{flag} {text}: give query heads/KV heads, for instance 32/8.")
    return int(words[0]), int(words[1])


def require_some(*lists: object, names: str) -> None:
    """Refuse a recipe with an empty list.

    Raises:
        InputError: saying what to name.
    """
    if not all(lists):
        raise MissingInput(f"there is nothing to measure: name at least one {names}.")


def require_known(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse a name that is not known.

    Raises:
        InputError: with the nearest known one.
    """
    for name in given:
        if name not in known:
            raise unknown(what, name, known)


def check_groups(num_query_heads: int, num_kv_heads: int) -> None:
    """Refuse query heads that do not divide into groups.

    Raises:
        InputError: with both numbers.
    """
    if num_query_heads % num_kv_heads:
        raise InvalidValue(f"{num_query_heads} query heads must be a multiple of the KV heads, {num_kv_heads}.")


def _bandwidth(rate: float, flag: str) -> float:
    if not rate > 0:
        raise InvalidValue(f"{flag} {rate:g} must be bytes per second, for instance 4.5e12.")
    return rate


def _head_dim(number: int, flag: str) -> int:
    if number % 8 or number > 256:
        raise InvalidValue(f"{flag} {number} must be a multiple of 8, up to 256.")
    return number


def contexts(default: str) -> Any:
    return option(default, "Tokens, for instance 8K,32K,128K.", parse=token_counts)


def heads(help: str = "Query heads/KV heads.") -> Any:
    return option("32/8", help, flag="--heads", parse=head_counts, targets=("num_query_heads", "num_kv_heads"))


def head_dim() -> Any:
    return option(128, "Numbers per head, a multiple of 8.", minimum=16, parse=_head_dim)


def repeats(default: int) -> Any:
    return option(default, "Samples of each variant.", minimum=1)


def samples() -> Any:
    return option(2048, "Prompt queries per query head to learn from.", minimum=1)


def shape() -> Any:
    return option("llama-3-8b", "Random weights: llama-3-8b or tiny.", flag="--shape")


def quantize() -> Any:
    text = "fp8, int8 or int4: linear weights but the head's are rounded to these; fp8_head: all."
    return option(None, text, kind=str | None)


def require_quantize(given: str | None) -> None:
    """Refuse a format of weights that is not known (``InputError``)."""
    from kvsift.models.quantized import QUANTIZE

    require_known("quantize", [] if given is None else [given], QUANTIZE)


def max_seconds() -> Any:
    text = "Start no new point after this many seconds; list the rest as skipped."
    return option(None, text, kind=float | None, minimum=0)


def bandwidth() -> Any:
    text = "Bytes per second for floors; 4.5e12 on an H200, else the measured rate of a large read."
    return option(None, text, kind=float | None, parse=_bandwidth, stored=False)


def threads() -> Any:
    text = "Threads on the processor; as many as torch uses by default."
    return option(None, text, kind=int | None, minimum=1, stored=False)


def device() -> Any:
    return option("auto", "auto, cpu, cuda or cuda:N.", stored=False)


def anchors() -> Any:
    text = "Layers that select for the others, evenly spaced, to measure time; calibrate --layers finds good ones."
    return option(None, text, kind=int | None, minimum=1)


def plans(default: str, help: str = "Plans, with ; between them.", **settings: Any) -> Any:
    return option(default, help, parse=split, **settings)


def split(text: str, flag: str = "") -> tuple[str, ...]:
    """Return the parts between semicolons."""
    return tuple(part.strip() for part in text.split(";") if part.strip())


def batches(text: str, flag: str) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of "131072x1,32Kx4x2": a context, how many of it, and where a recipe says so a third one.

    Raises:
        InputError: for anything else.
    """
    found = tuple(token_counts(each.replace("x", ","), flag) for each in names(text))
    if not found or not all(len(each) in (2, 3) for each in found):
        raise InvalidValue(f"{flag} {text}: give contexts x batches, for instance 32Kx1,128Kx4.")
    return found


def shares(text: str, flag: str) -> tuple[float, ...]:
    """Return the numbers between 0 and 1 of "0.9,0.95".

    Raises:
        InputError: for anything else.
    """
    words = names(text)
    if not words or not all(re.fullmatch(r"0?\.\d+", word) and float(word) for word in words):
        raise InvalidValue(f"{flag} {text}: give numbers between 0 and 1, for instance 0.9,0.95.")
    return tuple(map(float, words))
