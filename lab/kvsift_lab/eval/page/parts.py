"""Parts of a page as data, and the templates that render them: one HTML file without scripts or requests."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

DARKEST = 65  # percent of the heat colour, so that text stays readable


class Cell(NamedTuple):
    """A table cell with more than text: a class, a style, a hint, small text beside it, or a mark drawn by a style."""

    text: Any = ""
    kind: str = ""
    style: str = ""
    hint: str = ""
    beside: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """A table with row names in the first column; ``soft`` are the indices of reference rows, ``ids`` names of rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    soft: Collection[int] = ()
    ids: Sequence[str] = ()
    part: ClassVar = "table"

    def is_text(self, column: int) -> bool:
        """Return whether a column holds text that may wrap."""
        return bool(self.rows) and getattr(self.rows[0][column], "kind", "") == "text"


@dataclass(frozen=True)
class Heading:
    """A heading inside of a section."""

    text: str
    part: ClassVar = "heading"


@dataclass(frozen=True)
class Fold:
    """Parts that can be folded, closed by default."""

    title: str
    parts: Sequence[Any]
    is_open: bool = False
    part: ClassVar = "fold"


@dataclass(frozen=True)
class Figure:
    """Drawings with a caption."""

    title: str
    parts: Sequence[Any]
    part: ClassVar = "figure"


@dataclass(frozen=True)
class SideBySide:
    """Parts side by side: in a "grid" of equal columns, or by the "side" of each other."""

    parts: Sequence[Any]
    kind: str = "side"
    style: str = ""
    part: ClassVar = "row"


Parts = list[Any]
"""Parts in order; text is a paragraph, and markup is itself."""


def plan_name(name: Any) -> Markup:
    """Return a plan for HTML with line breaks allowed after its settings."""
    return Markup(re.sub(r"([:,])(?=[a-z])", r"\1<wbr>", str(escape(name))))


@cache
def _templates() -> Environment:
    loader = PackageLoader("kvsift_lab.eval.page")
    templates = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters["plan"] = plan_name
    return templates


def rendered(template: str, **values: Any) -> Markup:
    """Return a template with its values."""
    return Markup(_templates().get_template(template).render(values))


def heat(share: float | None, hint: str = "") -> Cell:
    """Return a heat cell of a number from 0 to 1; an empty cell for None."""
    if share is None:
        return Cell("", "heat", "background:none", hint)
    return Cell(f"{share:.2f}", "heat", f"--v:{DARKEST * share:.0f}%", f"{hint}: {share:.3f}" if hint else "")


def text_cell(text: Any) -> Cell:
    """Return a cell of text that may wrap."""
    return Cell(plan_name(text), "text")


def shown(value: float | None, digits: int) -> str:
    """Return a number, or a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, whole: float | None) -> str:
    """Return a value as percent of another, or a dash."""
    return "-" if value is None or not whole else f"{100 * value / whole:.0f} %"
