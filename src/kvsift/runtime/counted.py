"""What a method reads to choose, with its bytes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvsift.placement.device import RowReader
from kvsift.runtime.relay import Relay


class CountedReader:
    """What a method may read, with the bytes it did read to choose.

    Args:
        reader: of the row.
        relay: between the layers.
        place: (row, layer, key) of these queries in the relay.
    """

    def __init__(self, reader: RowReader, relay: Relay, place: tuple[int, int, Any]) -> None:
        self._reader, self._relay, self._place = reader, relay, place
        self.bytes_read = 0

    @property
    def length(self) -> int:
        return self._reader.length

    def keys(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[num_kv_heads, stop - start, head_dim]; everything by default."""
        return self.counted(self._reader.keys(start, stop))

    def values(self, start: int, stop: int) -> Tensor:
        """[num_kv_heads, stop - start, head_dim]"""
        return self.counted(self._reader.values(start, stop))

    def borrow(self, start: int, stop: int) -> Tensor:
        """Keys, to be read in part: ``count_bytes`` says how much of it was."""
        return self._reader.keys(start, stop)

    def count_bytes(self, num_bytes: int) -> None:
        """So many bytes were read to choose, of what was borrowed."""
        self.bytes_read += num_bytes

    def summary(self, kind: str, units: slice | Tensor) -> Tensor:
        """[num_heads, number of units, width]"""
        return self.counted(self._reader.summary(kind, units))

    def keys_of(self, pages: Tensor) -> Tensor:
        """[num_heads, count * page_size, head_dim]"""
        return self.counted(self._reader.keys_of(pages))

    def from_below(self) -> Tensor | None:
        """What the method passed up for these queries in the nearest layer below where it chose."""
        message: Tensor | None = self._relay.find(*self._place)
        return None if message is None else self.counted(message)

    def pass_up(self, message: Tensor) -> None:
        """Leave something for the layers above."""
        self._relay.leave(*self._place, message)

    def counted(self, remembered: Tensor) -> Tensor:
        """The tensor itself, read by the method."""
        self.bytes_read += remembered.numel() * remembered.element_size()
        return remembered
