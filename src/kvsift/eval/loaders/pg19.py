"""PG19: a directory of books, one .txt each. Perplexity of the tokens that follow the beginning of a book."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from kvsift.errors import InputError
from kvsift.eval.loaders.fitting import Fitting
from kvsift.eval.tasks.perplexity import NUM_TARGETS, continued
from kvsift.eval.tasks.sample import Request, Sample

_SPARE = 8  # a line that is cut may have a token more or less in all


def load(path: Path, fitting: Fitting) -> Iterator[Sample]:
    books = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    return (_sample(book, fitting) for book in books)


def _sample(book: Path, fitting: Fitting) -> Sample:
    """A context so long that its targets end at the wanted length; a shorter book is used up, and the notes say so."""
    try:
        lines = book.read_text(encoding="utf-8-sig").lstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{book} cannot be read as UTF-8 text: {error}.") from None
    wanted = fitting.length - NUM_TARGETS
    there = _num_tokens(lines, fitting, fitting.length + _SPARE) - _SPARE - NUM_TARGETS
    length, notes = (
        (wanted, ()) if there >= wanted else (there, (f"the book has about {there + NUM_TARGETS} tokens only",))
    )
    if length <= len(fitting.prefix):
        raise InputError(
            f"{book} or max_tokens is too short: {NUM_TARGETS} tokens are predicted, others come before them."
        )
    request = Request(random.Random(0), length, 1, fitting.encode, fitting.prefix)
    return replace(continued("pg19", request, _pieces(lines)), notes=notes)


def _pieces(lines: list[str]) -> Iterator[str]:
    return chain(lines[:1], (f"\n{line}" for line in islice(lines, 1, None)))


def _num_tokens(lines: list[str], fitting: Fitting, enough: int) -> int:
    """Tokens of a book, counted until there are enough."""
    count = len(fitting.prefix)
    for piece in _pieces(lines):
        count += len(fitting.encode(piece))
        if count >= enough:
            break
    return count
