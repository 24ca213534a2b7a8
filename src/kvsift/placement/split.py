"""KV in host memory, of a model that runs on another device; only what is always visible is there as well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsift.placement.device import DeviceStore, RowReader
from kvsift.types import LayerShape

SLACK_TOKENS = 256  # that a window on the device may grow by before it is fetched again
ASYNC_TOKENS = 64  # fewer come in one copy, which the host waits for
STREAMED_TOKENS = 32768  # brought to the device at a time


@dataclass
class _Near:
    """Consecutive tokens of a row on the device: positions ``start`` to ``stop`` lie at the front of both buffers."""

    start: int
    stop: int
    keys: Tensor  # [num_kv_heads, capacity, head_dim]
    values: Tensor


class SplitStore(DeviceStore):
    """Keys, values and page summaries of one layer in host memory.

    A reader gives tensors on the host; ``near`` gives the tokens that every query sees on the device, which hold
    the window and some slack whatever the context's length, and ``streamed`` everything, a block at a time.

    Args:
        like: a tensor with the dtype of the keys, on the device of the model. The others are those of ``DeviceStore``.
    """

    def __init__(
        self, shape: LayerShape, num_rows: int, page_size: int, like: Tensor, summaries: Iterable[str] = (),
        reserve: int = 0,
    ) -> None:  # fmt: skip
        self.device = like.device
        on_host = torch.empty(0, dtype=like.dtype)
        super().__init__(shape, num_rows, page_size, on_host, summaries, reserve, pinned=like.is_cuda)
        self._arriving: torch.cuda.Stream | None = None  # copies on it are not known to be done
        self._near: dict[tuple[int, bool], _Near] = {}  # (row, whether it starts at position 0)

    def append(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Write new tokens of one row, [num_kv_heads, num_new, head_dim], given on the device."""
        start = self.lengths[row]
        super().append(row, keys, values)
        near = self._near.get((row, False))
        if near is None:
            return
        stop = start + keys.shape[1]
        if near.stop != start or stop - near.start > near.keys.shape[1]:
            del self._near[row, False]
            return
        for buffer, new in ((near.keys, keys), (near.values, values)):
            buffer[:, start - near.start : stop - near.start] = new
        near.stop = stop

    def _write(self, slots: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        num_new = keys.shape[1]
        if not keys.is_cuda or num_new < ASYNC_TOKENS or not isinstance(slots, slice):
            both = torch.stack([keys, values]).to("cpu") if keys.is_cuda else (keys, values)
            super()._write(slots, both[0], both[1])
            return
        for pool, new in ((self.keys, keys), (self.values, values)):
            # head by head: a copy between devices is asynchronous only if both sides are contiguous
            for into, rows in zip(pool.flatten(1, 2)[:, slots], new.contiguous()):
                into.copy_(rows, non_blocking=True)
        self._arriving = torch.cuda.current_stream(self.device)
        if self.summaries:
            self._settle()

    def _fit_pools(self, spare: bool = True) -> None:
        if self.table.num_pages > self.keys.shape[1]:  # what is there will be copied
            self._settle()
        super()._fit_pools(spare)

    def _settle(self) -> None:
        """Wait for what is on its way to the host."""
        if self._arriving is not None:
            self._arriving.synchronize()
            self._arriving = None

    def row(self, row: int) -> RowReader:
        """What one sequence holds, in logical order, on the host."""
        self._settle()
        return super().row(row)

    def near(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions start to stop on the device, [num_kv_heads, stop - start, head_dim]."""
        place = row, start == 0
        held = self._near.get(place)
        if held is None or start < held.start or stop > held.stop:
            reader, capacity = self.row(row), stop - start + (SLACK_TOKENS if start else 0)
            buffers = [
                torch.empty(len(self.keys), capacity, self.shape.head_dim, dtype=self.keys.dtype, device=self.device)
                for _ in range(2)
            ]
            for buffer, read in zip(buffers, (reader.keys, reader.values)):
                buffer[:, : stop - start] = read(start, stop)
            held = self._near[place] = _Near(start, stop, *buffers)
        tokens = slice(start - held.start, stop - held.start)
        return held.keys[:, tokens], held.values[:, tokens]

    def streamed(self, row: int, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of positions start to stop on the device, [num_kv_heads, block, head_dim] at a time.

        A block holds until the next but one is asked for; the next is on its way while one is attended.
        """
        reader, blocks = RowReader(self, row), range(start, stop, STREAMED_TOKENS)  # in the order of the streams
        if self.device.type == "cpu":
            for first in blocks:
                last = min(first + STREAMED_TOKENS, stop)
                yield reader.keys(first, last), reader.values(first, last)
            return
        width = min(stop - start, STREAMED_TOKENS)
        buffers = [
            torch.empty(2, len(self.keys), width, self.shape.head_dim, dtype=self.keys.dtype, device=self.device)
            for _ in range(2)
        ]
        copying, used = torch.cuda.Stream(self.device), [torch.cuda.Event(), torch.cuda.Event()]
        copying.wait_stream(torch.cuda.current_stream(self.device))
        for number, first in enumerate(blocks):
            buffer, count = buffers[number % 2], min(STREAMED_TOKENS, stop - first)
            with torch.cuda.stream(copying):
                copying.wait_event(used[number % 2])
                for into, read in zip(buffer, (reader.keys, reader.values)):
                    for head, rows in zip(into, read(first, first + count)):  # see ``_write``
                        head[:count].copy_(rows, non_blocking=True)
            torch.cuda.current_stream(self.device).wait_stream(copying)
            yield buffer[0, :, :count], buffer[1, :, :count]
            used[number % 2].record(torch.cuda.current_stream(self.device))

    def _empty_like(self, page_size: int, summaries: Iterable[str]) -> SplitStore:
        like = self.keys.new_empty(0, device=self.device)
        return SplitStore(self.shape, self.num_rows, page_size, like, summaries, self.reserve)

    def crop(self, row: int, length: int) -> None:
        """Forget the tokens of a row from position ``length`` on."""
        self._settle()  # its last page may be copied
        super().crop(row, length)
        self._near = {place: near for place, near in self._near.items() if place[0] != row or near.stop <= length}

    def fork(self, sources: Sequence[int]) -> None:
        """Row i becomes a copy of row ``sources[i]``."""
        self._settle()
        super().fork(sources)
        self._near.clear()

    def clear(self) -> None:
        """Forget all tokens; the pools stay."""
        super().clear()
        self._near.clear()

    @property
    def num_device_bytes(self) -> int:
        """Bytes on the device."""
        held = [tensor for near in self._near.values() for tensor in (near.keys, near.values)]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)
