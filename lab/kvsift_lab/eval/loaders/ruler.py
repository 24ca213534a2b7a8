"""Loader of RULER's files: ``<task>/validation.jsonl`` or ``<task>.jsonl`` with index, input, outputs, length and
answer_prefix.

``input`` is a whole prompt; it is split at its last question into context and question. Older files have no
``answer_prefix``: its words are the end of ``input`` and stay there. Facts from NVIDIA/RULER.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvsift.errors import unknown
from kvsift_lab.eval.loaders.reading import ContextFitter, JsonLine, depth_of, read_lines
from kvsift_lab.eval.sample import Question, Sample
from kvsift_lab.eval.tasks import FAMILIES, find_task

# Beginnings of the questions of a task.
_OPENINGS = {
    "niah": ("What are all the special magic", "What is the special magic"),
    "qa": ("Answer the question based on the given documents",),
    "": ("Question:",),
}


def load(path: Path, fitting: ContextFitter) -> Iterator[Sample]:
    task = task_of(path)
    return (_sample(task, line, fitting) for line in read_lines(path))


def task_of(path: Path) -> str:
    """Return the task of a file, by its name or that of its folder.

    Raises:
        InputError: if neither is one of RULER's.
    """
    for name in (path.stem, path.parent.name):
        if name in FAMILIES["ruler"]:
            return name
    raise unknown(
        f"RULER task: neither {path.name} nor its folder is named after one; given", path.stem, FAMILIES["ruler"]
    )


def _sample(task: str, line: JsonLine, fitting: ContextFitter) -> Sample:
    style = find_task(task).style
    answers = line.texts("outputs")
    context, tail = _split(task, line)
    prefix = line.text("answer_prefix") if "answer_prefix" in line.values else ""
    depth = depth_of(context, answers[:1] if style.scorer == "string_match_part" else answers)
    question = Question(
        tail, ", ".join(answers), depth, answers, style.scorer, style.max_new_tokens, prefix, False, None
    )
    return fitting.sample(task, context, question)


def _split(task: str, line: JsonLine) -> tuple[str, str]:
    """Return context and question; the space between them belongs to the question."""
    text = line.text("input")
    openings = _OPENINGS.get(task.split("_")[0], _OPENINGS[""])
    start = max(text.rfind(opening) for opening in openings)
    if start <= 0:
        raise line.error(f"'input' of {task} must have its question after the context, beginning with {openings[0]!r}.")
    context = text[:start].rstrip()
    return context, text[len(context) :]
