"""Parts of an HTML page: escaping, tables, cells, sections."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

from kvsift_lab.eval.page.style import style_sheet

DARKEST = 65  # percent of the heat colour, so that text stays readable


class Cell(NamedTuple):
    """A table cell of HTML; any other value in a table is text."""

    body: str
    kind: str = ""
    style: str = ""
    hint: str = ""

    def __str__(self) -> str:
        kind = f' class="{self.kind}"' if self.kind else ""
        style = f' style="{self.style}"' if self.style else ""
        hint = f' title="{escaped(self.hint)}"' if self.hint else ""
        return f"<td{kind}{style}{hint}>{self.body}</td>"


def escaped(text: Any) -> str:
    """Return text escaped for HTML."""
    return escape(str(text))


def plan_name(name: Any) -> str:
    """Return a plan for HTML with line breaks allowed after its settings."""
    return re.sub(r"([:,])(?=[a-z])", r"\1<wbr>", escaped(name))


def document(title: str, body: str) -> str:
    """Return a whole page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{style_sheet()}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def section(title: str, body: str, anchor: str) -> str:
    """Return a section."""
    return f'<section id="{anchor}"><h2>{escaped(title)}</h2>{body}</section>'


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "", soft: Iterable[int] = ()) -> str:
    """Return a table with row names in the first column; ``soft`` are the indices of reference rows."""
    dimmed, rows = set(soft), list(rows)
    lines = "".join(
        f"<tr{' class=ref' if index in dimmed else ''}>{_row(row)}</tr>" for index, row in enumerate(rows)
    )  # fmt: skip
    wraps = [isinstance(cell, Cell) and cell.kind == "text" for cell in rows[0]] if rows else [False] * len(head)
    titles = "".join(
        f'<th scope="col"{" class=text" if left else ""}>{plan_name(cell)}</th>'
        for cell, left in zip(head, wraps, strict=True)
    )
    named = f"<p class=caption>{escaped(caption)}</p>" if caption else ""
    label = escaped(caption or ", ".join(head))
    return (
        f'{named}<div class=wide tabindex=0 role=region aria-label="{label}"><table><thead><tr>{titles}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _row(row: Sequence[Any]) -> str:
    cells = [str(cell) if isinstance(cell, Cell) else f"<td>{escaped(cell)}</td>" for cell in row[1:]]
    return f'<th scope="row">{plan_name(row[0])}</th>' + "".join(cells)


def heat(share: float | None, hint: str = "") -> Cell:
    """Return a heat cell of a number from 0 to 1; an empty cell for None."""
    if share is None:
        return Cell("", "heat", "background:none", hint)
    return Cell(f"{share:.2f}", "heat", f"--v:{DARKEST * share:.0f}%", f"{hint}: {share:.3f}" if hint else "")


def tint(text: str, beside: str, share: float) -> Cell:
    """Return text with small text beside it, on a light heat colour."""
    return Cell(f"{escaped(text)} <small>{escaped(beside)}</small>", "tint", f"--v:{40 * min(share, 1.0):.0f}%")


def text_cell(text: Any) -> Cell:
    """Return a cell of text that may wrap."""
    return Cell(plan_name(text), "text")


def details(title: str, body: str, is_open: bool = False) -> str:
    """Return a foldable part, closed by default."""
    return f"<details{' open' if is_open else ''}><summary>{escaped(title)}</summary>{body}</details>"


def figure(title: str, drawing: str) -> str:
    """Return a drawing with its caption."""
    return f"<figure><figcaption>{escaped(title)}</figcaption>{drawing}</figure>"


def shown(value: float | None, digits: int) -> str:
    """Return a number, or a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, whole: float | None) -> str:
    """Return a value as percent of another, or a dash."""
    return "-" if value is None or not whole else f"{100 * value / whole:.0f} %"
