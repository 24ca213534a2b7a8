"""A sample of the queries of a prompt, taken during prefill: evenly spread ones, and the newest."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.indexes.query_pieces import QueryPieces
from kvsift.indexes.samples import QuerySamples

NEWEST = 256  # queries that are kept besides the evenly spread ones


class QueryRecorder:
    """At most ``capacity`` queries of a prompt: evenly spread ones, and the newest.

    The sample has the positions that are multiples of a stride, the smallest power of two for which they fit, and the
    newest 256 (half of a capacity below 512). It depends on the length alone, not on the chunks, and has the same
    density everywhere. A roll-back leaves the stride, and those of the newest queries that were not discarded.

    Tensors of the sample are never written to, so a fork shares them.

    Args:
        capacity: queries per head, at least 2.

    Attributes:
        length: tokens received.
        unseen_stop: tokens without queries all precede this position; 0 if there are none.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = self.unseen_stop = 0
        self._stride = 1
        self._spread = QueryPieces()
        self._newest = QueryPieces()

    @property
    def num_newest(self) -> int:
        """Number of newest queries in the sample."""
        return min(NEWEST, self.capacity // 2)

    def observe(self, queries: Tensor | None, start: int, stop: int) -> None:
        """Receive the queries [num_query_heads, stop - start, head_dim] of new tokens; None if they are unknown."""
        self.length = stop
        if queries is None:
            self.unseen_stop = stop
            return
        if start == stop:
            return
        while -(-stop // self._stride) > self.capacity - self.num_newest:
            self._stride *= 2
            self._spread.thin(self._stride)
        first = start + -start % self._stride
        if first < stop:
            self._spread.append(queries[:, first - start :: self._stride], torch.arange(first, stop, self._stride))
        oldest = max(start, stop - 2 * self.num_newest)  # twice as many, to have enough after a small roll-back
        self._newest.append(queries[:, oldest - start :], torch.arange(oldest, stop))
        self._newest.discard(stop - 2 * self.num_newest)

    def take(self) -> QuerySamples | None:
        """Return the sample; None if it is empty."""
        spread, newest = self._spread.joined(), self._newest.joined()
        if spread is None or newest is None:
            return spread or newest
        first_new = max(self.length - self.num_newest, int(newest.positions[0]))
        old, new = spread.positions < first_new, newest.positions >= first_new
        queries = torch.cat([spread.queries[:, old], newest.queries[:, new]], 1)
        return QuerySamples(queries, torch.cat([spread.positions[old], newest.positions[new]]))

    def crop(self, length: int) -> None:
        """Remove the queries from position ``length`` on."""
        self.length, self.unseen_stop = min(self.length, length), min(self.unseen_stop, length)
        self._spread.crop(length)
        self._newest.crop(length)

    def fork(self) -> QueryRecorder:
        copy = QueryRecorder(self.capacity)
        copy.length, copy.unseen_stop, copy._stride = self.length, self.unseen_stop, self._stride
        copy._spread, copy._newest = self._spread.fork(), self._newest.fork()
        return copy

    @property
    def num_bytes(self) -> int:
        """Bytes of the sample."""
        pieces = [*self._spread.pieces, *self._newest.pieces]
        return sum(piece.queries.numel() * piece.queries.element_size() for piece in pieces)
