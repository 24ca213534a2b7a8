"""An explanation as one HTML page that needs nothing else: heat maps in SVG, text, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from math import sqrt

from kvsift.eval.explanation import Explanation, Passage

WIDTH, ROW, LABEL = 960, 11, 150  # pixels: of all passages together, of a row, of its name
FAINTEST = 0.002  # of a head's attention; less is not drawn
TOP = 5

STYLE = """
:root { --ink: #1a1d21; --faint: #656d76; --paper: #ffffff; --line: #d8dee4; --seen: #dfe8f3; --heat: #b4290f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --faint: #9aa4ae; --paper: #14171a; --line: #353b42; --seen: #25384f; --heat: #ff8a5c; }
}
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 1140px; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
p.note, figcaption, .faint { color: var(--faint); font-size: .87rem; }
.answer span { padding: 0 .05em; white-space: pre-wrap; }
.answer .here { background: var(--heat); color: var(--paper); border-radius: 3px; }
table { border-collapse: collapse; font-size: .9rem; } th, td { padding: .2rem .7rem; text-align: right; }
th:first-child, td:first-child { text-align: left; } tr + tr > * { border-top: 1px solid var(--line); }
figure { margin: 0; overflow-x: auto; }
svg text { fill: var(--ink); font: 10px system-ui, sans-serif; } svg .edge { stroke: var(--line); }
svg .seen { fill: var(--seen); } svg .heat { fill: var(--heat); }
.passage { border-left: 3px solid var(--line); margin: .7rem 0; padding: 0 0 0 .8rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.passage:target { border-color: var(--heat); } .passage b { font-weight: 600; }
"""


def page(explanation: Explanation) -> str:
    """All of it."""
    e, got = explanation, explanation.attention()
    title = f"kvsift explain: {e.question}"
    body = [
        f"<h1>{escape(e.question)}</h1>",
        _answer(e),
        f'<p class="note">{escape(e.model)}, run under {escape(e.plan)}; {e.position + 1:,} tokens before the '
        "highlighted one.</p>",
        "<h2>Most read passages</h2>",
        '<p class="note">By their share of attention, a mean over all layers and heads. Sinks and window, which are '
        "always visible, are left out.</p>",
        *(_passage(index, e.passages[index], got[index]) for index in e.most_read(TOP)),
        "<h2>What each layer and head read</h2>",
        _run_map(e),
        *(_comparison(e) if e.choices else []),
        "<h2>All passages</h2>",
        *(_passage(index, each, got[index], f' id="p{index}"') for index, each in enumerate(e.passages)),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    lines = [
        f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>', *body, "</body></html>", ""
    ]  # fmt: skip
    return "\n".join(lines)


def _answer(e: Explanation) -> str:
    pieces = "".join(
        f'<span class="here">{escape(piece)}</span>' if index == e.token else f"<span>{escape(piece)}</span>"
        for index, piece in enumerate(e.tokens)
    )
    return f'<p class="answer">{pieces}</p>'


def _passage(index: int, passage: Passage, got: float, anchor: str = "") -> str:
    kind = "" if passage.kind == "text" else f", {passage.kind}"
    where = f"tokens {passage.start:,} to {passage.stop - 1:,}{kind}: {got:.1%}"
    head = f'<b>{index}</b> <span class="faint">{where}</span>'
    return f'<div class="passage"{anchor}>{head}\n{escape(passage.text.strip())}</div>'


def _run_map(e: Explanation) -> str:
    rows = []
    for reading in e.readings:
        for head, (mass, seen) in enumerate(zip(reading.mass, reading.seen, strict=True)):
            rows.append((f"layer {reading.layer}, head {head}", mass, seen))
    caption = (
        "A column is a passage, from the beginning of the prompt to its end; click one for its text. Dark is "
        "attention, on a square-root scale from 0 to all of a head's; the pale ground is what the head could see."
    )
    return _figure(e.passages, rows, caption, "{share:.1%} of the attention")


def _comparison(e: Explanation) -> list[str]:
    names = ("method", "visible tokens", "top-10 seen", "attention mass", "oracle's tokens")
    head = "".join(f"<th>{name}</th>" for name in names)
    lines = [
        f"<tr><td>{escape(c.name)}</td><td>{c.visible_tokens:,.0f}</td><td>{c.recall:.1%}</td><td>{c.recovery:.1%}</td>"
        f"<td>{c.overlap:.1%}</td></tr>"
        for c in e.choices
    ]
    rows = [(c.name, c.passages, [float(share > 0) for share in c.passages]) for c in e.choices]
    caption = "Dark, on the same scale, is the share of a passage's tokens that a method shows, over layers and heads."
    return [
        "<h2>What methods would have read</h2>",
        '<p class="note">All asked with the queries of this run, with '
        f"{escape(e.choices[0].plan.partition(':')[2])}. Means over heads and sparse layers.</p>",
        f"<table><tr>{head}</tr>{''.join(lines)}</table><br>",
        _figure(e.passages, rows, caption, "{share:.1%} of the tokens"),
    ]


def _figure(
    passages: Sequence[Passage], rows: Sequence[tuple[str, Sequence[float], Sequence[float]]], caption: str, hint: str
) -> str:
    """A heat map of rows: (name, how dark each passage is from 0 to 1, how much of it was visible)."""
    cell = WIDTH / len(passages)
    marks = [mark for number, row in enumerate(rows) for mark in _row(row, number * ROW, cell, hint)]
    height = len(rows) * ROW
    links = (
        f'<a href="#p{index}"><rect x="{LABEL + index * cell:.1f}" y="0" width="{cell:.2f}" height="{height}" '
        f'fill="transparent" pointer-events="{"all" if cell >= 4 else "none"}"><title>passage {index}, tokens '
        f"{each.start:,} to {each.stop - 1:,}</title></rect></a>"
        for index, each in enumerate(passages)
    )
    edge = f'<line class="edge" x1="{LABEL}" x2="{LABEL + WIDTH}" y1="{height}" y2="{height}"/>'
    size = f'viewBox="0 0 {LABEL + WIDTH + 20} {height + 22}" width="{LABEL + WIDTH + 20}" height="{height + 22}"'
    drawn = "".join([*links, *marks, edge, _axis(passages, cell, height)])
    return f'<figure><svg role="img" {size}>{drawn}</svg><figcaption>{caption}</figcaption></figure>'


def _row(row: tuple[str, Sequence[float], Sequence[float]], y: float, cell: float, hint: str) -> Iterable[str]:
    name, heat, seen = row
    yield f'<text x="{LABEL - 6}" y="{y + ROW - 2}" text-anchor="end">{escape(name)}</text>'
    first = 0
    for visible, run in groupby(seen, lambda share: share > 0):
        length = len(list(run))
        if visible:  # passages side by side are one mark
            yield _rect("seen", first * cell, y, length * cell)
        first += length
    for index, share in enumerate(heat):
        if share >= FAINTEST:
            text = f"passage {index}: {hint.format(share=share)}"
            yield _rect("heat", index * cell, y, cell, f' fill-opacity="{min(sqrt(share), 1):.2f}"', text, f"#p{index}")


def _rect(kind: str, x: float, y: float, width: float, more: str = "", title: str = "", link: str = "") -> str:
    box = f'class="{kind}" x="{LABEL + x:.1f}" y="{y:g}" width="{max(width, 1):.2f}" height="{ROW - 1}"{more}'
    if not title:
        return f'<rect {box} pointer-events="none"/>'
    return f'<a href="{link}"><rect {box}><title>{escape(title)}</title></rect></a>'


def _axis(passages: Sequence[Passage], cell: float, y: float) -> str:
    """Positions below the columns, as many as fit."""
    step = max(1, round(60 / cell))
    texts = [
        f'<text x="{LABEL + index * cell:.1f}" y="{y + 14}">{passages[index].start:,}</text>'
        for index in range(0, len(passages), step)
    ]
    return "".join(texts)
