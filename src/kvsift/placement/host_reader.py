"""A row whose keys and values lie in host memory, the values in 8 bits perhaps."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.placement.device import DeviceStore, RowReader
from kvsift.placement.packed_values import unpack_values


class HostReader(RowReader):
    """As ``RowReader``; packed values come unpacked, those that were asked for alone."""

    def __init__(self, store: DeviceStore, row: int) -> None:
        super().__init__(store, row)
        self.packed = store.values.dtype == torch.int8

    @property
    def is_view(self) -> bool:
        """Whether reading copies nothing."""
        return not self.packed and super().is_view

    def values(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[num_kv_heads, stop - start, head_dim]; everything by default."""
        return self.unpacked(self.stored_values(start, stop))

    def stored_values(self, start: int = 0, stop: int | None = None) -> Tensor:
        """As ``values``, as they are stored."""
        return super().values(start, stop)

    def gather(self, granules: Tensor, granule_size: int) -> tuple[Tensor, Tensor]:
        """As ``RowReader.gather``."""
        keys, values = super().gather(granules, granule_size)
        return keys, self.unpacked(values)

    def unpacked(self, values: Tensor) -> Tensor:
        """Values as they were given."""
        return unpack_values(values, self._store.keys.dtype) if self.packed else values
