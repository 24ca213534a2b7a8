# ruff: noqa: RUF001  (Chinese prompts have Chinese punctuation)
"""Loader of InfiniteBench's files: ``<task>.jsonl`` with id, context, input, answer, options.

The structure of the prompts, the reading of answers and the new tokens (counted in its models' tokens, and few) follow
OpenBMB/InfiniteBench (``src/prompt.py``, those for models without a chat format; ``src/eval_utils.py``); the wording is
ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvsift.errors import unknown
from kvsift_lab.eval.loaders.reading import ContextFitter, JsonLine, QuestionFormat, read_lines
from kvsift_lab.eval.sample import Sample

LETTERS = "ABCD"


_HIDDEN = (
    "One important piece of information is hidden in a lot of text that says nothing. Find it: you will be asked.\n\n"
    "{context}\n\n{input}\n\n"
)
FORMATS: dict[str, QuestionFormat] = {
    "passkey": QuestionFormat(_HIDDEN, "first_number", 6, answer_prefix="The pass key is"),
    "number_string": QuestionFormat(_HIDDEN, "first_number", 12, answer_prefix="The sequence of digits is"),
    "kv_retrieval": QuestionFormat(
        "Find the value that belongs to a key of this JSON object.\n\n{context}\n\n{input}", "word_match", 50
    ),
    "math_find": QuestionFormat("{prefix}\n\n{context}\n\n{input}", "math_find", 3),
    "math_calc": QuestionFormat(
        "Work out this arithmetic expression from left to right and write down every intermediate result.\n\n"
        "{context}\n\n{input}",
        "math_calc",
        30_000,
        answer_prefix="The intermediate results are:",
    ),
    "code_run": QuestionFormat(
        "This Python code has a function that is called at the end.\n\n{context}\n\n"
        "Work out the exact value of {call}.",
        "code_run",
        5,
        answer_prefix=" The value of {call} is",
    ),
    "code_debug": QuestionFormat(
        "In this Python code exactly one function or method has a deliberate error that stops it.\n\n{context}\n\n"
        "Options:\n{options}\n\n",
        "code_debug",
        5,
        answer_prefix="The correct option is:",
    ),
    "longbook_choice_eng": QuestionFormat(
        "Read this book and answer a question about it.\n\n{context}\n\nQuestion: {input}\n{options}\n\n",
        "choice",
        40,
        answer_prefix="The letter of the right answer is",
    ),
    "longbook_qa_eng": QuestionFormat(
        "Read this book and answer a question about it in very few words.\n\n{context}\n\nQuestion: {input}\n",
        "qa_f1",
        40,
        answer_prefix="Answer:",
    ),
    "longbook_sum_eng": QuestionFormat(
        "Summarise this book.\n\n{context}\n\n", "summary", 1200, answer_prefix="Summary:"
    ),
    "longbook_qa_chn": QuestionFormat(
        "请阅读这本书，然后回答问题。\n\n{context}\n\n问题：{input}\n", "qa_f1_characters", 40, answer_prefix="答案："
    ),
    "longdialogue_qa_eng": QuestionFormat(
        'In this script one name of a character has been replaced by "$$MASK$$". Say whose it is.\n\n{context}\n\n',
        "speaker",
        40,
        answer_prefix="The name behind $$MASK$$ is most likely",
    ),
}


def load(path: Path, fitting: ContextFitter) -> Iterator[Sample]:
    task = path.stem
    if task not in FORMATS:
        raise unknown("InfiniteBench task (a file is named after its task)", task, FORMATS)
    return (_sample(task, line, fitting) for line in read_lines(path))


def _sample(task: str, line: JsonLine, fitting: ContextFitter) -> Sample:
    references = _references(task, line)
    return fitting.asked(task, line, FORMATS[task], _slots(task, line), references, references)


def _slots(task: str, line: JsonLine) -> dict[str, str]:
    """Return what the line fills into a prompt."""
    slots = {"{input}": line.text("input")}
    if "{options}" in FORMATS[task].prompt:
        slots["{options}"] = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, _options(line)))
    if task == "math_find":
        slots["{prefix}"] = f"What is {_match(line, r'The .+(?= of)').lower()} in the following list?"
    if task == "code_run":
        slots["{call}"] = _match(line, r"func_[0-9]+\(-?[0-9]+\)")
    return slots


def _match(line: JsonLine, pattern: str) -> str:
    match = re.search(pattern, line.text("input"))
    if match is None:
        raise line.error(f"'input' must have something like {pattern!r}.")
    return match.group()


def _options(line: JsonLine) -> tuple[str, ...]:
    options = line.texts("options")
    if len(options) != len(LETTERS):
        raise line.error(f"'options' must be four texts; there are {len(options)}.")
    return options


def _references(task: str, line: JsonLine) -> tuple[str, ...]:
    """Return the answers as text; for a choice, the right option and its letter."""
    value = line.values.get("answer")
    answers = value if isinstance(value, list) else [value]
    if not answers or not all(isinstance(answer, str | int | float) for answer in answers):
        raise line.error(f"'answer' must be text, a number or a list of these, not {value!r}.")
    texts = tuple(map(str, answers))
    return _option(line, texts) if "{options}" in FORMATS[task].prompt else texts


def _option(line: JsonLine, answers: tuple[Any, ...]) -> tuple[str, str]:
    options = _options(line)
    if answers[0] not in options:
        raise line.error(f"'answer' must be one of the options; {answers[0]!r} is none.")
    return answers[0], answers[1] if answers[1:] else LETTERS[options.index(answers[0])]
