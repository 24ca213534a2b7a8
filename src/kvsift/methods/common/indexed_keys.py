"""Indexes of one sequence in one layer, and the queries of the prompt that they are built from: over spans of the
prompt, or by block, each a function of the tokens up to the end of its block, so that sequences can share them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

from kvsift import native
from kvsift.indexes.audits import Audits
from kvsift.indexes.auto import AutoIndex
from kvsift.indexes.base import Index
from kvsift.indexes.flat import FlatIndex
from kvsift.indexes.graph import GraphIndex
from kvsift.indexes.samples import BlockRecorder, QueryRecorder
from kvsift.types import Candidates


@dataclass(frozen=True)
class IndexedSpan:
    """An index over the tokens ``first`` to ``stop``."""

    index: Index
    first: int
    stop: int
    length: int  # tokens that the index depends on: a cache cropped to fewer may hold other tokens afterwards
    why: str


@dataclass
class IndexedKeys:
    """Memory of one sequence in one layer.

    Attributes:
        recorder: queries of the prompt.
        spans: indexes over consecutive spans of tokens.
        completed: searches in which an index returned too few keys, answered by a scan.
        audits: comparisons of the graphs with a scan.
    """

    recorder: QueryRecorder | BlockRecorder
    spans: list[IndexedSpan] = field(default_factory=list)
    completed: int = 0
    audits: Audits = field(default_factory=Audits)

    def fork(self) -> Self:
        spans = [replace(span, index=span.index.fork()) for span in self.spans]
        return replace(self, recorder=self.recorder.fork(), spans=spans, audits=self.audits.fork())

    def crop(self, length: int) -> None:
        self.recorder.crop(length)
        self.spans = [span for span in self.spans if span.length <= length]
        self.audits.crop(length)
        self.widen()

    def widen(self) -> None:
        """Widen the searches of the indexes to what the audits ask for."""
        for span in self.spans:
            if (index := approximate(span.index)) is not None:
                index.widen(self.audits.widths)

    def parts(self, candidates: Candidates) -> Iterator[tuple[Index, int, int]]:
        """Indexes that find the candidates together, and the tokens that each searches: those behind a span belong to
        it, as an index scans later ones."""
        for span, following in zip(self.spans, [*self.spans[1:], None]):
            yield span.index, span.first, candidates.stop if following is None else following.first

    def can_miss(self, candidates: Candidates) -> bool:
        """Whether some of the candidates are found by a graph."""
        return any(approximate(index) is not None for index, _, _ in self.parts(candidates))

    def age(self, candidates: Candidates, length: int) -> int:
        """Tokens since the indexes are in use, as audits count them."""
        return candidates.stop - self.spans[0].stop

    def describe(self) -> dict[str, Any]:
        """What was built and used: "level" (instruction set, or "torch"), "samples" (queries kept per head),
        "completed" (searches that a scan had to finish), "audits", "indexes": one ``statistics()`` and "why" each."""
        samples = self.recorder.take()
        return {
            "level": native.level() if native.available() else "torch",
            "samples": 0 if samples is None else len(samples.positions),
            "completed": self.completed,
            "audits": self.audits.describe(),
            "indexes": [{**span.index.statistics(), "why": span.why} for span in self.spans],
        }


def approximate(index: Index) -> GraphIndex | AutoIndex | None:
    """The index, if it may miss a key and can search wider."""
    if isinstance(index, GraphIndex) or (isinstance(index, AutoIndex) and index.walks):
        return index
    return None


@dataclass
class IndexedBlocks(IndexedKeys):
    """Memory of one sequence in one layer; tokens outside complete blocks are scanned.

    Attributes:
        searched_from: position of the first query that searched.
    """

    recorder: BlockRecorder
    searched_from: int | None = None

    def crop(self, length: int) -> None:
        super().crop(length)
        if self.searched_from is not None and self.searched_from >= length:
            self.searched_from = None

    def missing(self, candidates: Candidates) -> Iterator[tuple[int, int, int]]:
        """Number, first and last candidate (exclusive) of each complete block that has no index."""
        block = self.recorder.block
        built = self.spans[-1].stop // block if self.spans else candidates.first // block
        for number in range(built, candidates.stop // block):
            yield number, max(number * block, candidates.first), (number + 1) * block

    def parts(self, candidates: Candidates) -> Iterator[tuple[Index, int, int]]:
        """Blocks with a graph, each by its index, and scans of what is between and behind them. After a roll-back an
        index may reach into the window: it is not used."""
        at = candidates.first
        for span in self.spans:
            if span.stop <= candidates.stop and approximate(span.index) is not None:
                if at < span.first:
                    yield FlatIndex(), at, span.first
                yield span.index, span.first, span.stop
                at = span.stop
        if at < candidates.stop:
            yield FlatIndex(), at, candidates.stop

    def age(self, candidates: Candidates, length: int) -> int:
        """Tokens since the first call, which depends on the prompt and not on which sequence has prefilled it."""
        if self.searched_from is None:
            self.searched_from = length - 1
        return length - 1 - self.searched_from
