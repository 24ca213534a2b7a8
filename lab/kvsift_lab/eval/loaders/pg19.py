"""Loader of PG19, a directory of books, one .txt each: perplexity of the tokens after the beginning of a book."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from kvsift.errors import InputError
from kvsift.texts.sample import Sample, SampleRequest
from kvsift_lab.eval.loaders.fitting import ContextFitter
from kvsift_lab.eval.tasks.perplexity import NUM_TARGETS, continued

_SPARE = 8  # cutting a line may change the number of tokens


def load(path: Path, fitting: ContextFitter) -> Iterator[Sample]:
    books = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    return (_sample(book, fitting) for book in books)


def _sample(book: Path, fitting: ContextFitter) -> Sample:
    """Return a context whose targets end at the length of the fitter; the notes name a shorter book."""
    try:
        lines = book.read_text(encoding="utf-8-sig").lstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{book} cannot be read as UTF-8 text: {error}.") from None
    length, notes = fitting.length - NUM_TARGETS, tuple[str, ...]()
    available = _num_tokens(lines, fitting, fitting.length + _SPARE) - _SPARE - NUM_TARGETS
    if available < length:
        length, notes = available, (f"the book has about {available + NUM_TARGETS} tokens only",)
    if length <= len(fitting.prefix):
        raise InputError(
            f"{book} or max_tokens is too short: {NUM_TARGETS} tokens are predicted, others come before them."
        )
    request = SampleRequest(random.Random(0), length, 1, fitting.encode, fitting.prefix)
    return replace(continued("pg19", request, _pieces(lines)), notes=notes)


def _pieces(lines: list[str]) -> Iterator[str]:
    return chain(lines[:1], (f"\n{line}" for line in islice(lines, 1, None)))


def _num_tokens(lines: list[str], fitting: ContextFitter, enough: int) -> int:
    """Count the tokens of a book, up to ``enough``."""
    count = len(fitting.prefix)
    for piece in _pieces(lines):
        count += len(fitting.encode(piece))
        if count >= enough:
            break
    return count
