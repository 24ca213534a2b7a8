"""A sample of the queries of a prompt, taken during prefill: evenly spread ones, and the newest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvsift.indexes.samples import QuerySamples

NEWEST = 256  # queries that are kept besides the evenly spread ones
_SMALL = 64  # blocks of fewer tokens are joined with the next one


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
        self._spread = _QueryBlocks()
        self._newest = _QueryBlocks()

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
        blocks = [*self._spread.blocks, *self._newest.blocks]
        return sum(block.queries.numel() * block.queries.element_size() for block in blocks)


class _QueryBlocks:
    """Queries in blocks, ordered by position; a block is replaced, never written to."""

    def __init__(self, blocks: list[QuerySamples] | None = None) -> None:
        self.blocks = blocks or []

    def append(self, queries: Tensor, positions: Tensor) -> None:
        # a copy, as a view would keep the whole chunk in memory; on the host, where indexes are
        block = QuerySamples(queries.to("cpu", copy=True), positions)
        if self.blocks and len(self.blocks[-1].positions) < _SMALL:
            block = _joined([self.blocks.pop(), block])
        self.blocks.append(block)

    def thin(self, stride: int) -> None:
        self._filter(lambda positions: positions % stride == 0)

    def crop(self, length: int) -> None:
        self._filter(lambda positions: positions < length)

    def discard(self, before: int) -> None:
        """Discard the blocks whose queries all precede a position."""
        while self.blocks and int(self.blocks[0].positions[-1]) < before:
            self.blocks.pop(0)

    def joined(self) -> QuerySamples | None:
        return _joined(self.blocks) if self.blocks else None

    def fork(self) -> _QueryBlocks:
        return _QueryBlocks(list(self.blocks))

    def _filter(self, keeps: Callable[[Tensor], Tensor]) -> None:
        blocks = []
        for block in self.blocks:
            keep = keeps(block.positions)
            if bool(keep.all()):
                blocks.append(block)
            elif bool(keep.any()):
                blocks.append(QuerySamples(block.queries[:, keep], block.positions[keep]))
        self.blocks = blocks


def _joined(blocks: list[QuerySamples]) -> QuerySamples:
    queries, positions = zip(*blocks)
    return QuerySamples(torch.cat(queries, 1), torch.cat(positions))
