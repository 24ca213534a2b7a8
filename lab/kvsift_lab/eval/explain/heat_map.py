"""Heat maps of passages as SVG: a column per passage, linked to its text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from math import sqrt
from typing import NamedTuple

from kvsift_lab.eval.explain.explanation import Explanation, Passage

WIDTH, ROW, LABEL = 960, 12, 150  # pixels: all passages, a row, the name of a row
FAINTEST = 0.002  # smaller shares are not drawn


class MapRow(NamedTuple):
    """A row of a heat map: the share of each passage, 0 to 1, and whether it is visible."""

    name: str
    shares: Sequence[float]
    seen: Sequence[bool]
    link: str = ""
    kind: str = "heat"


def heat_map(e: Explanation, rows: Sequence[MapRow], caption: str, hint: str) -> str:
    """Return a figure. Its links are for pointers; the tables have the same links for keyboards and screen readers."""
    cell = WIDTH / len(e.passages)
    marks = [mark for number, row in enumerate(rows) for mark in _row(e, row, number * ROW, cell, hint)]
    height = len(rows) * ROW
    hits = "all" if cell >= 4 else "none"
    columns = (
        f'<a href="#t{e.token}p{index}" tabindex="-1"><rect x="{LABEL + index * cell:.1f}" y="0" width="{cell:.2f}" '
        f'height="{height}" fill="transparent" pointer-events="{hits}">'
        f"<title>passage {index}, tokens {passage.start:,} to {passage.stop - 1:,}</title></rect></a>"
        for index, passage in enumerate(e.passages)
    )
    edge = f'<line class="axis" x1="{LABEL}" x2="{LABEL + WIDTH}" y1="{height}" y2="{height}"/>'
    size = f'viewBox="0 0 {LABEL + WIDTH + 20} {height + 22}"'
    drawn = "".join([*columns, *marks, edge, _axis(e.passages, cell, height)])
    return (
        '<figure class="map"><div class=scroll tabindex=0 role=region aria-label="Map of passages">'
        f'<svg role="img" {size}><title>{escape(caption)}</title>{drawn}</svg></div>'
        f"<p class=soft>{escape(caption)}</p></figure>"
    )


def _row(e: Explanation, row: MapRow, y: int, cell: float, hint: str) -> Iterable[str]:
    name = f'<text x="{LABEL - 6}" y="{y + ROW - 3}" text-anchor="end">{escape(row.name)}</text>'
    yield f'<a href="{row.link}" tabindex="-1">{name}</a>' if row.link else name
    first = 0
    for visible, run in groupby(row.seen):
        length = len(list(run))
        if visible:  # adjacent passages share one mark
            yield _rect("seen", first * cell, y, length * cell)
        first += length
    for index, share in enumerate(row.shares):
        if share >= FAINTEST:
            label = hint if row.kind == "heat" else "{share:.1%} of its tokens selected by the oracle"
            text = f"passage {index}: {label.format(share=share)}"
            more = f' fill-opacity="{min(sqrt(share), 1):.2f}"'
            yield _rect(row.kind, index * cell, y, cell, more, text, f"#t{e.token}p{index}")


def _rect(kind: str, x: float, y: float, width: float, more: str = "", title: str = "", link: str = "") -> str:
    box = f'class="{kind}" x="{LABEL + x:.1f}" y="{y:g}" width="{max(width, 1):.2f}" height="{ROW - 1}"{more}'
    if not title:
        return f'<rect {box} pointer-events="none"/>'
    return f'<a href="{link}" tabindex="-1"><rect {box}><title>{escape(title)}</title></rect></a>'


def _axis(passages: Sequence[Passage], cell: float, y: float) -> str:
    """Return token positions below the columns, as many as fit."""
    step = max(1, round(60 / cell))
    texts = [
        f'<text x="{LABEL + index * cell:.1f}" y="{y + 14}">{passages[index].start:,}</text>'
        for index in range(0, len(passages), step)
    ]
    return "".join(texts)
