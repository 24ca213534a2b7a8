"""A sample of the queries of a prompt by block: what is kept of a block depends on the tokens of that block alone."""

from __future__ import annotations

from torch import Tensor, arange

from kvsift.indexes.query_pieces import QueryPieces
from kvsift.indexes.samples import QuerySamples


class BlockRecorder:
    """Queries at the multiples of a stride, the smallest power of two for which a block has at most ``capacity``.

    Those of the newest two blocks are kept, and as many before the last checkpoint: a roll-back within them leaves
    what a cache that never went further has. Tensors are never written to, so a fork shares them.

    Args:
        block: tokens of a block; the first one begins at position 0.
        capacity: queries per head and block.

    Attributes:
        length: tokens received.
        unseen_stop: tokens without queries all precede this position; 0 if there are none.
    """

    def __init__(self, block: int, capacity: int) -> None:
        self.block, self.capacity = block, capacity
        self.length = self.unseen_stop = 0
        self._kept_from = 0  # queries before this position may have been discarded
        self._marked: int | None = None
        self._stride = 1
        while -(-block // self._stride) > capacity:
            self._stride *= 2
        self._pieces = QueryPieces()

    def observe(self, queries: Tensor | None, start: int, stop: int) -> None:
        """Receive the queries [num_query_heads, stop - start, head_dim] of new tokens; None if they are unknown."""
        self.length = stop
        if queries is None:
            self.unseen_stop = stop
            return
        oldest = start if self._marked is None else min(start, self._marked)
        self._kept_from = max(self._kept_from, (oldest // self.block - 1) * self.block)
        self._pieces.discard(self._kept_from)
        first = start + -start % self._stride
        if first < stop:
            self._pieces.append(queries[:, first - start :: self._stride], arange(first, stop, self._stride))

    def of_block(self, number: int) -> QuerySamples | None:
        """Queries of a complete block; None if some of them are not known."""
        start, stop = number * self.block, (number + 1) * self.block
        samples = self._pieces.joined()
        if samples is None or stop > self.length or start < max(self.unseen_stop, self._kept_from):
            return None
        own = (samples.positions >= start) & (samples.positions < stop)
        return QuerySamples(samples.queries[:, own], samples.positions[own])

    def take(self) -> QuerySamples | None:
        """Return all that are kept; None if there are none."""
        return self._pieces.joined()

    def checkpoint(self) -> None:
        """Keep what a roll-back to the present length needs."""
        self._marked = self.length

    def crop(self, length: int) -> None:
        """Remove the queries from position ``length`` on."""
        self.length, self.unseen_stop = min(self.length, length), min(self.unseen_stop, length)
        self._pieces.crop(length)
        if self._marked is not None and self._marked > length:
            self._marked = None

    def fork(self) -> BlockRecorder:
        copy = BlockRecorder(self.block, self.capacity)
        copy.length, copy.unseen_stop, copy._kept_from = self.length, self.unseen_stop, self._kept_from
        copy._marked, copy._pieces = self._marked, self._pieces.fork()
        return copy
