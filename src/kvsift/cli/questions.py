"""Questions from the command line and from JSONL files, and their answers as JSONL."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kvsift.cli import options as o
from kvsift.errors import InputError

if TYPE_CHECKING:
    from kvsift.api.answer import Answer


def read_questions(questions: Sequence[str], file: str | None) -> list[dict[str, Any]]:
    """Return questions of the command line, then those of a file with one per line: a string, or an object with
    "question", whose other fields are kept.

    Raises:
        InputError: if there is none, or a line has another format.
    """
    items: list[dict[str, Any]] = [{"question": question} for question in questions]
    lines = [] if file is None else o.read_texts([file], "questions").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError):
            item = None
        item = {"question": item} if isinstance(item, str) else item
        if not isinstance(item, dict) or not isinstance(item.get("question"), str):
            raise InputError(
                f'line {number} of {file} is not a question; write a JSON string, or an object such as {{"question": '
                '"Why?"}, on each line.'
            )
        items.append(item)
    if not items:
        raise InputError("there is nothing to ask; give --question, --questions-file, or both.")
    return items


@contextmanager
def lines_to(path: Path | None) -> Iterator[TextIO]:
    """Open the file that receives answers line by line; stdout if there is none."""
    if path is None:
        yield sys.stdout
        return
    file = path.open("w")
    try:
        yield file
    finally:
        with suppress(OSError):  # every line is flushed when it is written
            file.close()


def write_line(file: TextIO, item: dict[str, Any], answer: Answer) -> None:
    """Write and flush an answer as one line of JSON: the question's fields, then those of the answer.

    Raises:
        InputError: if that fails, for instance because the disk is full.
    """
    try:
        print(json.dumps({**item, "plan": answer.plan, **answer.as_dict()}), file=file, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InputError(f"the answer cannot be written: {error.strerror}. Those before it are safe.") from None
