"""Explanations as one self-contained HTML page: text with marked words, heat maps, tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import sqrt

from kvsift_lab.eval.explain.explanation import Explanation, LayerReading, MethodReading
from kvsift_lab.eval.explain.heat_map import MapRow, heat_map
from kvsift_lab.eval.page.html import Cell, document, heat, plan_name, table

TOP, SHOWN = 5, 0.02  # passages per list; the least share of a head's attention in it
FAINTEST = 0.002  # the least attention of a marked word
DARKEST = 60  # percent of the colour behind a word, so that it stays readable

MEASURES = {"recall": "Top-10 token recall", "recovery": "Attention mass recovered"}


def page(*explanations: Explanation) -> str:
    """Return the page of tokens of one answer."""
    first = explanations[0]
    parts = [
        f"<h1>{escape(first.question)}</h1>",
        _answer(explanations),
        f"<p class=soft>{escape(first.model)}, run under {plan_name(first.plan)}.</p>",
        *([_overview(explanations)] if len(explanations) > 1 else []),
        *(_token(explanation) for explanation in explanations),
    ]
    return document(f"kvsift explain: {first.question}", "\n".join(parts) + "\n")


def _answer(explanations: Sequence[Explanation]) -> str:
    """Return the answer; the explained tokens are links to their explanations."""
    pieces = [f"<span>{escape(piece)}</span>" for piece in explanations[0].tokens]
    for e in explanations:
        pieces[e.token] = f'<a href="#t{e.token}" class="here">{escape(e.tokens[e.token])}</a>'
    return f'<p class="answer lead">{"".join(pieces)}</p>'


def _overview(explanations: Sequence[Explanation]) -> str:
    rows = [
        [f"{e.token} {e.tokens[e.token].strip()!r}", Cell(_links(e, e.attention(), e.most_read(TOP)), "text")]
        for e in explanations
    ]
    return table(["token", "passages of the document with the most attention"], rows, "Explained tokens")


def _token(e: Explanation) -> str:
    attention, name = e.attention(), f"t{e.token}"
    parts = [
        f'<section id="{name}"><h2>Token {e.token}, {escape(repr(e.tokens[e.token].strip()))}</h2>',
        f"<p class=soft>{e.position + 1:,} tokens precede it.</p>",
        "<h3>Most read passages</h3>",
        "<p class=soft>Parts of the document by their share of attention, a mean over all layers and heads. Sinks and "
        "window, which are always visible, and the prompt around the document are left out. Words are marked by their "
        "attention.</p>",
        *(_passage(e, index, attention[index]) for index in e.most_read(TOP)),
        f'<h3 id="{name}map">What each layer and head reads</h3>',
        _run_map(e),
        *(_comparison(e) if e.choices else []),
        "<h3>By layer and head</h3>",
        _heads(e),
        "<h3>All passages</h3>",
        *(_passage(e, index, share, f' id="{name}p{index}"') for index, share in enumerate(attention)),
        "</section>",
    ]
    return "\n".join(parts)


def _links(e: Explanation, shares: Sequence[float], passages: Sequence[int]) -> str:
    """Return links to passages with their shares: numbers, or the names of sinks and window."""
    return ", ".join(
        f'<a href="#t{e.token}p{index}">{_name(e, index)}</a>&nbsp;{shares[index]:.1%}' for index in passages
    )


def _name(e: Explanation, index: int) -> str:
    kind = e.passages[index].kind
    return str(index) if kind == "text" else kind


def _passage(e: Explanation, index: int, share: float, anchor: str = "") -> str:
    passage = e.passages[index]
    kind = "" if passage.kind == "text" else f", {passage.kind}"
    line = f"line {passage.line:,}, " if passage.line else ""
    where = f"{line}tokens {passage.start:,} to {passage.stop - 1:,}{kind}: {share:.1%}"
    back = f' <a href="#t{e.token}map">map</a>' if anchor else ""
    head = f'<b>{index}</b> <span class="soft">{where}</span>{back}'
    return f'<div class="passage"{anchor}>{head}\n{_marked(e, index)}</div>'


def _marked(e: Explanation, index: int) -> str:
    """Return the text of a passage. The colour of a word is the root of its attention relative to the most read word of
    text."""
    most = max(share for words, passage in zip(e.words, e.passages) if passage.is_candidate for _, share in words)
    parts = []
    for text, share in e.words[index]:
        word = text.strip()
        if share < FAINTEST or not word:
            parts.append(escape(text))
            continue
        before, _, after = text.partition(word)
        dark = DARKEST * min(1.0, sqrt(share / max(most, FAINTEST)))
        mark = f'<mark style="--v:{dark:.0f}%" title="{share:.1%} of the attention">{escape(word)}</mark>'
        parts.append(f"{before}{mark}{after}")
    return "".join(parts).strip()


def _run_map(e: Explanation) -> str:
    rows = []
    for reading in e.readings:
        for head, (mass, visible) in enumerate(zip(reading.mass, reading.seen, strict=True)):
            link = f"#{_row_name(e, reading, head)}"
            rows.append(MapRow(f"layer {reading.layer}, head {head}", mass, [share > 0 for share in visible], link))
        if reading.oracle is not None:
            rows.append(MapRow(f"layer {reading.layer}, oracle", reading.oracle, [], kind="oracle"))
    caption = (
        "A column is a passage, from the start of the prompt to its end. Click a column for its text and the name of a "
        "row for its numbers. Colour is attention on a square-root scale from 0 to all of a head's; the pale ground "
        "marks visible tokens. The oracle's row below the heads of a layer is the share of a passage's tokens that "
        "exact attention selects at the budget of the methods, on the same scale."
    )
    return heat_map(e, rows, caption, "{share:.1%} of the attention")


def _row_name(e: Explanation, reading: LayerReading, head: int) -> str:
    return f"t{e.token}l{reading.layer}h{head}"


def _comparison(e: Explanation) -> list[str]:
    head = ["method", "visible tokens", "top-10 recall", "attention mass recovered", "oracle overlap"]
    lines = [
        [c.name, f"{c.visible_tokens:,.0f}", f"{c.recall:.1%}", f"{c.recovery:.1%}", f"{c.overlap:.1%}"]
        for c in e.choices
    ]
    rows = [MapRow(c.name, c.passages, [share > 0 for share in c.passages]) for c in e.choices]
    caption = "Colour is the share of a passage's tokens that is visible, over layers and heads, on the same scale."
    budget = escape(e.choices[0].plan.partition(":")[2])
    return [
        "<h3>What methods would read</h3>",
        f"<p class=soft>All with the queries of this run and {budget}. Means over heads and sparse layers.</p>",
        table(head, lines),
        heat_map(e, rows, caption, "{share:.1%} of the tokens"),
        "<h3>Layer by layer</h3>",
        f"<div class=side>{''.join(_layers(e, measure) for measure in MEASURES)}</div>",
    ]


def _layers(e: Explanation, measure: str) -> str:
    """Return a table: a row per layer, columns for run, oracle and methods, empty where a layer is dense."""
    rows = []
    for reading in e.readings:
        layer = f"layer {reading.layer}"
        values = [getattr(reading, measure), *(_layer_measure(choice, reading.layer, measure) for choice in e.choices)]
        names = ["this run", *(choice.name for choice in e.choices)]
        rows.append([layer, *(heat(value, f"{layer}, {name}") for name, value in zip(names, values, strict=True))])
    head = ["layer", "this run", *(choice.name for choice in e.choices)]
    return f"<div>{table(head, rows, MEASURES[measure])}</div>"


def _layer_measure(choice: MethodReading, layer: int, measure: str) -> float | None:
    return next((row[measure] for row in choice.layers if row["layer"] == layer), None)


def _heads(e: Explanation) -> str:
    """Return the passages with the most attention of each head, as links."""
    text = [index for index, passage in enumerate(e.passages) if passage.kind == "text"]
    lines = []
    for reading in e.readings:
        for head, (mass, visible) in enumerate(zip(reading.mass, reading.seen, strict=True)):
            order = sorted(range(len(mass)), key=lambda index: -mass[index])
            most = [index for index in order[:TOP] if mass[index] >= SHOWN]
            count = sum(visible[index] > 0 for index in text)
            lines.append(
                f'<tr id="{_row_name(e, reading, head)}"><th scope="row">layer {reading.layer}, head {head}</th>'
                f'<td class="text">{_links(e, mass, most)}</td><td>{count} of {len(text)}</td></tr>'
            )
    return (
        '<div class=wide tabindex=0 role=region aria-label="By layer and head"><table><thead><tr>'
        '<th scope="col">head</th><th scope="col" class="text">passages with their share of its attention</th>'
        f'<th scope="col">visible</th></tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )
