"""What a task gives: a context of an exact number of tokens and questions that it answers."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Encode = Callable[[str], Sequence[int]]
"""Token ids of a piece of text, special tokens not added."""


@dataclass(frozen=True)
class Question:
    """One question; ``depth`` is where its answer becomes known: 0 the first token of the context, 1 the last."""

    text: str
    answer: str
    depth: float


@dataclass(frozen=True)
class Sample:
    """A context and its questions.

    ``context_ids`` are the tokens of ``context`` encoded piece by piece, after the prefix (bos). Encoding the whole
    text at once may join tokens differently across pieces, so what needs the exact length feeds the ids.
    """

    task: str
    context: str
    context_ids: tuple[int, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Ask:
    """A question of a draft; ``needle`` is the index of the last needle that the answer depends on."""

    text: str
    answer: str
    needle: int


@dataclass(frozen=True)
class Draft:
    """A context before it has a length.

    Attributes:
        needles: pieces to hide, in order of appearance, each with its separator in front.
        asks: questions about them, in any order.
        filler: endless pieces to fill the rest with, each with its separator in front.
        is_stock: whether filler pieces recur across samples, so that their tokens are worth keeping.
    """

    needles: list[str]
    asks: list[Ask]
    filler: Iterator[str]
    is_stock: bool


@dataclass(frozen=True)
class Task:
    """A name, what it asks of a model, and how to draft a context with about ``num_questions`` questions."""

    name: str
    about: str
    draft: Callable[[random.Random, int], Draft]
    tokens_per_question: int  # a generous estimate: needles of one question never take more
    max_questions: int = 1000
