"""Tasks, and what they return: a context of an exact number of tokens with questions about it."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from kvsift.texts.layout import Draft, Encode
from kvsift.tokenization.prompt import STOP, question_text


@dataclass(frozen=True)
class Question:
    """One question; ``depth`` is the position of its answer: 0 is the first token of the context, 1 the last.

    Attributes:
        answer: the expected answer, for display.
        answers: all references of the scorer; empty means ``(answer,)``.
        scorer: the name of a scorer.
        max_new_tokens: the most tokens to generate.
        answer_prefix: the beginning of the answer, which is part of the prompt and not of the prediction.
        is_framed: asked in the package's own format, or as it is (published formats bring their own).
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
        """The text after the context for a model without a chat template."""
        return (question_text(self.text) if self.is_framed else self.text) + self.answer_prefix

    def framed(self) -> "Question":
        """Return the question in the package's own format: ``Question: ...`` and an answer of one line, without the
        instruction and the given words of the published format."""
        if self.is_framed:
            return self
        text = self.text.rpartition("Question:")[2].strip()
        return replace(self, text=text, answer_prefix="", is_framed=True, stop=STOP)


@dataclass(frozen=True)
class Sample:
    """A context and its questions.

    ``context_ids`` are the tokens of ``context`` encoded piece by piece, after the prefix (bos). Encoding the whole
    text at once may join tokens differently across pieces, so callers that need the exact length feed the ids.

    Attributes:
        targets: for perplexity, which has no questions: the tokens after the context, each predicted from all tokens
            before it.
        in_turn: the questions are turns of one conversation: each follows those before it and their answers.
        notes: deviations that a reader of the result should know, such as a context cut in the middle.
    """

    task: str
    context: str
    context_ids: tuple[int, ...]
    questions: tuple[Question, ...]
    targets: tuple[int, ...] = ()
    in_turn: bool = False
    notes: tuple[str, ...] = ()


def framed(sample: Sample) -> Sample:
    """Return the sample with every question in the package's own format, for models trained on no other."""
    return replace(sample, questions=tuple(question.framed() for question in sample.questions))


@dataclass(frozen=True)
class Style:
    """The fields of ``Question`` that all questions of a task share."""

    scorer: str = "exact"
    max_new_tokens: int = 40
    is_framed: bool = True
    stop: str | None = STOP

    def question(
        self, text: str, answer: str, depth: float, answers: tuple[str, ...] = (), answer_prefix: str = ""
    ) -> Question:
        shared = self.scorer, self.max_new_tokens, answer_prefix, self.is_framed, self.stop
        return Question(text, answer, depth, answers, *shared)


@dataclass(frozen=True)
class SampleRequest:
    """Arguments of a sample: ``length`` is tokens of context, the prefix included."""

    rng: random.Random
    length: int
    num_questions: int
    encode: Encode
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True)
class Task:
    """A task: its name, a description, and the function that writes a context with about ``num_questions`` questions.

    Attributes:
        draft: returns needles and filler for any length; or
        write: returns the whole sample, if the length decides its content.
        tokens_per_question: an upper bound of the tokens of one question's needles.
        family: a name for several tasks, such as "ruler".
        kind: "perplexity" has targets instead of questions.
        in_turn: as in ``Sample``.
    """

    name: str
    about: str
    draft: Callable[[random.Random, int], Draft] | None = None
    tokens_per_question: int = 48
    max_questions: int = 1000
    family: str = "own"
    style: Style = Style()
    write: Callable[[SampleRequest], Sample] | None = None
    kind: Literal["questions", "perplexity"] = "questions"
    in_turn: bool = False

    def num_questions(self, length: int, limit: int) -> int:
        """Return the number of questions of a context: at most ``limit``, fewer if it is short."""
        return max(1, min(limit, self.max_questions, length // (2 * self.tokens_per_question)))
