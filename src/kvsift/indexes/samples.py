"""Sampled queries of a prompt, from which indexes are built, and their recorders: of a whole prompt, or by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_SMALL = 64  # pieces of fewer tokens are joined with the next one
NEWEST = 256  # queries that are kept besides the evenly spread ones


class QuerySamples(NamedTuple):
    """Sampled queries of a prompt in one layer."""

    queries: Tensor  # [num_query_heads, t, d], after RoPE
    positions: Tensor  # int64 [t], ascending


class QueryPieces:
    """Queries in pieces, ordered by position. Pieces are replaced and never written to, so that forks share them."""

    def __init__(self, pieces: list[QuerySamples] | None = None) -> None:
        self.pieces = pieces or []

    def append(self, queries: Tensor, positions: Tensor) -> None:
        # a copy, as a view would keep the whole chunk in memory; on the host, where indexes are
        piece = QuerySamples(queries.to("cpu", copy=True), positions)
        if self.pieces and len(self.pieces[-1].positions) < _SMALL:
            piece = _joined([self.pieces.pop(), piece])
        self.pieces.append(piece)

    def thin(self, stride: int) -> None:
        self._filter(lambda positions: positions % stride == 0)

    def crop(self, length: int) -> None:
        self._filter(lambda positions: positions < length)

    def discard(self, before: int) -> None:
        """Discard the pieces whose queries all precede a position."""
        while self.pieces and int(self.pieces[0].positions[-1]) < before:
            self.pieces.pop(0)

    def joined(self) -> QuerySamples | None:
        return _joined(self.pieces) if self.pieces else None

    def fork(self) -> QueryPieces:
        return QueryPieces(list(self.pieces))

    def _filter(self, keeps: Callable[[Tensor], Tensor]) -> None:
        pieces = []
        for piece in self.pieces:
            keep = keeps(piece.positions)
            if bool(keep.all()):
                pieces.append(piece)
            elif bool(keep.any()):
                pieces.append(QuerySamples(piece.queries[:, keep], piece.positions[keep]))
        self.pieces = pieces


def _joined(pieces: list[QuerySamples]) -> QuerySamples:
    queries, positions = zip(*pieces)
    return QuerySamples(torch.cat(queries, 1), torch.cat(positions))


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
            self._pieces.append(queries[:, first - start :: self._stride], torch.arange(first, stop, self._stride))

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
