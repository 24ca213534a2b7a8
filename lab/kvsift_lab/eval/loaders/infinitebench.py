# ruff: noqa: RUF001  (Chinese prompts have Chinese punctuation)
"""Loader of InfiniteBench's files: ``<task>.jsonl`` with id, context, input, answer, options.

The structure of the prompts, the reading of answers and the new tokens (counted in its models' tokens, and few) follow
OpenBMB/InfiniteBench (``src/prompt.py``, those for models without a chat format; ``src/eval_utils.py``); the wording is
ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsift.errors import unknown
from kvsift.texts.sample import Question, Sample
from kvsift_lab.eval.loaders.reading import ContextFitter, JsonLine, depth_of, read_lines

LETTERS = "ABCD"


@dataclass(frozen=True)
class TaskPrompt:
    """``before`` and ``after`` the context may have {input}, {options}, {prefix} and {call}."""

    before: str
    after: str
    scorer: str
    max_new_tokens: int
    answer_prefix: str = ""


_HIDDEN = (
    "One important piece of information is hidden in a lot of text that says nothing. Find it: you will be asked.\n\n"
)
FORMATS: dict[str, TaskPrompt] = {
    "passkey": TaskPrompt(_HIDDEN, "\n\n{input}\n\n", "first_number", 6, "The pass key is"),
    "number_string": TaskPrompt(_HIDDEN, "\n\n{input}\n\n", "first_number", 12, "The sequence of digits is"),
    "kv_retrieval": TaskPrompt(
        "Find the value that belongs to a key of this JSON object.\n\n", "\n\n{input}", "word_match", 50
    ),
    "math_find": TaskPrompt("{prefix}\n\n", "\n\n{input}", "math_find", 3),
    "math_calc": TaskPrompt(
        "Work out this arithmetic expression from left to right and write down every intermediate result.\n\n",
        "\n\n{input}",
        "math_calc",
        30_000,
        "The intermediate results are:",
    ),
    "code_run": TaskPrompt(
        "This Python code has a function that is called at the end.\n\n",
        "\n\nWork out the exact value of {call}.",
        "code_run",
        5,
        " The value of {call} is",
    ),
    "code_debug": TaskPrompt(
        "In this Python code exactly one function or method has a deliberate error that stops it.\n\n",
        "\n\nOptions:\n{options}\n\n",
        "code_debug",
        5,
        "The correct option is:",
    ),
    "longbook_choice_eng": TaskPrompt(
        "Read this book and answer a question about it.\n\n",
        "\n\nQuestion: {input}\n{options}\n\n",
        "choice",
        40,
        "The letter of the right answer is",
    ),
    "longbook_qa_eng": TaskPrompt(
        "Read this book and answer a question about it in very few words.\n\n",
        "\n\nQuestion: {input}\n",
        "qa_f1",
        40,
        "Answer:",
    ),
    "longbook_sum_eng": TaskPrompt("Summarise this book.\n\n", "\n\n", "summary", 1200, "Summary:"),
    "longbook_qa_chn": TaskPrompt(
        "请阅读这本书，然后回答问题。\n\n", "\n\n问题：{input}\n", "qa_f1_characters", 40, "答案："
    ),
    "longdialogue_qa_eng": TaskPrompt(
        'In this script one name of a character has been replaced by "$$MASK$$". Say whose it is.\n\n',
        "\n\n",
        "speaker",
        40,
        "The name behind $$MASK$$ is most likely",
    ),
}


def load(path: Path, fitting: ContextFitter) -> Iterator[Sample]:
    task = path.stem
    if task not in FORMATS:
        raise unknown("InfiniteBench task (a file is named after its task)", task, FORMATS)
    return (_sample(task, line, fitting) for line in read_lines(path))


def _sample(task: str, line: JsonLine, fitting: ContextFitter) -> Sample:
    prompt = FORMATS[task]
    fill = _filler(task, line)
    context = fill(prompt.before) + line.text("context")
    references = _references(task, line)
    question = Question(
        fill(prompt.after),
        " | ".join(references),
        depth_of(context, references[:1]),
        references,
        prompt.scorer,
        prompt.max_new_tokens,
        fill(prompt.answer_prefix),
        is_framed=False,
        stop=None,
    )
    return fitting.sample(task, context, question)


def _filler(task: str, line: JsonLine) -> Callable[[str], str]:
    """Return a function that fills the line's fields into a template and leaves other braces as they are."""
    slots = {"{input}": line.text("input")}
    if "{options}" in FORMATS[task].after:
        slots["{options}"] = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, _options(line)))
    if task == "math_find":
        slots["{prefix}"] = f"What is {_match(line, r'The .+(?= of)').lower()} in the following list?"
    if task == "code_run":
        slots["{call}"] = _match(line, r"func_[0-9]+\(-?[0-9]+\)")
    pattern = re.compile("|".join(map(re.escape, slots)))
    return lambda template: pattern.sub(lambda match: slots[match.group()], template)


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
    return _option(line, texts) if "{options}" in FORMATS[task].after else texts


def _option(line: JsonLine, answers: tuple[Any, ...]) -> tuple[str, str]:
    options = _options(line)
    if answers[0] not in options:
        raise line.error(f"'answer' must be one of the options; {answers[0]!r} is none.")
    return answers[0], answers[1] if answers[1:] else LETTERS[options.index(answers[0])]
