"""Running sums of the attention that tokens received, for H2O."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from kvsift.methods.common.dropping import DroppingState

BLOCK = 64  # queries whose weights are summed together, cut at its multiples
SNAPSHOT = 256  # tokens from one remembered sum to the next; a multiple of the block


class Sums(NamedTuple):
    """Scores by the queries before ``position``, ``counted`` of them."""

    position: int
    counted: int
    scores: Tensor | None  # float32 [num_kv_heads, capacity], 0 from ``position`` on

    def copied(self) -> Sums:
        """A copy in memory of its own."""
        return self if self.scores is None else self._replace(scores=self.scores[:, : self.position].clone())


NOTHING = Sums(0, 0, None)


class HeavyState(DroppingState):
    """The state of a dropping method, and the running sums.

    The sums at two earlier positions are kept unchanged: after a roll-back, summing starts again from there.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows, wanted=2 * SNAPSHOT + BLOCK)
        self.sums = NOTHING
        self.earlier = (NOTHING, NOTHING)
        self._new: tuple[tuple[int, Tensor], ...] = ()  # (position of the first, queries) of the present chunk

    def observe(self, queries: Tensor | None, start: int, stop: int) -> None:
        """Receive the queries of new tokens; queries that are not counted yet are kept until they are."""
        before = self.queries.read(self.sums.position, start) if self.sums.position < start else None
        self._new = () if before is None else ((self.sums.position, before.clone()),)
        self._new += () if queries is None else ((start, queries),)
        super().observe(queries, start, stop)

    def read(self, start: int, stop: int) -> Tensor | None:
        """Queries at positions start to stop, [num_query_heads, stop - start, head_dim]; None if one is unknown."""
        parts = [
            part[:, max(start - first, 0) : stop - first]
            for first, part in self._new
            if first < stop and start < first + part.shape[1]
        ]
        if sum(part.shape[1] for part in parts) == stop - start:
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return self.queries.read(start, stop)

    def end_chunk(self) -> None:
        """Discard the queries of a counted chunk; those of an incomplete block are among the newest queries."""
        self._new = ()

    def update(self, sums: Sums) -> None:
        """Set the running sums, and keep a copy of them at every snapshot."""
        self.sums = sums
        if sums.position % SNAPSHOT == 0:
            self.earlier = (self.earlier[1], sums.copied())

    def can_crop(self, length: int) -> bool:
        return self.earlier[0].position <= length and self.queries.first <= self.earlier[0].position

    def fork(self) -> Self:
        other = super().fork()
        other.sums = self.sums.copied()
        return other

    def crop(self, length: int) -> None:
        super().crop(length)
        self._new = ()
        if self.sums.position > length:
            valid = [sums for sums in self.earlier if sums.position <= length] or [NOTHING]
            self.sums, self.earlier = valid[-1].copied(), (valid[0], valid[-1])
