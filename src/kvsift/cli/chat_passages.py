"""The passages that an answer read, by lines of the context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvsift.cli.chat_context import ChatContext, Place

if TYPE_CHECKING:
    from kvsift.api.passages import Passages

BEFORE, AFTER = 40, 100  # characters of an excerpt around the strongest part of a line


class LinePassage(NamedTuple):
    """A line, or a part of a long one, that decode steps selected from.

    Attributes:
        place: in the context.
        share: of steps, heads and layers that selected its strongest part.
        weight: characters times shares.
        at: the first character of the strongest part.
    """

    place: Place
    share: float
    weight: float
    at: int


def strongest(context: ChatContext, passages: Passages) -> list[LinePassage]:
    """Return the lines that were selected from, those with the largest shares first."""
    found: dict[Place, LinePassage] = {}
    for start, stop, share in passages.all:
        for place in context.places(start, stop):
            first, last = max(start, place.start), min(stop, place.stop)
            known = found.get(place, LinePassage(place, 0.0, 0.0, first))
            at = first if share > known.share else known.at
            weight = known.weight + share * (last - first)
            found[place] = LinePassage(place, max(share, known.share), weight, at)
    return sorted(found.values(), key=lambda line: (-line.share, -line.weight, line.place.start))


def passage_lines(context: ChatContext, passages: Passages, most: int) -> Iterator[str]:
    """Yield the strongest lines with their numbers and excerpts, how many others there are, and what is left out."""
    lines = strongest(context, passages)
    if lines:
        yield "lines that were selected, each with the share of the steps, heads and layers that did:"
    for passage in lines[:most]:
        file = f"{passage.place.file}, " if passage.place.file else ""
        yield f"{file}line {passage.place.line:,}, {100 * passage.share:.0f} %: {excerpt(context.text, passage)}"
    if len(lines) > most:
        yield f"{len(lines) - most:,} other lines were read less; /passages {len(lines)} lists all."
    if passages.note:
        yield passages.note


def excerpt(text: str, passage: LinePassage) -> str:
    """Return the line around its strongest part, in whole words."""
    place = passage.place
    start, stop = max(place.start, passage.at - BEFORE), min(place.stop, passage.at + AFTER)
    if start > place.start:
        space = text.find(" ", start, passage.at)
        start = space + 1 if space >= 0 else start
    if stop < place.stop:
        space = text.rfind(" ", passage.at, stop)
        stop = space if space > passage.at else stop
    words = " ".join(text[start:stop].split())
    return f"{'... ' if start > place.start else ''}{words}{' ...' if stop < place.stop else ''}"
