"""Loader of LongBench's files, version 1: JSON lines with input, context, answers, length, dataset, language,
all_classes, _id.

A file may hold several data sets; those of LongBench-E, whose names end in ``_e``, are scored like the others. If
LongBench's ``dataset2prompt.json`` is in the file's folder, its prompts replace ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvsift.errors import InputError, unknown
from kvsift.texts.sample import Question, Sample
from kvsift_lab.eval.loaders.fitting import ContextFitter, depth_of
from kvsift_lab.eval.loaders.lines import JsonLine, read_lines
from kvsift_lab.eval.loaders.longbench_formats import FORMATS

PROMPTS = "dataset2prompt.json"


def load(path: Path, fitting: ContextFitter) -> Iterator[Sample]:
    prompts = _prompts(path.parent / PROMPTS)
    return (_sample(line, fitting, prompts) for line in read_lines(path))


def _sample(line: JsonLine, fitting: ContextFitter, prompts: Mapping[str, str]) -> Sample:
    dataset = line.text("dataset").removesuffix("_e")
    if dataset not in FORMATS:
        raise line.error(str(unknown("LongBench data set", dataset, FORMATS)))
    own = FORMATS[dataset]
    answers = line.texts("answers")
    before, _, after = prompts.get(dataset, own.prompt).partition("{context}")
    context = before + line.text("context")
    question = Question(
        after.replace("{input}", line.text("input")),
        " | ".join(answers),
        depth_of(context, answers[:1]),
        _references(line, own.scorer, answers),
        own.scorer,
        own.max_new_tokens,
        is_framed=False,
        stop=own.stop,
    )
    return fitting.sample(dataset, context, question)


def _references(line: JsonLine, scorer: str, answers: tuple[str, ...]) -> tuple[str, ...]:
    """Return the references of the scorer: the answers; for a classification, the answer and then all classes."""
    if scorer != "classification":
        return answers
    classes = line.texts("all_classes")
    if len(answers) > 1:
        raise line.error(f"a classification has one answer; 'answers' has {len(answers)}.")
    return (*answers, *classes)


def _prompts(path: Path) -> dict[str, str]:
    """Return LongBench's own prompts, if present."""
    if not path.exists():
        return {}
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}.") from None
    good = isinstance(prompts, dict) and all(isinstance(text, str) and "{context}" in text for text in prompts.values())
    if not good:
        raise InputError(f"{path} must be an object of prompts, each with {{context}} in it.")
    return dict(prompts)
