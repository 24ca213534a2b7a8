"""A ``KVReader`` that counts the bytes read during selection."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from kvsift.layer.layer_messages import LayerMessages
from kvsift.native.shapes import HeadRows, pool_of
from kvsift.stores.reader import RowReader


class CountingReader:
    """What a method may read, with the bytes that it read to select.

    Args:
        reader: of the row.
        messages: between the layers.
        address: (row, layer, key) of these queries' messages.
    """

    def __init__(self, reader: RowReader, messages: LayerMessages, address: tuple[int, int, Any]) -> None:
        self._reader, self._messages, self._address = reader, messages, address
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

    def in_place(self, stop: int) -> tuple[HeadRows, HeadRows]:
        """Keys and values of the first tokens, where they are in host memory; ``count_bytes`` counts what is read."""
        return self._reader.keys_in_place(stop), self._reader.values_in_place(stop)

    def paged_keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """As ``keys``, where they are stored; with the page of each logical one."""
        keys, _, table = self._reader.paged()
        self.bytes_read += (stop - start) * len(keys) * keys.shape[3] * keys.element_size()
        return keys, table

    def borrow(self, start: int, stop: int) -> Tensor:
        """Keys that are read in part: ``count_bytes`` counts what was read."""
        return self._reader.keys(start, stop)

    def borrow_in_place(self, start: int, stop: int) -> HeadRows:
        """As ``borrow``, without a copy where the compiled core reads them."""
        return self._reader.borrow_in_place(start, stop)

    def count_bytes(self, num_bytes: int) -> None:
        """Count bytes of borrowed keys that were read to select."""
        self.bytes_read += num_bytes

    def summary(self, kind: str, units: slice | Tensor) -> Tensor:
        """[num_heads, number of units, width]"""
        return self.counted(self._reader.summary(kind, units))

    def summary_in_place(self, kind: str, units: slice) -> HeadRows:
        """As ``summary``, without a copy where the compiled core reads it."""
        rows = self._reader.summary_in_place(kind, units)
        self.bytes_read += prod(rows.shape) * pool_of(rows).element_size()
        return rows

    def keys_of(self, pages: Tensor) -> Tensor:
        """[num_heads, count * page_size, head_dim]"""
        return self.counted(self._reader.keys_of(pages))

    def from_below(self) -> Tensor | None:
        """The method's message for these queries from the nearest layer below where it selected."""
        return self._received(*self._address)

    def from_layer(self, layer: int) -> Tensor | None:
        """The message that the method kept for these queries in a layer below."""
        row, own, key = self._address
        return self._received(row, own, (key, layer))

    def pass_up(self, message: Tensor, keep: bool = False) -> None:
        """Send a message to the layers above; a kept one is addressed by its layer (``from_layer``)."""
        row, own, key = self._address
        self._messages.put(row, own, (key, own) if keep else key, message)

    def _received(self, row: int, layer: int, key: Any) -> Tensor | None:
        message: Tensor | None = self._messages.get(row, layer, key)
        return None if message is None else self.counted(message)

    def counted(self, remembered: Tensor) -> Tensor:
        """Count a tensor of the method's own memory as read, and return it."""
        self.bytes_read += remembered.numel() * remembered.element_size()
        return remembered
