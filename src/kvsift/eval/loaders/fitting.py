"""Contexts of files made samples: what is too long loses its middle, as in LongBench's ``pred.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsift.errors import InputError
from kvsift.eval.tasks.assembly import largest_that_fits
from kvsift.eval.tasks.sample import Encode, Question, Sample

DEFAULT_TOKENS = 32_768
"""Where a file leaves the length open."""


@dataclass(frozen=True)
class Fitting:
    """How the texts of a file become tokens.

    Attributes:
        max_tokens: of the whole prompt; None leaves every context whole.
    """

    encode: Encode
    max_tokens: int | None
    prefix: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens of a sample whose length is a choice."""
        return self.max_tokens or DEFAULT_TOKENS

    def sample(self, task: str, context: str, question: Question) -> Sample:
        """The context with its question, cut in the middle if the two together are too long.

        Raises:
            InputError: if the question alone takes more than its half of ``max_tokens``.
        """
        ids, asked = self.encode(context), len(self.encode(question.tail))
        whole = len(self.prefix) + len(ids) + asked
        if self.max_tokens is None or whole <= self.max_tokens:
            return Sample(task, context, (*self.prefix, *ids), (question,))
        half = self.max_tokens // 2
        first, last = half - len(self.prefix), half - asked
        if first < 1 or last < 1:
            raise InputError(f"max_tokens={self.max_tokens}: half of it must exceed the question's {asked} tokens.")
        head, tail = leading(context, first, self.encode), trailing(context, last, self.encode)
        cut = (*self.prefix, *self.encode(head), *self.encode(tail))
        note = f"the middle of the context was left out: {len(cut) + asked} of {whole} prompt tokens remain"
        return Sample(task, head + tail, cut, (question,), notes=(note,))


def leading(text: str, count: int, encode: Encode) -> str:
    """The longest beginning of at most ``count`` tokens."""
    return text[: largest_that_fits(lambda stop: len(encode(text[:stop])), count, 0)]


def trailing(text: str, count: int, encode: Encode) -> str:
    """The longest end of at most ``count`` tokens."""
    kept = largest_that_fits(lambda num: len(encode(text[len(text) - num :])), count, 0)
    return text[len(text) - kept :]


def depth_of(context: str, answers: Sequence[str]) -> float:
    """Where the last of the answers first stands, 0 to 1; 1 if one stands nowhere: then it takes the whole context."""
    places = [context.find(answer) for answer in answers]
    return max(places) / len(context) if context and min(places) >= 0 else 1.0
