"""Indexes by block of a prompt, each a function of the tokens up to the end of its block: rows can share them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvsift.indexes.base import Index
from kvsift.indexes.block_recorder import BlockRecorder
from kvsift.indexes.flat import FlatIndex
from kvsift.methods.common.indexed_keys import IndexedKeys, approximate
from kvsift.types import Candidates


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
        """Tokens since the first call, which depends on the prompt and not on who has read it."""
        if self.searched_from is None:
            self.searched_from = length - 1
        return length - 1 - self.searched_from
