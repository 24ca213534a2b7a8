"""Rates and gaps of answers that overlap."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from kvsift_lab.bench.timing import digits


class TimedAnswer(NamedTuple):
    """When an answer was asked for, and its tokens.

    Attributes:
        started: of the request.
        times: of its pieces.
        tokens: number of its tokens; a piece may be of several.
    """

    started: float
    times: Sequence[float]
    tokens: int


def load_numbers(answers: Sequence[TimedAnswer]) -> dict[str, Any]:
    """Return the numbers of answers: tokens per second of all, from the first request to the last token, and while all
    get tokens (None if they never do at once); TTFT; and the gaps between pieces while all do, or else of all."""
    first, last = min(answer.started for answer in answers), max(answer.times[-1] for answer in answers)
    begin, end = max(answer.times[0] for answer in answers), min(answer.times[-1] for answer in answers)
    together = begin < end
    span = (begin, end) if together else (first, last)
    return {
        "tokens_per_s": sum(answer.tokens for answer in answers) / (last - first),
        "together_tokens_per_s": sum(_tokens(answer, *span) for answer in answers) / (end - begin)
        if together
        else None,
        "ttft_s": digits(answer.times[0] - answer.started for answer in answers),
        "itl_s": digits((gap for answer in answers for gap in gaps(answer.times, *span)), 3),
    }


def gaps(times: Sequence[float], begin: float, end: float) -> list[float]:
    """Return the seconds between pieces, of gaps that end in a span; the first may begin before it."""
    return [after - before for before, after in pairwise(times) if begin < after <= end]


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the sample that so large a share of all does not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _tokens(answer: TimedAnswer, begin: float, end: float) -> float:
    """Return the tokens of the pieces in a span."""
    pieces = sum(begin < time <= end for time in answer.times)
    return pieces * answer.tokens / len(answer.times)
