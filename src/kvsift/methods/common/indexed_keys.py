"""Indexes of one sequence in one layer, and the queries of the prompt that they are built from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from torch import Tensor

from kvsift import native
from kvsift.indexes.audits import Audits
from kvsift.indexes.auto import AutoIndex
from kvsift.indexes.base import Index
from kvsift.indexes.graph import GraphIndex
from kvsift.indexes.samples import QuerySamples
from kvsift.types import Candidates


class Recorder(Protocol):
    """Keeps a sample of the queries of a prompt."""

    unseen_stop: int

    def observe(self, queries: Tensor | None, start: int, stop: int) -> None:
        """Receive the queries [num_query_heads, stop - start, head_dim] of new tokens; None if they are unknown."""

    def take(self) -> QuerySamples | None:
        """Return the sample; None if it is empty."""

    def crop(self, length: int) -> None:
        """Remove the queries from position ``length`` on."""

    def fork(self) -> Self:
        """Return an independent recorder of the same queries."""


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

    recorder: Recorder
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
