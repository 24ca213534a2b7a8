"""KV in host memory that a device attends: what was chosen is brought to it, and stays there for a while."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from kvsift.placement.device_cache import DeviceCache
from kvsift.placement.host_reader import HostReader
from kvsift.placement.split import HostValues, SplitStore
from kvsift.types import LayerShape

DEVICE_CACHE = 8192  # tokens of a layer


class OffloadStore(SplitStore):
    """Keys and values of one layer in host memory, page summaries on the device.

    ``row`` reads on the host, ``device_row`` on the device, with a cache of what was gathered lately.

    Args:
        device_cache: tokens of the layer that are cached on the device, sinks and window aside. The others are those
            of ``SplitStore``.
    """

    attends_alone: ClassVar[bool] = False

    def __init__(
        self, shape: LayerShape, num_rows: int, page_size: int, like: Tensor, summaries: Iterable[str] = (),
        reserve: int = 0, host_values: HostValues = "model", device_cache: int = DEVICE_CACHE,
    ) -> None:  # fmt: skip
        self.cache = DeviceCache(device_cache, like.device)
        super().__init__(shape, num_rows, page_size, like, summaries, reserve, host_values)

    def device_row(self, row: int) -> OffloadReader:
        """What one sequence holds, in logical order, on the device."""
        self._settle()
        return OffloadReader(self, row)

    def near_if_there(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """As ``near``, without bringing anything."""
        return self._near.read(row, start, stop)

    def _write(self, slots: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        super()._write(slots, keys, values)
        self.cache.forget(torch.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots)

    def _own_partial_page(self, row: int) -> None:
        super()._own_partial_page(row)
        for page in self.table.rows[row][-1:]:
            self.cache.forget(torch.arange(page * self.page_size, (page + 1) * self.page_size))

    def _add_summary(self, kind: str) -> None:
        super()._add_summary(kind)
        self.summaries[kind] = self.summaries[kind].to(self.device)

    def _empty_like(self, page_size: int, summaries: Iterable[str]) -> OffloadStore:
        like = self.keys.new_empty(0, device=self.device)
        return OffloadStore(
            self.shape, self.num_rows, page_size, like, summaries, self.reserve, self.host_values, self.cache.tokens
        )

    @property
    def num_device_bytes(self) -> int:
        """Bytes on the device."""
        summaries = sum(pool.numel() * pool.element_size() for pool in self.summaries.values())
        return super().num_device_bytes + summaries + self.cache.num_bytes


class OffloadReader(HostReader):
    """A row on the device: summaries and what is always visible lie there, the rest is brought when it is asked for."""

    _store: OffloadStore

    @property
    def is_view(self) -> bool:
        """Never: reading may copy."""
        return False

    def keys(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[num_kv_heads, stop - start, head_dim]; everything by default."""
        near = self._near(start, stop)
        return self._brought(super().keys(start, stop)) if near is None else near[0]

    def values(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[num_kv_heads, stop - start, head_dim]; everything by default."""
        near = self._near(start, stop)
        return self.unpacked(self._brought(self.stored_values(start, stop))) if near is None else near[1]

    def keys_of(self, pages: Tensor) -> Tensor:
        """[num_heads, count * page_size, head_dim], not cached: they are read to choose."""
        return self._brought(super().keys_of(pages.cpu()))

    def gather(self, granules: Tensor, granule_size: int) -> tuple[Tensor, Tensor]:
        """As ``RowReader.gather``, through the cache."""
        store = self._store
        places = self._physical(granules.cpu().clamp_min(0), store.page_size // granule_size)
        (keys, values), copied = store.cache.fetch((store.keys, store.values), places, granule_size)
        store.copied_bytes += copied
        return keys, self.unpacked(values)

    def _near(self, start: int, stop: int | None) -> tuple[Tensor, Tensor] | None:
        return self._store.near_if_there(self._row, start, self.length if stop is None else stop)

    def _brought(self, rows: Tensor) -> Tensor:
        self._store.copied_bytes += rows.numel() * rows.element_size()
        return rows.to(self._store.device)
