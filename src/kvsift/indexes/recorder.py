"""Queries of a prompt, kept while it is read: evenly spread ones, and the newest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvsift.indexes.samples import QuerySamples

NEWEST = 256  # queries that are kept whatever the stride
_SMALL = 64  # blocks of fewer tokens are joined with what comes next


class QueryRecorder:
    """Keeps at most ``capacity`` of the queries that pass by, evenly spread, and the newest ones.

    Kept are the positions that are multiples of a stride, the smallest power of two for which they fit, and the newest
    256 (of a capacity below 512: half of it). Which ones depends on the length alone, not on the chunks: no part of
    the sequence is sampled more thinly than another. After a roll-back the stride stays, and of the newest ones
    those are left that had not been let go of.

    Tensors in it are never written to, so that a fork shares them.

    Args:
        capacity: queries per head, at least 2.

    Attributes:
        length: tokens seen.
        unseen_stop: below it there are tokens that came without their queries; 0 if there are none.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = self.unseen_stop = 0
        self._stride = 1
        self._spread = _Run()
        self._newest = _Run()

    @property
    def num_newest(self) -> int:
        """How many of the newest queries are kept in any case."""
        return min(NEWEST, self.capacity // 2)

    def observe(self, queries: Tensor | None, start: int, stop: int) -> None:
        """See the queries [num_query_heads, stop - start, head_dim] of new tokens, or that they are not known."""
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
        kept = max(start, stop - 2 * self.num_newest)  # twice as many, so that a small roll-back finds enough
        self._newest.append(queries[:, kept - start :], torch.arange(kept, stop))
        self._newest.forget(stop - 2 * self.num_newest)

    def take(self) -> QuerySamples | None:
        """What is kept; None if that is nothing."""
        spread, newest = self._spread.joined(), self._newest.joined()
        if spread is None or newest is None:
            return spread or newest
        first_new = max(self.length - self.num_newest, int(newest.positions[0]))
        old, new = spread.positions < first_new, newest.positions >= first_new
        queries = torch.cat([spread.queries[:, old], newest.queries[:, new]], 1)
        return QuerySamples(queries, torch.cat([spread.positions[old], newest.positions[new]]))

    def crop(self, length: int) -> None:
        """Forget the queries from position ``length`` on."""
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
        """Bytes of the queries that are kept."""
        blocks = [*self._spread.blocks, *self._newest.blocks]
        return sum(block.queries.numel() * block.queries.element_size() for block in blocks)


class _Run:
    """Queries in blocks, in the order of their positions; a block is replaced, never changed."""

    def __init__(self, blocks: list[QuerySamples] | None = None) -> None:
        self.blocks = blocks or []

    def append(self, queries: Tensor, positions: Tensor) -> None:
        # a copy, since a view would keep the whole chunk alive; on the host, where indexes are
        block = QuerySamples(queries.to("cpu", copy=True), positions)
        if self.blocks and len(self.blocks[-1].positions) < _SMALL:
            block = _joined([self.blocks.pop(), block])
        self.blocks.append(block)

    def thin(self, stride: int) -> None:
        self._filter(lambda positions: positions % stride == 0)

    def crop(self, length: int) -> None:
        self._filter(lambda positions: positions < length)

    def forget(self, before: int) -> None:
        """Let go of blocks that lie before a position as a whole."""
        while self.blocks and int(self.blocks[0].positions[-1]) < before:
            self.blocks.pop(0)

    def joined(self) -> QuerySamples | None:
        return _joined(self.blocks) if self.blocks else None

    def fork(self) -> _Run:
        return _Run(list(self.blocks))

    def _filter(self, keeps: Callable[[Tensor], Tensor]) -> None:
        kept = []
        for block in self.blocks:
            keep = keeps(block.positions)
            if bool(keep.all()):
                kept.append(block)
            elif bool(keep.any()):
                kept.append(QuerySamples(block.queries[:, keep], block.positions[keep]))
        self.blocks = kept


def _joined(blocks: list[QuerySamples]) -> QuerySamples:
    queries, positions = zip(*blocks)
    return QuerySamples(torch.cat(queries, 1), torch.cat(positions))
