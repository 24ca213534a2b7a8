"""Samples from texts of files; contexts that are too long lose their middle, as in LongBench's ``pred.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsift.errors import InputError
from kvsift.texts.sample import Encode, Question, Sample
from kvsift_lab.eval.tasks.assembly import largest_that_fits

DEFAULT_TOKENS = 32_768
"""Length of samples if the file leaves it open."""


@dataclass(frozen=True)
class ContextFitter:
    """Tokenizer and length limit of the texts of a file.

    Attributes:
        max_tokens: of the whole prompt; None leaves every context whole.
    """

    encode: Encode
    max_tokens: int | None
    prefix: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens of a sample if the file leaves the length open."""
        return self.max_tokens or DEFAULT_TOKENS

    def sample(self, task: str, context: str, *questions: Question) -> Sample:
        """Return a sample; the middle of the context is cut if context and the longest question are too long.

        Raises:
            InputError: if the question alone takes more than its half of ``max_tokens``.
        """
        ids, num_tail = self.encode(context), max(len(self.encode(question.tail)) for question in questions)
        whole = len(self.prefix) + len(ids) + num_tail
        if self.max_tokens is None or whole <= self.max_tokens:
            return Sample(task, context, (*self.prefix, *ids), questions)
        half = self.max_tokens // 2
        first, last = half - len(self.prefix), half - num_tail
        if first < 1 or last < 1:
            raise InputError(f"max_tokens={self.max_tokens}: half of it must exceed the question's {num_tail} tokens.")
        head, tail = leading(context, first, self.encode), trailing(context, last, self.encode)
        cut = (*self.prefix, *self.encode(head), *self.encode(tail))
        note = f"the middle of the context was left out: {len(cut) + num_tail} of {whole} prompt tokens remain"
        return Sample(task, head + tail, cut, questions, notes=(note,))


def leading(text: str, count: int, encode: Encode) -> str:
    """Return the longest beginning of at most ``count`` tokens."""
    return text[: largest_that_fits(lambda stop: len(encode(text[:stop])), count, 0)]


def trailing(text: str, count: int, encode: Encode) -> str:
    """Return the longest end of at most ``count`` tokens."""
    length = largest_that_fits(lambda num: len(encode(text[len(text) - num :])), count, 0)
    return text[len(text) - length :]


def depth_of(context: str, answers: Sequence[str]) -> float:
    """Return the depth, 0 to 1, of the last first occurrence of an answer; 1 if an answer does not occur."""
    starts = [context.find(answer) for answer in answers]
    return max(starts) / len(context) if context and min(starts) >= 0 else 1.0
