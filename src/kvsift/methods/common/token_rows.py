"""A row per token of a sequence, computed from its key when it is read: codes, signatures.

Parameters of the rows (a centre, centroids) come from the first tokens of the sequence itself; ``settled`` returns from
how many. The number depends on the length alone, so chunks, forks and roll-backs do not change it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvsift.types import KVReader

AT_ONCE = 512  # tokens whose rows are computed together, which bounds temporary memory


def settled(count: int) -> int:
    """The largest number up to ``count`` with three leading binary digits of its own: 4, 5, 6, 7, 8, 10, 12, 14, 16 ...

    Four fifths of ``count`` or more; it changes when a context has grown by a seventh to a quarter.
    """
    spare = max(count.bit_length() - 3, 0)
    return count >> spare << spare


class TokenRows:
    """Rows of the first tokens of a sequence, in a buffer that grows geometrically."""

    def __init__(self) -> None:
        self.length = 0
        self._buffer: Tensor | None = None  # [num_kv_heads, capacity, width]

    @torch.inference_mode()  # the buffer outlives the caller's inference mode
    def read(self, reader: KVReader, start: int, stop: int, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows of the tokens start to stop, [num_kv_heads, stop - start, width], a view.

        ``make`` computes rows [num_kv_heads, n, width] from keys [num_kv_heads, n, head_dim], each from its key alone.
        """
        while self.length < stop:
            upto = min(self.length + AT_ONCE, stop)
            self._append(make(reader.keys(self.length, upto)), stop)
        assert self._buffer is not None
        return reader.counted(self._buffer[:, start:stop])

    def _append(self, rows: Tensor, least: int) -> None:
        stop = self.length + rows.shape[1]
        if self._buffer is None or self._buffer.shape[1] < stop:
            buffer = rows.new_empty(rows.shape[0], max(least, 2 * self.length), rows.shape[2])
            if self._buffer is not None:
                buffer[:, : self.length] = self._buffer[:, : self.length]
            self._buffer = buffer
        self._buffer[:, self.length : stop] = rows
        self.length = stop

    def fork(self) -> TokenRows:
        copy = TokenRows()
        if self._buffer is not None:
            copy.length, copy._buffer = self.length, self._buffer[:, : self.length].clone()  # both append to it
        return copy

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)
