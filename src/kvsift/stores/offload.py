"""KV in host memory that the device attends.

Captured steps read the selection over the bus where it is stored, and write new tokens there. On the composed path it
is copied to the device and stays in a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsift.errors import InvalidValue, NotEnoughMemory
from kvsift.stores.base import Attended, Pools, Segment, Select, Transfers, View
from kvsift.stores.device_cache import DeviceCache
from kvsift.stores.page_table import PageTable
from kvsift.stores.paged import PagedStore
from kvsift.stores.parts import attend_sparse
from kvsift.stores.reader import RowReader
from kvsift.stores.split import STREAMED_TOKENS, HostValues, SplitStore
from kvsift.stores.transfers import FEW_TOKENS, mapped
from kvsift.types import LayerShape, Part, Selection

DEVICE_CACHE = 8192  # tokens of a layer


class OffloadStore(SplitStore):
    """Keys and values of one layer in host memory, page summaries on the device.

    ``reader`` reads on the host, ``device_reader`` on the device, with a cache of what was gathered lately.

    Args:
        device_cache: tokens of the layer that are cached on the device, sinks and window aside. The other arguments
            are those of ``SplitStore``.
    """

    captures = True
    not_captured = (
        (lambda case: case.plan.decode is None or case.plan.decode.method.traits.unbounded,
         "its keys and values are in host memory, and a dense step reads all of them"),
        (lambda case: (values := case.place.knob("host_values")) != "model" and values,
         "the kernels read values as the model computes them, not host_values={found}"),
    )  # fmt: skip

    def __init__(
        self, shape: LayerShape, num_rows: int, page_size: int, like: Tensor, summaries: Iterable[str] = (),
        reserve: int = 0, table: PageTable | None = None, *, host_values: HostValues = "model",
        device_cache: int = DEVICE_CACHE,
    ) -> None:  # fmt: skip
        self.cache = DeviceCache(device_cache, like.device)
        summaries = tuple(summaries)
        self.side_by_side = bool(summaries) and host_values == "model"  # else the host selects by keys
        super().__init__(shape, num_rows, page_size, like, summaries, reserve, table, host_values=host_values)

    @classmethod
    def check_knobs(cls, *, device_cache: object = DEVICE_CACHE, **knobs: Any) -> None:
        super().check_knobs(**knobs)
        if isinstance(device_cache, bool) or not isinstance(device_cache, int) or device_cache < 1:
            raise InvalidValue(
                f"device_cache={device_cache!r} must be a number of tokens, 1 or more; {DEVICE_CACHE} is usual."
            )

    @classmethod
    def device_tokens(
        cls, num_tokens: int, summary_share: float, *, device_cache: int = DEVICE_CACHE, **knobs: Any
    ) -> int:
        return int(summary_share * num_tokens) + device_cache

    def pools(self) -> Pools:
        """As ``Store.pools``: on a GPU, tensors of it over host memory, in which all copies are complete."""
        self._settle()
        keys, values, summaries = super().pools()
        if self.is_remote:
            keys, values = self.pool.parts([mapped(pool, self.device) for pool in self.pool.stored])
        return Pools(keys, values, summaries)

    def reserve_rows(self, lengths: Sequence[int]) -> None:
        super().reserve_rows(lengths)
        if self.is_remote and not (self.pool.keys.is_pinned() and self.pool.values.is_pinned()):
            raise NotEnoughMemory(
                f"the system does not lock {self.pool.num_bytes / (1 << 30):.1f} GiB of host memory for the keys and "
                f"values of layer {self.shape.layer}, which the GPU reads there. Free some, shorten the context, or "
                "give path='composed'."
            )

    @torch.inference_mode()
    def advance(self, row: int, length: int, stale_from: int | None = None) -> None:
        if self.is_remote:  # the host is about to read what the steps write
            torch.cuda.current_stream(self.device).synchronize()
        start = self.lengths[row]
        super().advance(row, length, stale_from)
        self._fresh = None
        self._settle()
        self.summarise_open_page(row)
        self._forget(self._reader(row).slots(start, length))

    @torch.inference_mode()
    def append(self, row: int, keys: Tensor, values: Tensor) -> None:
        start = self.lengths[row]
        super().append(row, keys, values)
        many = keys.shape[1] >= FEW_TOKENS
        if many and self._summarises_on_device and self._stale[row] * self.page_size == start:  # all of it is there now
            PagedStore._summarise(self, row, self._stale.pop(row), self.kinds)

    @property
    def _summarises_on_device(self) -> bool:
        return self.is_remote and self.host_values == "model" and STREAMED_TOKENS % self.page_size == 0

    def _pages(self, row: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        if not self._summarises_on_device:
            return super()._pages(row, first, stop)
        start, end = first * self.page_size, stop * self.page_size
        ((keys, values),) = self.streamed(row, start, min(end, self.lengths[row]))
        missing = (0, 0, 0, end - start - keys.shape[1])
        shape = stop - first, self.page_size
        keys, values = (pad(tensor, missing).unflatten(1, shape) for tensor in (keys, values))
        return keys, values

    def attend_all(self, row: int, segment: Segment) -> Part:
        return self._attend_streamed(row, segment)

    def attend(self, row: int, segment: Segment, view: View, select: Select) -> Attended:
        """As ``Store.attend``, for one query, on the device.

        A method that ranks summaries selects on the device, where they are; one that reads keys selects on the host,
        where they are: copying all keys for each token would cost more than attending them.
        """
        if view.from_summaries:
            selection = select(segment, self.device_reader(row))
        else:
            selection = select(segment._replace(queries=segment.queries.cpu()), self.reader(row))
        sinks_stop, window_start = view.spans[0]
        for span in ((0, sinks_stop), (min(window_start, segment.stop), segment.stop)):
            if span[0] < span[1]:
                self.near(row, *span)
        on_device = None if selection is None else self._selection_on_device(selection)
        view = view._replace(spans=view.spans[:1])
        part, visible = attend_sparse(self.shape, segment, self.device_reader(row), view, on_device)
        on_host = None if selection is None else replace(selection, units=selection.units.cpu())
        return Attended(part, on_host, visible)

    def _selection_on_device(self, selection: Selection) -> Selection:
        weight = None if selection.log_weight is None else selection.log_weight.to(self.device)
        return replace(selection, units=selection.units.to(self.device), log_weight=weight)

    def device_reader(self, row: int) -> OffloadReader:
        """A reader of a sequence on the device."""
        self._settle()
        return OffloadReader(self, row)

    def resident(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """As ``near``, if it is on the device already."""
        return self._resident.read(row, start, stop)

    def copied(self, rows: Tensor) -> Tensor:
        """Copy rows to the device, counted."""
        self._copied_bytes += rows.numel() * rows.element_size()
        return rows.to(self.device)

    def gather_cached(self, granules: Tensor, granule_size: int) -> list[Tensor]:
        """Keys and values of physical granules, [num_heads, count], through the cache."""
        pieces, num_bytes = self.cache.fetch((self.pool.keys, self.pool.values), granules, granule_size)
        self._copied_bytes += num_bytes
        return pieces

    def _write(self, slots: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        super()._write(slots, keys, values)
        self._forget(slots)

    def _forget(self, slots: slice | Tensor) -> None:
        """Drop pieces of the cache that are rewritten."""
        self.cache.forget(torch.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots)

    def _use(self, table: PageTable) -> None:
        super()._use(table)
        self.cache = DeviceCache(self.cache.tokens, self.device)  # names pieces by their place in the pool

    def _own_partial_page(self, row: int) -> None:
        super()._own_partial_page(row)
        for run in self.table.runs(row)[-1:]:
            self.cache.forget(torch.arange((run.stop - 1) * self.page_size, run.stop * self.page_size))

    def _maintain(self) -> None:
        self.pool.maintain(self, self.kinds, self.device)

    def take_transfers(self) -> Transfers:
        return Transfers(super().take_transfers().num_bytes, *self.cache.take_counts())

    @property
    def num_device_bytes(self) -> int:
        summaries = sum(pool.numel() * pool.element_size() for pool in self.summaries.values())
        return super().num_device_bytes + summaries + self.cache.num_bytes


class OffloadReader(RowReader):
    """A sequence on the device: summaries, sinks and window are there, the rest is copied when it is read."""

    def __init__(self, store: OffloadStore, row: int) -> None:
        super().__init__(store.pool, store.table, row, store.lengths[row], store.summarise_open_page)
        self._store = store

    @property
    def in_place(self) -> bool:
        """Never: reading may copy."""
        return False

    def keys(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[num_kv_heads, stop - start, head_dim]; everything by default."""
        resident = self._resident(start, stop)
        return self._store.copied(super().keys(start, stop)) if resident is None else resident[0]

    def values(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[num_kv_heads, stop - start, head_dim]; everything by default."""
        resident = self._resident(start, stop)
        if resident is not None:
            return resident[1]
        return self._pool.values_of(self._store.copied(self.stored_values(start, stop)))

    def keys_of(self, pages: Tensor) -> Tensor:
        """[num_heads, count * page_size, head_dim], not cached: they are read to select."""
        return self._store.copied(super().keys_of(pages.cpu()))

    def gather(self, granules: Tensor, granule_size: int) -> tuple[Tensor, Tensor]:
        """As ``RowReader.gather``, through the cache."""
        physical = self.physical(granules.cpu().clamp_min(0), self.page_size // granule_size)
        keys, values = self._store.gather_cached(physical, granule_size)
        return keys, self._pool.values_of(values)

    def _resident(self, start: int, stop: int | None) -> tuple[Tensor, Tensor] | None:
        return self._store.resident(self._row, start, self.length if stop is None else stop)
