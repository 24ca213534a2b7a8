"""What a task gives: a context of an exact number of tokens and questions that it answers."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvsift.engine.prompt import STOP, question_text

Encode = Callable[[str], Sequence[int]]
"""Token ids of a piece of text, special tokens not added."""


@dataclass(frozen=True)
class Question:
    """One question; ``depth`` is where its answer becomes known: 0 the first token of the context, 1 the last.

    Attributes:
        answer: what to show as the expected answer.
        answers: all references the scorer compares with; empty means ``(answer,)``.
        scorer: a name in ``eval.scorers.SCORERS``.
        max_new_tokens: at most so many tokens are generated.
        answer_prefix: the beginning of the answer that the prompt already gives; not part of the prediction.
        is_framed: put into the package's own question format, or sent as it is (published formats bring their own).
        stop: a text that ends the answer; None: only the model or ``max_new_tokens`` does.
    """

    text: str
    answer: str
    depth: float
    answers: tuple[str, ...] = ()
    scorer: str = "exact"
    max_new_tokens: int = 40
    answer_prefix: str = ""
    is_framed: bool = True
    stop: str | None = STOP

    @property
    def references(self) -> tuple[str, ...]:
        return self.answers or (self.answer,)

    @property
    def tail(self) -> str:
        """What follows the context for a model without a chat template."""
        return (question_text(self.text) if self.is_framed else self.text) + self.answer_prefix


@dataclass(frozen=True)
class Sample:
    """A context and its questions.

    ``context_ids`` are the tokens of ``context`` encoded piece by piece, after the prefix (bos). Encoding the whole
    text at once may join tokens differently across pieces, so what needs the exact length feeds the ids.

    Attributes:
        targets: for perplexity, which has no questions: tokens that continue the context, to be predicted one after
            the other, each from the context and all targets before it.
        in_turn: the questions are turns of one conversation: each follows those before it and their answers.
        notes: what was done to make it that its reader should know, such as a context cut in the middle.
    """

    task: str
    context: str
    context_ids: tuple[int, ...]
    questions: tuple[Question, ...]
    targets: tuple[int, ...] = ()
    in_turn: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ask:
    """A question of a draft; ``needle`` is the index of the last needle that the answer depends on."""

    text: str
    answer: str
    needle: int
    answers: tuple[str, ...] = ()
    answer_prefix: str = ""


@dataclass(frozen=True)
class Draft:
    """A context before it has a length.

    Attributes:
        needles: pieces to hide, in order of appearance, each with its separator in front.
        asks: questions about them, in any order.
        filler: endless pieces to fill the rest with, each with its separator in front.
        is_stock: whether filler pieces recur across samples, so that their tokens are worth keeping.
        intro: what the context begins with, before any needle or filler.
    """

    needles: list[str]
    asks: list[Ask]
    filler: Iterator[str]
    is_stock: bool
    intro: str = ""


@dataclass(frozen=True)
class Style:
    """How the questions of a task are put and judged: the fields of ``Question`` that all of them share."""

    scorer: str = "exact"
    max_new_tokens: int = 40
    is_framed: bool = True
    stop: str | None = STOP

    def question(
        self, text: str, answer: str, depth: float, answers: tuple[str, ...] = (), answer_prefix: str = ""
    ) -> Question:
        how = self.scorer, self.max_new_tokens, answer_prefix, self.is_framed, self.stop
        return Question(text, answer, depth, answers, *how)


@dataclass(frozen=True)
class Request:
    """What a sample is wanted for: ``length`` tokens of context, the prefix included."""

    rng: random.Random
    length: int
    num_questions: int
    encode: Encode
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True)
class Task:
    """A name, what it asks of a model, and how to make a context with about ``num_questions`` questions.

    Attributes:
        draft: gives needles and filler, to be laid out to any length; or
        write: gives the finished sample, where the length decides what is in it.
        tokens_per_question: a generous estimate: needles of one question never take more.
        family: names several tasks at once, "ruler" for one.
        kind: "perplexity" has targets in place of questions.
        in_turn: as in ``Sample``.
    """

    name: str
    about: str
    draft: Callable[[random.Random, int], Draft] | None = None
    tokens_per_question: int = 48
    max_questions: int = 1000
    family: str = "own"
    style: Style = Style()
    write: Callable[[Request], Sample] | None = None
    kind: Literal["questions", "perplexity"] = "questions"
    in_turn: bool = False
