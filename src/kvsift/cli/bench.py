"""kvsift bench: how fast, and how near to what the memory allows. One command, one file; here is what they share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsift.cli import options as o
from kvsift.cli.escaping import plain
from kvsift.errors import InputError

bench = typer.Typer(help="Measure speed beside the floor that memory sets.", no_args_is_help=True)

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}

ContextsOption = Annotated[str, typer.Option("--contexts", help="Tokens, for instance 8K,32K,128K.")]
BandwidthOption = Annotated[
    float | None,
    typer.Option("--bandwidth", help="Bytes per second for floors; 4.5e12 on an H200, else what a large read reaches."),
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--out", "--output", help="Write the result, raw samples in it, here; rewritten at every point."),
]
SecondsOption = Annotated[
    float | None, typer.Option("--max-seconds", min=0, help="Begin no point after so long; what is left is listed.")
]


def lengths(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers from "8K,512,1M".

    Raises:
        InputError: for anything else.
    """
    found = []
    for word in _words(text):
        match = re.fullmatch(r"(\d+)([kmKM]?)", word)
        if match is None or int(match[1]) == 0:
            raise InputError(f"{option} {text}: {word!r} is no number of tokens. Write, for instance, 8K,32K,128K.")
        found.append(int(match[1]) * UNITS[match[2].lower()])
    return tuple(found)


def counts(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers from "1,4".

    Raises:
        InputError: for anything else.
    """
    if not all(word.isdecimal() and int(word) for word in _words(text)):
        raise InputError(f"{option} {text}: give whole numbers, 1 or more, for instance 1,4.")
    return tuple(map(int, _words(text)))


def names(text: str) -> tuple[str, ...]:
    """Words between commas; none of "" and "none"."""
    return () if text == "none" else tuple(_words(text))


def check_bandwidth(bandwidth: float | None) -> None:
    """Refuse what is no speed of a memory.

    Raises:
        InputError: for zero and less.
    """
    if bandwidth is not None and not bandwidth > 0:
        raise InputError(f"--bandwidth {bandwidth:g} must be bytes per second, for instance 4.5e12.")


def keep(result: dict[str, Any], output: Path | None) -> None:
    """Write what is measured so far, if it is to be kept."""
    from kvsift.benchmarks.numbers import document

    if output is not None:
        o.write_whole(output, document(result) + "\n")


def teller(quiet: bool) -> Callable[[str], None]:
    """What prints at once, or does not where a document is all that may be printed."""
    return lambda text: None if quiet else print(plain(text), flush=True)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
