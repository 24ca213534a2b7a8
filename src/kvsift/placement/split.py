"""KV in host memory, of a model that runs on another device; only what is always visible is there as well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvsift.placement.device import DeviceStore
from kvsift.placement.host_reader import HostReader
from kvsift.placement.near import Near
from kvsift.placement.packed_values import pack_values, packed_width
from kvsift.placement.to_host import ToHost
from kvsift.types import LayerShape

STREAMED_TOKENS = 32768  # brought to the device at a time

HostValues = Literal["model", "int8"]


class Fresh(NamedTuple):
    """The tokens that came last, where they were computed."""

    row: int
    start: int
    keys: Tensor
    values: Tensor


class SplitStore(DeviceStore):
    """Keys, values and page summaries of one layer in host memory.

    A reader gives tensors on the host; ``near`` gives the tokens that every query sees on the device, which hold
    the window and some slack whatever the context's length, and ``streamed`` everything, a block at a time.
    Summaries are worked out when they are first read, so that a prompt need not wait for them.

    Args:
        like: a tensor with the dtype of the keys, on the device of the model.
        host_values: "model" keeps values as they come, "int8" packs them (``packed_values``); what is on the device
            is as it came until it is fetched again. The other arguments are those of ``DeviceStore``.
    """

    attends_alone: ClassVar[bool] = True  # the host attends a single query to everything

    def __init__(
        self, shape: LayerShape, num_rows: int, page_size: int, like: Tensor, summaries: Iterable[str] = (),
        reserve: int = 0, host_values: HostValues = "model",
    ) -> None:  # fmt: skip
        self.device, self.host_values = like.device, host_values
        self.copied_bytes = 0  # of keys and values, from the host to the device
        self._to_host = ToHost()
        self._near = Near(like.device)
        self._fresh: Fresh | None = None
        self._stale: dict[int, int] = {}  # row -> first page whose summaries are not known
        on_host = torch.empty(0, dtype=like.dtype)
        super().__init__(shape, num_rows, page_size, on_host, summaries, reserve, pinned=like.is_cuda)

    @property
    def value_width(self) -> int:
        return packed_width(self.shape.head_dim) if self.host_values == "int8" else self.shape.head_dim

    @property
    def value_dtype(self) -> torch.dtype:
        return torch.int8 if self.host_values == "int8" else self.keys.dtype

    def append(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Write new tokens of one row, [num_kv_heads, num_new, head_dim], given on the device."""
        start = self.lengths[row]
        super().append(row, keys, values)
        self._fresh = Fresh(row, start, keys, values)
        self._near.append(row, start, keys, values)

    def forget_fresh(self) -> None:
        """The tokens that came last have been attended; their memory may go."""
        self._fresh = None

    def _write(self, slots: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        rows = (keys, pack_values(values) if self.host_values == "int8" else values)
        if keys.is_cuda:
            self._to_host.send([self.keys.flatten(1, 2), self.values.flatten(1, 2)], slots, rows)
        else:
            super()._write(slots, *rows)

    @torch.inference_mode()  # pools outlive the block they were made in
    def _arrive(self) -> None:
        """Wait for what is on its way to the host."""
        for slots, rows in self._to_host.settle():
            super()._write(slots, *rows)

    def _fit_pools(self, spare: bool = True) -> None:
        if self.table.num_pages > self.keys.shape[1]:  # what is there will be copied
            self._arrive()
        super()._fit_pools(spare)

    def _summarise(self, row: int, first_page: int, kinds: Iterable[str]) -> None:
        self._stale[row] = min(first_page, self._stale.get(row, first_page))

    @torch.inference_mode()
    def _settle(self) -> None:
        """Wait for what is on its way to the host, and summarise it."""
        self._arrive()
        stale, self._stale = self._stale, {}
        for row, first_page in stale.items():
            super()._summarise(row, first_page, self.summaries)

    def row(self, row: int) -> HostReader:
        """What one sequence holds, in logical order, on the host."""
        self._settle()
        return HostReader(self, row)

    def near(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions start to stop on the device, [num_kv_heads, stop - start, head_dim]: sinks if
        ``start`` is 0, else the window."""
        held = self._near.read(row, start, stop)
        if held is None:
            reader = self.row(row)
            held = self._near.fetch(row, start, stop, lambda *span: (reader.keys(*span), reader.values(*span)))
            self.copied_bytes += sum(each.numel() * each.element_size() for each in held)
        return held

    def streamed(self, row: int, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of positions start to stop on the device, [num_kv_heads, block, head_dim] at a time.

        A block holds until the next but one is asked for; the next is on its way while one is attended.
        """
        fresh = self._fresh
        if fresh is not None and fresh.row == row and fresh.start <= start:  # not yet there, or on its way
            yield tuple(each[:, start - fresh.start : stop - fresh.start] for each in (fresh.keys, fresh.values))  # type: ignore[misc]
            return
        if self._to_host.has_few:
            self._arrive()
        self.copied_bytes += (stop - start) * self.token_bytes
        reader, blocks = HostReader(self, row), range(start, stop, STREAMED_TOKENS)
        if self.device.type == "cpu":
            for first in blocks:
                last = min(first + STREAMED_TOKENS, stop)
                yield reader.keys(first, last), reader.values(first, last)
            return
        width = min(stop - start, STREAMED_TOKENS)
        buffers = [
            [pool.new_empty(len(pool), width, pool.shape[3], device=self.device) for pool in (self.keys, self.values)]
            for _ in range(2)
        ]
        copying, used = self._to_host.stream(self.device), [torch.cuda.Event(), torch.cuda.Event()]
        copying.wait_stream(torch.cuda.current_stream(self.device))
        for number, first in enumerate(blocks):
            buffer, count = buffers[number % 2], min(STREAMED_TOKENS, stop - first)
            with torch.cuda.stream(copying):
                copying.wait_event(used[number % 2])
                for into, read in zip(buffer, (reader.keys, reader.stored_values)):
                    for head, rows in zip(into, read(first, first + count)):  # as in ``ToHost``
                        head[:count].copy_(rows, non_blocking=True)
            torch.cuda.current_stream(self.device).wait_stream(copying)
            yield buffer[0][:, :count], reader.unpacked(buffer[1][:, :count])
            used[number % 2].record(torch.cuda.current_stream(self.device))

    def _empty_like(self, page_size: int, summaries: Iterable[str]) -> SplitStore:
        like = self.keys.new_empty(0, device=self.device)
        return SplitStore(self.shape, self.num_rows, page_size, like, summaries, self.reserve, self.host_values)

    def repage(self, page_size: int, summaries: Iterable[str]) -> None:
        """As ``DeviceStore.repage``."""
        super().repage(page_size, summaries)
        self.forget_fresh()

    def crop(self, row: int, length: int) -> None:
        """Forget the tokens of a row from position ``length`` on."""
        self._settle()  # its last page may be copied
        self.forget_fresh()
        super().crop(row, length)
        self._near.crop(row, length)

    def fork(self, sources: Sequence[int]) -> None:
        """Row i becomes a copy of row ``sources[i]``."""
        self._settle()
        self.forget_fresh()
        super().fork(sources)
        self._near.clear()

    def clear(self) -> None:
        """Forget all tokens; the pools stay."""
        self._settle()
        self.forget_fresh()
        super().clear()
        self._near.clear()

    def take_copied(self) -> int:
        """Bytes of keys and values brought to the device since this was last asked."""
        copied, self.copied_bytes = self.copied_bytes, 0
        return copied

    @property
    def num_device_bytes(self) -> int:
        """Bytes on the device."""
        return self._near.num_bytes
