"""The newest queries of a sequence, for methods that rank keys by them."""

from __future__ import annotations

import torch
from torch import Tensor

KEPT_BACK = 256  # tokens that can be rolled back while the queries before them stay available


class RecentQueries:
    """The newest ``wanted`` + 256 queries or more: ``wanted`` are available after a roll-back by up to 256 tokens.

    Args:
        wanted: newest queries that stay available.

    Attributes:
        length: tokens seen.
        first: position from which on all queries are available.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.length = self.first = 0
        self._buffer: Tensor | None = None  # [num_query_heads, capacity, head_dim], from ``first`` on

    @torch.inference_mode()  # the buffer outlives the caller's inference mode
    def observe(self, queries: Tensor | None, start: int, stop: int) -> None:
        """Receive the queries of new tokens, [num_query_heads, stop - start, head_dim]; None if they are unknown."""
        count, self.length = start - self.first, stop
        if queries is None:
            self.first, self._buffer = stop, None
            return
        if self._buffer is None or count + stop - start > self._buffer.shape[1]:
            count = self._grow(queries, count)
            self.first = max(stop - self.wanted - KEPT_BACK, start - count)
        new = queries[:, max(self.first - start, 0) :]
        self._buffer[:, count : count + new.shape[1]] = new  # type: ignore[index]

    def _grow(self, like: Tensor, count: int) -> int:
        """Make a buffer that begins with the newest of ``count`` queries, and return how many those are."""
        least = self.wanted + KEPT_BACK
        old = min(count, max(least - like.shape[1], 0)) if self._buffer is not None else 0
        buffer = like.new_empty(like.shape[0], 2 * least, like.shape[2])
        if self._buffer is not None:
            buffer[:, :old] = self._buffer[:, count - old : count]
        self._buffer = buffer
        return old

    def read(self, start: int, stop: int) -> Tensor | None:
        """Queries at positions start to stop, [num_query_heads, stop - start, head_dim]; None if one is unknown."""
        if self._buffer is None or start < self.first or stop > self.length:
            return None
        return self._buffer[:, start - self.first : stop - self.first]

    def fork(self) -> RecentQueries:
        copy = RecentQueries(self.wanted)
        copy.length, copy.first = self.length, self.first
        copy._buffer = None if self._buffer is None else self._buffer.clone()  # both append to it
        return copy

    def crop(self, length: int) -> None:
        """Forget the queries from position ``length`` on."""
        self.length = min(self.length, length)
        if self.length < self.first:
            self.first, self._buffer = self.length, None
