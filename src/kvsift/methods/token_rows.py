"""A row per token of a sequence, worked out from its keys when asked for: codes, signatures.

What rows are made with (a centre, centroids) is taken from the sequence itself, from its first tokens: ``settled`` says
from how many. That depends on how many there are and on nothing else, so that no chunk, fork or roll-back changes it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvsift.types import KVReader

AT_ONCE = 512  # tokens whose rows are made together, bounding what is needed besides


def settled(count: int) -> int:
    """The largest number up to ``count`` with three leading binary digits of its own: 4, 5, 6, 7, 8, 10, 12, 14, 16 ...

    Four fifths of ``count`` or more; it changes when a context has grown by a seventh to a quarter.
    """
    spare = max(count.bit_length() - 3, 0)
    return count >> spare << spare


class TokenRows:
    """Rows of the first tokens of a sequence, in room that grows geometrically."""

    def __init__(self) -> None:
        self.length = 0
        self._room: Tensor | None = None  # [num_kv_heads, capacity, width]

    @torch.inference_mode()  # the room outlives the block it was made in
    def read(self, reader: KVReader, start: int, stop: int, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows of the tokens start to stop, [num_kv_heads, stop - start, width], a view.

        ``make`` turns keys [num_kv_heads, n, head_dim] into rows [num_kv_heads, n, width], each key by itself.
        """
        while self.length < stop:
            upto = min(self.length + AT_ONCE, stop)
            self._append(make(reader.keys(self.length, upto)), stop)
        assert self._room is not None
        return reader.counted(self._room[:, start:stop])

    def _append(self, rows: Tensor, wanted: int) -> None:
        stop = self.length + rows.shape[1]
        if self._room is None or self._room.shape[1] < stop:
            room = rows.new_empty(rows.shape[0], max(wanted, 2 * self.length), rows.shape[2])
            if self._room is not None:
                room[:, : self.length] = self._room[:, : self.length]
            self._room = room
        self._room[:, self.length : stop] = rows
        self.length = stop

    def fork(self) -> TokenRows:
        copy = TokenRows()
        if self._room is not None:
            copy.length, copy._room = self.length, self._room[:, : self.length].clone()  # both will write on
        return copy

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)
