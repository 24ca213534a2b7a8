"""What loaders share: JSON lines with errors that name file and line, and samples from texts of files.

Contexts that are too long lose their middle, as in LongBench's ``pred.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsift.errors import InputError, InvalidValue, WrongFile
from kvsift.texts.layout import Encode
from kvsift_lab.eval.sample import Question, Sample
from kvsift_lab.eval.tasks.assembly import largest_that_fits
from kvsift_lab.eval.tasks.perplexity import NUM_TARGETS


@dataclass(frozen=True)
class JsonLine:
    """One object of a JSON lines file."""

    path: Path
    number: int
    values: dict[str, Any]

    def error(self, what: str) -> InputError:
        return WrongFile(f"{self.path}:{self.number}: {what}")

    def text(self, key: str) -> str:
        """Return a field that must be text."""
        value = self._value(key)
        if not isinstance(value, str):
            raise self.error(f"{key!r} must be text, not {_short(value)}.")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a field that must be a list of at least one text."""
        value = self._value(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self.error(f"{key!r} must be a list of texts, at least one, not {_short(value)}.")
        return tuple(value)

    def _value(self, key: str) -> Any:
        if key not in self.values:
            raise self.error(f"no {key!r}; there are {', '.join(map(repr, self.values)) or 'no fields'}.")
        return self.values[key]


def read_lines(path: Path) -> Iterator[JsonLine]:
    """Yield the objects of a file in order; empty lines are skipped.

    Raises:
        InputError: for a line that is not UTF-8, not JSON or not an object.
    """
    if path.is_dir():
        raise WrongFile(f"{path} is a directory; give one of its files.")
    with path.open("rb") as file:  # only a newline ends a line; text mode has other ends
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                values = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
                raise WrongFile(f"{path}:{number}: a JSON object per line is expected: {error}.") from None
            if not isinstance(values, dict):
                raise WrongFile(f"{path}:{number}: a JSON object is expected, not {_short(values)}.")
            yield JsonLine(path, number, values)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


DEFAULT_TOKENS = 32_768
"""Length of samples if the file leaves it open."""


@dataclass(frozen=True)
class QuestionFormat:
    """Format of the questions of a data set.

    Attributes:
        prompt: text with {context}, and with fields of a line such as {input}.
        scorer, max_new_tokens, stop, answer_prefix: those of ``Question``; the prefix may have fields, too.
    """

    prompt: str
    scorer: str
    max_new_tokens: int
    stop: str | None = None
    answer_prefix: str = ""


@dataclass(frozen=True)
class ContextFitter:
    """Tokenizer and length limit of the texts of a file.

    Attributes:
        max_tokens: of the whole prompt; None leaves every context whole.
        targets: tokens that are predicted after a text.
    """

    encode: Encode
    max_tokens: int | None
    prefix: tuple[int, ...]
    targets: int = NUM_TARGETS

    @property
    def length(self) -> int:
        """Tokens of a sample if the file leaves the length open."""
        return self.max_tokens or DEFAULT_TOKENS

    def asked(
        self, task: str, line: JsonLine, form: QuestionFormat, slots: Mapping[str, str], answers: Sequence[str],
        references: tuple[str, ...],
    ) -> Sample:  # fmt: skip
        """Return the sample of a line with one question; ``slots`` are filled into the format, other braces stay."""
        pattern = re.compile("|".join(map(re.escape, slots)))
        before, _, after = form.prompt.partition("{context}")
        before, after, prefix = (
            pattern.sub(lambda match: slots[match.group()], text) for text in (before, after, form.answer_prefix)
        )
        context = before + line.text("context")
        question = Question(
            after, " | ".join(answers), depth_of(context, answers[:1]), references, form.scorer, form.max_new_tokens,
            prefix, is_framed=False, stop=form.stop,
        )  # fmt: skip
        return self.sample(task, context, question)

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
            raise InvalidValue(
                f"max_tokens={self.max_tokens}: half of it must exceed the question's {num_tail} tokens."
            )
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
