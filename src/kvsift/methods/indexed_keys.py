"""Indexes of one sequence in one layer, and the queries of the prompt that they are built from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kvsift import native
from kvsift.indexes.audits import Audits
from kvsift.indexes.auto import AutoIndex
from kvsift.indexes.base import Index
from kvsift.indexes.graph import GraphIndex
from kvsift.indexes.recorder import QueryRecorder


@dataclass(frozen=True)
class IndexedSpan:
    """An index over the tokens ``first`` to ``stop``."""

    index: Index
    first: int
    stop: int
    length: int  # tokens cached at the build: a cache cropped to fewer may hold other tokens afterwards
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

    recorder: QueryRecorder
    spans: list[IndexedSpan] = field(default_factory=list)
    completed: int = 0
    audits: Audits = field(default_factory=Audits)

    def fork(self) -> IndexedKeys:
        spans = [replace(span, index=span.index.fork()) for span in self.spans]
        return IndexedKeys(self.recorder.fork(), spans, self.completed, self.audits.fork())

    def crop(self, length: int) -> None:
        self.recorder.crop(length)
        self.spans = [span for span in self.spans if span.length <= length]
        self.audits.crop(length)
        self.widen()

    @property
    def approximate(self) -> list[GraphIndex | AutoIndex]:
        """Indexes that may miss a key and can search wider."""
        indexes = [span.index for span in self.spans]
        return [
            index
            for index in indexes
            if isinstance(index, GraphIndex) or (isinstance(index, AutoIndex) and index.walks)
        ]

    def widen(self) -> None:
        """Widen the searches of the indexes to what the audits ask for."""
        for index in self.approximate:
            index.widen(self.audits.widths)

    def until(self, stop: int) -> Iterator[tuple[IndexedSpan, int]]:
        """Each span with the end of its search: the start of the next span, for the last one ``stop``."""
        for span, following in zip(self.spans, [*self.spans[1:], None]):
            yield span, stop if following is None else following.first

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
