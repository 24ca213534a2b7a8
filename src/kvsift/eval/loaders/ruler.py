"""RULER's files: ``<task>/validation.jsonl`` or ``<task>.jsonl`` with index, input, outputs, length, answer_prefix.

``input`` is a whole prompt; it is split where its last question begins, so that context and question can be read apart.
Files of the time before ``answer_prefix`` have it at the end of ``input``, where it stays. Facts from NVIDIA/RULER.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvsift.errors import unknown
from kvsift.eval.loaders.fitting import Fitting, depth_of
from kvsift.eval.loaders.lines import Line, read_lines
from kvsift.eval.tasks import FAMILIES, find_task
from kvsift.eval.tasks.sample import Question, Sample

# What a task's question begins with.
_OPENINGS = {
    "niah": ("What are all the special magic", "What is the special magic"),
    "qa": ("Answer the question based on the given documents",),
    "": ("Question:",),
}


def load(path: Path, fitting: Fitting) -> Iterator[Sample]:
    task = task_of(path)
    return (_sample(task, line, fitting) for line in read_lines(path))


def task_of(path: Path) -> str:
    """The task a file is of, by its name or that of its folder.

    Raises:
        InputError: if neither is one of RULER's.
    """
    for name in (path.stem, path.parent.name):
        if name in FAMILIES["ruler"]:
            return name
    raise unknown(
        f"RULER task: neither {path.name} nor its folder is named after one; given", path.stem, FAMILIES["ruler"]
    )


def _sample(task: str, line: Line, fitting: Fitting) -> Sample:
    style = find_task(task).style
    answers = line.texts("outputs")
    context, tail = _split(task, line)
    prefix = line.text("answer_prefix") if "answer_prefix" in line.values else ""
    depth = depth_of(context, answers[:1] if style.scorer == "string_match_part" else answers)
    question = Question(
        tail, ", ".join(answers), depth, answers, style.scorer, style.max_new_tokens, prefix, False, None
    )
    return fitting.sample(task, context, question)


def _split(task: str, line: Line) -> tuple[str, str]:
    """Context and question; the space between them goes to the question."""
    text = line.text("input")
    openings = _OPENINGS.get(task.split("_")[0], _OPENINGS[""])
    start = max(text.rfind(opening) for opening in openings)
    if start <= 0:
        raise line.error(f"'input' of {task} must have its question after the context, beginning with {openings[0]!r}.")
    context = text[:start].rstrip()
    return context, text[len(context) :]
