"""Explanations as one self-contained HTML page: text with marked words, heat maps, tables."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup, escape
from matplotlib.colors import to_rgba

from kvsift_lab.eval.explain.explanation import TOP, Explanation
from kvsift_lab.eval.page.charts import COLOURS, IN_PLACE, figure_of, inline, settings
from kvsift_lab.eval.page.parts import Cell, Figure, Heading, Parts, SideBySide, Table, heat, rendered

FAINTEST = 0.002  # the least attention of a marked word, and the least share that a map shows
DARKEST = 60  # percent of the colour behind a word, so that it stays readable
WIDTH, ROW = 1130, 12  # pixels of a map, and of one of its rows
MEASURES = {"recall": "Top-10 token recall", "recovery": "Attention mass recovered"}


def page(*explanations: Explanation) -> str:
    """Return the page of tokens of one answer."""
    first, ids = explanations[0], {e.token: f"t{e.token}" for e in explanations}
    lines = [
        [f"{e.token} {e.tokens[e.token].strip()!r}", _links(e, e.attention(), e.most_read(TOP))] for e in explanations
    ]
    overview = Table(["token", "passages of the document with the most attention"], lines, "Explained tokens")
    text = rendered(
        "explain.html", title=f"kvsift explain: {first.question}", question=first.question, model=first.model,
        plan=first.plan, answer=[(ids.get(index), piece) for index, piece in enumerate(first.tokens)],
        overview=[overview] if len(explanations) > 1 else [], tokens=[_token(e) for e in explanations],
    )  # fmt: skip
    return str(text)


def _token(e: Explanation) -> dict[str, Any]:
    passages = _passages(e)
    return {
        "id": f"t{e.token}",
        "title": f"Token {e.token}, {e.tokens[e.token].strip()!r}",
        "num_before": f"{e.position + 1:,}",
        "most": [passages[index] for index in e.most_read(TOP)],
        "map": [_run_map(e)],
        "comparison": _comparison(e) if e.choices else [],
        "heads": _heads(e),
        "passages": passages,
    }


def _passages(e: Explanation) -> list[dict[str, Any]]:
    """Return the passages with their words. The colour of a word is the root of its attention relative to the most read
    word that is not always visible."""
    candidates = (words for words, passage in zip(e.words, e.passages) if passage.is_candidate)
    most = max((share for words in candidates for _, share in words), default=FAINTEST)
    passages = []
    for index, (passage, share) in enumerate(zip(e.passages, e.attention(), strict=True)):
        line = f"line {passage.line:,}, " if passage.line else ""
        kind = "" if passage.kind == "text" else f", {passage.kind}"
        where = f"{line}tokens {passage.start:,} to {passage.stop - 1:,}{kind}: {share:.1%}"
        text = Markup("").join(_marked(text, own, most) for text, own in e.words[index]).strip()
        passages.append(
            {"index": index, "id": f"t{e.token}p{index}", "map": f"t{e.token}map", "where": where, "text": text}
        )
    return passages


def _marked(text: str, share: float, most: float) -> Markup:
    """Return a word, marked if it has attention, with the space around it."""
    word = text.strip()
    if share < FAINTEST or not word:
        return escape(text)
    before, _, after = text.partition(word)
    darkness = DARKEST * min(1.0, sqrt(share / max(most, FAINTEST)))
    mark = Markup('{}<mark style="--v:{:.0f}%" title="{:.1%} of the attention">{}</mark>{}')
    return mark.format(before, darkness, share, word, after)


def _links(e: Explanation, shares: Sequence[float], passages: Sequence[int]) -> Cell:
    """Return links to passages with their shares: numbers, or the names of sinks, window and prompt."""
    link = Markup('<a href="#t{}p{}">{}</a>&nbsp;{:.1%}')
    links = (link.format(e.token, index, e.name(index), shares[index]) for index in passages)
    return Cell(Markup(", ").join(links), "text")


def _comparison(e: Explanation) -> Parts:
    """Return what methods would read, as a table, a map, and tables by layer."""
    head = ["method", "visible tokens", "top-10 recall", "attention mass recovered", "oracle overlap"]
    lines = [
        [c.name, f"{c.visible_tokens:,.0f}", f"{c.recall:.1%}", f"{c.recovery:.1%}", f"{c.overlap:.1%}"]
        for c in e.choices
    ]
    rows = [MapRow(c.name, c.passages, [share > 0 for share in c.passages]) for c in e.choices]
    caption = "Colour is the share of a passage's tokens that is visible, over layers and heads, on the same scale."
    budget = e.choices[0].plan.partition(":")[2]
    return [
        Heading("What methods would read"),
        f"All with the queries of this run and {budget}. Means over heads and sparse layers.",
        Table(head, lines),
        heat_map(e, rows, caption, "{share:.1%} of the tokens"),
        Heading("Layer by layer"),
        SideBySide([_layers(e, measure) for measure in MEASURES]),
    ]


def _layers(e: Explanation, measure: str) -> Table:
    """Return a table: a row per layer, columns for run, oracle and methods, empty where a layer is dense."""
    names, rows = ["this run", *(choice.name for choice in e.choices)], []
    by_layer = [{row["layer"]: row[measure] for row in choice.layers} for choice in e.choices]
    for reading in e.readings:
        values = [getattr(reading, measure), *(own.get(reading.layer) for own in by_layer)]
        layer = f"layer {reading.layer}"
        rows.append([layer, *(heat(value, f"{layer}, {name}") for name, value in zip(names, values, strict=True))])
    return Table(["layer", *names], rows, MEASURES[measure])


def _heads(e: Explanation) -> Table:
    """Return the passages with the most attention of each head, as links."""
    rows, ids = [], []
    for reading in e.readings:
        for head, mass in enumerate(reading.mass):
            links = _links(e, mass, e.most_read_by(reading, head))
            rows.append([f"layer {reading.layer}, head {head}", links, e.visible_to(reading, head)])
            ids.append(f"t{e.token}l{reading.layer}h{head}")
    return Table(["head", "passages with their share of its attention", "visible"], rows, "", ids=ids)


class MapRow(NamedTuple):
    """A row of a heat map: the share of each passage, 0 to 1, and whether it is visible; ``kind`` is its colour."""

    name: str
    shares: Sequence[float]
    seen: Sequence[bool]
    link: str = ""
    kind: str = "mark"


def _run_map(e: Explanation) -> Figure:
    rows = []
    for reading in e.readings:
        for head, (mass, visible) in enumerate(zip(reading.mass, reading.seen, strict=True)):
            link = f"#t{e.token}l{reading.layer}h{head}"
            rows.append(MapRow(f"layer {reading.layer}, head {head}", mass, [share > 0 for share in visible], link))
        if reading.oracle is not None:
            rows.append(MapRow(f"layer {reading.layer}, oracle", reading.oracle, [], kind="c0"))
    caption = (
        "A column is a passage, from the start of the prompt to its end. Click a column for its text and the name of a "
        "row for its numbers. Colour is attention on a square-root scale from 0 to all of a head's; the pale ground "
        "marks visible tokens. The oracle's row below the heads of a layer is the share of a passage's tokens that "
        "exact attention selects at the budget of the methods, on the same scale."
    )
    return heat_map(e, rows, caption, "{share:.1%} of the attention")


def heat_map(e: Explanation, rows: Sequence[MapRow], caption: str, hint: str) -> Figure:
    """Return a figure of passages. Its links are for pointers; the tables have the same ones for keyboards and screen
    readers."""
    starts = [passage.start for passage in e.passages]
    links = [f"#t{e.token}p{index} passage {index}" for index in range(len(starts))]
    with settings():
        figure = figure_of(WIDTH, ROW * (len(rows) + 3))
        axis = figure.subplots()
        columns = [(index, 1) for index in range(len(starts))]
        axis.broken_barh(columns, (-0.5, len(rows)), facecolors=to_rgba(COLOURS["seen"], 0), urls=links)
        for number, row in enumerate(rows):
            seen = np.flatnonzero(np.diff([0, *row.seen, 0])).reshape(-1, 2)  # starts and stops of visible passages
            marked = [(index, share) for index, share in enumerate(row.shares) if share >= FAINTEST]
            label = hint if row.kind == "mark" else "{share:.1%} of its tokens selected by the oracle"
            texts = [f"{links[index]}: {label.format(share=share)}" for index, share in marked]
            colours = [to_rgba(COLOURS[row.kind], min(sqrt(share), 1)) for _, share in marked]
            at = number - 0.46, 0.92
            runs = [(first, stop - first) for first, stop in seen]
            axis.broken_barh(runs, at, facecolors=COLOURS["seen"], path_effects=IN_PLACE)
            axis.broken_barh([columns[index] for index, _ in marked], at, facecolors=colours, urls=texts)
        shown = range(0, len(starts), max(1, round(60 * len(starts) / WIDTH)))
        axis.set_xticks(shown, [f"{starts[index]:,}" for index in shown])
        axis.set_yticks(range(len(rows)), [row.name for row in rows])
        axis.tick_params(labelsize=10)
        for name, row in zip(axis.get_yticklabels(), rows):
            name.set(url=row.link or None, color=COLOURS["link" if row.link else "soft"])
        axis.set(xlim=(0, len(starts)), ylim=(len(rows) - 0.5, -0.5))
        axis.grid(visible=False)
        chart = inline(figure, caption, "The tables below have the numbers.")
    box = Markup('<div class="scroll map" tabindex=0 role=region aria-label="Map of passages">{}</div>').format(chart)
    return Figure("", [box, caption])
