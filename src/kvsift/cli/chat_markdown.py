"""A conversation as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class SavedTurn(NamedTuple):
    """A turn, with a line on how it was answered."""

    question: str
    answer: str
    numbers: str


def as_markdown(model: str, files: Sequence[str], turns: Sequence[SavedTurn]) -> str:
    """Return the page: questions as quotations, answers as they are, numbers below them."""
    about = f", about {', '.join(_code(name) for name in files)}" if files else ""
    parts = [f"# Chat with {_code(model)}{about}"]
    for turn in turns:
        quoted = "\n".join(f"> {line}".rstrip() for line in turn.question.splitlines())
        parts += [quoted, turn.answer or "(nothing)", f"*{turn.numbers}*"]
    return "\n\n".join(parts) + "\n"


def _code(name: str) -> str:
    return f"`{name}`" if "`" not in name else f"`` {name} ``"
