"""A row per token of a sequence, computed from its key when it is read: codes, signatures, inverse norms.

Parameters of the rows (a centre, centroids) come from the first tokens of the sequence itself; ``settled`` returns from
how many. The number depends on the length alone, so chunks, forks and roll-backs do not change it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvsift.types import Candidates, KVReader

SMALLEST_NORM = 1e-6


def settled(count: int) -> int:
    """The largest number up to ``count`` with three leading binary digits of its own: 4, 5, 6, 7, 8, 10, 12, 14, 16 ...

    Four fifths of ``count`` or more; it changes when a context has grown by a seventh to a quarter.
    """
    spare = max(count.bit_length() - 3, 0)
    return count >> spare << spare


class TokenRows:
    """Rows of the first tokens of a sequence, in a buffer that grows geometrically."""

    at_once: ClassVar[int] = 512  # tokens whose rows are computed together, which bounds temporary memory
    axis: ClassVar[int] = 1  # of the tokens

    def __init__(self) -> None:
        self.length = 0
        self._buffer: Tensor | None = None  # [num_kv_heads, capacity, width]

    def read(self, reader: KVReader, start: int, stop: int, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows of the tokens start to stop, [num_kv_heads, stop - start, width], a view.

        ``make`` computes rows [num_kv_heads, n, width] from keys [num_kv_heads, n, head_dim], each from its key alone.
        """
        return reader.counted(self.filled(reader, stop, make)[:, start:stop])

    @torch.inference_mode()  # the buffer outlives the caller's inference mode
    def filled(self, reader: KVReader, stop: int, make: Callable[[Tensor], Tensor]) -> Tensor:
        """The buffer, with the rows of at least ``stop`` tokens."""
        while self.length < stop:
            upto = min(self.length + self.at_once, stop)
            self._append(make(reader.keys(self.length, upto)), stop)
        assert self._buffer is not None
        return self._buffer

    def _append(self, rows: Tensor, least: int) -> None:
        count = rows.shape[self.axis]
        if self._buffer is None or self._buffer.shape[self.axis] < self.length + count:
            sizes = list(rows.shape)
            sizes[self.axis] = max(least, 2 * self.length)
            buffer = rows.new_empty(sizes)
            if self._buffer is not None:
                buffer.narrow(self.axis, 0, self.length).copy_(self._buffer.narrow(self.axis, 0, self.length))
            self._buffer = buffer
        self._buffer.narrow(self.axis, self.length, count).copy_(rows)
        self.length += count

    def fork(self) -> Self:
        forked = type(self)()
        if self._buffer is not None:  # both append to it
            forked.length, forked._buffer = self.length, self._buffer.narrow(self.axis, 0, self.length).clone()
        return forked

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)


class SettledRows:
    """Rows of the candidates, with parameters from the first ``settled`` of them; a subclass defines ``settle`` and
    ``rows_of``."""

    def __init__(self) -> None:
        self._rows = TokenRows()
        self._span = (0, 0)  # tokens that the parameters come from

    def settle(self, keys: Tensor) -> None:
        """Compute the parameters from keys [num_kv_heads, n, head_dim]; they replace earlier ones."""
        raise NotImplementedError

    def rows_of(self, keys: Tensor) -> Tensor:
        """Rows [num_kv_heads, n, width] of keys [num_kv_heads, n, head_dim], each from its key alone."""
        raise NotImplementedError

    def read(self, reader: KVReader, candidates: Candidates) -> Tensor:
        """Rows of the candidates, [num_kv_heads, count, width]."""
        span = candidates.first, candidates.first + settled(candidates.count)
        if span != self._span:
            self.settle(reader.keys(*span))
            self._span, self._rows = span, TokenRows()
        return self._rows.read(reader, candidates.first, candidates.stop, self.rows_of)

    def fork(self) -> Self:
        forked = copy(self)
        forked._rows = self._rows.fork()
        return forked

    def crop(self, length: int) -> None:
        self._rows.crop(length)
        if length < self._span[1]:
            self._span = (0, 0)


class KeyNorms(TokenRows):
    """Inverse norms of the keys: a cosine is a product with the stored keys, times the inverse norm.

    Normalised keys would double the memory of the keys, or cost a pass over all of them per chunk.
    """

    at_once: ClassVar[int] = sys.maxsize  # a norm needs no temporary memory
    BYTES: ClassVar[int] = 4  # per token and KV head

    def norms(self, reader: KVReader, start: int, stop: int) -> Tensor:
        """Inverse norms of the keys at positions start to stop, float32 [num_kv_heads, stop - start], a view."""
        return self.read(reader, start, stop, lambda keys: inverse_norms(keys).unsqueeze(-1))[..., 0]


def inverse_norms(keys: Tensor) -> Tensor:
    """Return 1 / |k|, float32 [num_kv_heads, n], of keys [num_kv_heads, n, head_dim]."""
    norms = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32)
    return norms.clamp_min_(SMALLEST_NORM).reciprocal_()
