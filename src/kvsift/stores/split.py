"""KV in host memory, with attention on both sides: the host attends the selection, the device sinks and window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from kvsift.errors import unknown
from kvsift.kernels.attention import attention
from kvsift.kernels.merge import merge
from kvsift.native.coded_rows import coded_width
from kvsift.stores.background import submit
from kvsift.stores.base import Attended, Segment, Select, Transfers, View
from kvsift.stores.kv_pool import LayerPool
from kvsift.stores.page_pool import PagePool
from kvsift.stores.page_table import PageTable
from kvsift.stores.paged import SUMMARISED_TOKENS, PagedStore
from kvsift.stores.parts import (
    attend_dense,
    attend_repositioned_selection,
    attend_sinks,
    attend_sparse,
    repositioned,
)
from kvsift.stores.reader import RowReader
from kvsift.stores.resident import ResidentSpans
from kvsift.stores.transfers import HostTransfers
from kvsift.types import LayerShape, Part, Selection

STREAMED_TOKENS = SUMMARISED_TOKENS  # copied to the device at a time
HOST_SPAN = "kvsift host attention"  # its name in a profile

HostValues = Literal["model", "int8"]
HOST_VALUES: tuple[HostValues, ...] = ("model", "int8")


class FreshTokens(NamedTuple):
    """The newest tokens, on the device that computed them."""

    row: int
    start: int
    keys: Tensor
    values: Tensor


class SplitStore(PagedStore):
    """Keys, values and page summaries of one layer in host memory.

    A reader gives tensors on the host; ``near`` gives the tokens that every query sees on the device, which holds
    the window and some slack whatever the context's length, and ``streamed`` everything, a block at a time.
    Summaries are computed when they are first read, so that a prompt need not wait for them.

    Args:
        like: a tensor with the dtype of the keys, on the device of the model.
        host_values: "model" keeps values as they come, "int8" packs them (``native.coded_rows``); what is on the device
            is as it came until it is copied again. The other arguments are those of ``PagedStore``.
    """

    in_host_memory = True
    captures = False
    objections = (
        (lambda case: case.plan.evicts_prompt,
         "{it.plan} frees what it drops while it reads; placement={it.place.name} keeps everything in host memory. "
         "Leave out the placement, or take a rule of decode without evict."),
        (lambda case: not case.plan.evicts_prompt
         and case.plan.prefill is not None and not case.plan.prefill.method.traits.unbounded,
         "prefill={it.plan.prefill} needs its KV on the device: with placement={it.place.name} prefill is dense. Leave "
         "the prefill rule out, or the placement."),
        (lambda case: not case.plan.evicts_prompt and case.plan.decode is not None and case.plan.decode.evicts,
         "decode={it.plan.decode} frees what it drops, and placement={it.place.name} keeps everything in host memory. "
         "Leave out evict, or the placement."),
    )  # fmt: skip
    side_by_side = False  # how ``LayerPool`` lays out keys and values
    at_once: bool | None = None  # device and host attend side by side; None: where they are not the same

    def __init__(
        self, shape: LayerShape, num_rows: int, page_size: int, like: Tensor, summaries: Iterable[str] = (),
        reserve: int = 0, table: PageTable | None = None, *, host_values: HostValues = "model",
    ) -> None:  # fmt: skip
        self.device, self.host_values = like.device, host_values
        self._copied_bytes = 0  # of keys and values, from the host to the device
        self._transfers = HostTransfers()
        self._resident = ResidentSpans(like.device)
        self._fresh: FreshTokens | None = None
        self._stale: dict[int, int] = {}  # row -> first page whose summaries are not computed
        super().__init__(shape, num_rows, page_size, torch.empty(0, dtype=like.dtype), summaries, reserve, table)

    @classmethod
    def check_knobs(cls, *, host_values: str = "model", **knobs: Any) -> None:
        if host_values not in HOST_VALUES:
            raise unknown("host_values", str(host_values), HOST_VALUES)

    @classmethod
    def bytes_per_token(
        cls, head_dim: int, dtype: torch.dtype, *, host_values: HostValues = "model", **knobs: Any
    ) -> int:
        value = coded_width(head_dim) if host_values == "int8" else head_dim * dtype.itemsize
        return head_dim * dtype.itemsize + value

    @classmethod
    def device_tokens(cls, num_tokens: int, summary_share: float, **knobs: Any) -> int:
        return 0

    def _new_pool(self, pages: PagePool) -> LayerPool:
        pinned = self.device if self.device.type == "cuda" else None
        coded, together = self.host_values == "int8", self.side_by_side
        return LayerPool(
            self.shape, self.page_size, self._like, pages, coded_values=coded, side_by_side=together, pinned=pinned
        )

    def append(self, row: int, keys: Tensor, values: Tensor) -> None:
        start = self.lengths[row]
        super().append(row, keys, values)
        self._fresh = FreshTokens(row, start, keys, values)
        self._resident.append(row, start, keys, values)

    def _write(self, slots: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        rows = self.pool.rows_of(keys, values)
        if keys.is_cuda:
            self._transfers.send([pool.flatten(1, 2) for pool in self.pool.stored], slots, self.pool.joined(rows))
        else:
            super()._write(slots, *rows)

    @torch.inference_mode()  # pools outlive the block they were made in
    def _complete_transfers(self) -> None:
        for slots, rows in self._transfers.settle():
            super()._write(slots, *self.pool.parts(rows))

    def _fit(self, exactly: bool = False) -> None:
        if not self.pool.has_room:  # the pools are about to be copied
            self._complete_transfers()
        super()._fit(exactly)

    def _summarise(self, row: int, first_page: int, kinds: Iterable[str]) -> None:
        self._stale[row] = min(first_page, self._stale.get(row, first_page))

    @torch.inference_mode()
    def _settle(self) -> None:
        """Complete transfers, and the summaries of what they brought."""
        self._complete_transfers()
        stale, self._stale = self._stale, {}
        for row, first_page in stale.items():
            super()._summarise(row, first_page, self.kinds)

    def reader(self, row: int) -> RowReader:
        self._settle()
        return self._reader(row)

    def near(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions start to stop on the device, [num_kv_heads, stop - start, head_dim]: sinks if
        ``start`` is 0, else the window."""
        resident = self._resident.read(row, start, stop)
        if resident is None:
            reader = self.reader(row)
            resident = self._resident.fetch(row, start, stop, lambda *span: (reader.keys(*span), reader.values(*span)))
            self._copied_bytes += sum(tensor.numel() * tensor.element_size() for tensor in resident)
        return resident

    def streamed(self, row: int, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of positions start to stop on the device, [num_kv_heads, block, head_dim] at a time.

        A block is valid until the next but one is requested; the next is copied while one is attended.
        """
        fresh = self._fresh
        if fresh is not None and fresh.row == row and fresh.start <= start:  # not yet in host memory
            tokens = slice(start - fresh.start, stop - fresh.start)
            yield fresh.keys[:, tokens], fresh.values[:, tokens]
            return
        if self._transfers.has_buffered:
            self._complete_transfers()
        self._copied_bytes += (stop - start) * self.token_bytes
        reader = self._reader(row)
        spans = [(first, min(first + STREAMED_TOKENS, stop)) for first in range(start, stop, STREAMED_TOKENS)]
        if self.device.type == "cpu":
            yield from ((reader.keys(*span), reader.values(*span)) for span in spans)
        else:
            yield from self._copied(reader, spans)

    def _copied(self, reader: RowReader, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of spans, copied on a stream of their own into two buffers in turn."""
        pools, width = self.pool.stored, max((stop - start for start, stop in spans), default=0)
        buffers = [
            [pool.new_empty(len(pool), width, pool.shape[3], device=self.device) for pool in pools] for _ in range(2)
        ]
        copying, used = self._transfers.stream(self.device), [torch.cuda.Event(), torch.cuda.Event()]
        copying.wait_stream(torch.cuda.current_stream(self.device))
        for number, (start, stop) in enumerate(spans):
            buffer, count = buffers[number % 2], stop - start
            with torch.cuda.stream(copying):
                copying.wait_event(used[number % 2])
                for target, pool in zip(buffer, pools):
                    rows = self.pool.read(pool, reader.slots(start, stop))
                    for head, rows_of_head in zip(target, rows):  # head by head, as in ``HostTransfers``
                        head[:count].copy_(rows_of_head, non_blocking=True)
            torch.cuda.current_stream(self.device).wait_stream(copying)
            keys, values = self.pool.parts([tensor[:, :count] for tensor in buffer])
            yield keys, self.pool.values_of(values)
            used[number % 2].record(torch.cuda.current_stream(self.device))

    def attend_all(self, row: int, segment: Segment) -> Part:
        if segment.num_queries == 1:
            return self._on_device(self._attend_on_host(row, segment))
        return self._attend_streamed(row, segment)

    def _attend_streamed(self, row: int, segment: Segment) -> Part:
        """Dense attention on the device, which everything is copied to a block at a time."""
        shape, parts = self.shape, []
        for start in range(segment.start, segment.stop, STREAMED_TOKENS):  # so that a piece's own tokens are one block
            stop = min(start + STREAMED_TOKENS, segment.stop)
            queries = segment.queries[:, :, start - segment.start : stop - segment.start]
            ((own_keys, own_values),) = self.streamed(row, start, stop)
            part = attention(queries, own_keys[None], own_values[None], shape.scale, causal=True, softcap=shape.softcap)
            for keys, values in self.streamed(row, 0, start):
                part = merge(part, attention(queries, keys[None], values[None], shape.scale, softcap=shape.softcap))
            parts.append(part)
        self._fresh = None
        return Part(torch.cat([part.output for part in parts], 2), torch.cat([part.lse for part in parts], 2))

    def _attend_on_host(self, row: int, segment: Segment) -> Part:
        """Dense attention of one query; packed values are unpacked a block at a time."""
        reader, queries = self.reader(row), segment.queries.cpu()
        if reader.in_place:
            return attend_dense(self.shape, segment._replace(queries=queries), reader)
        part: Part | None = None
        for start in range(0, segment.stop, STREAMED_TOKENS):
            span = start, min(start + STREAMED_TOKENS, segment.stop)
            keys, values = (read(*span).unsqueeze(0) for read in (reader.keys, reader.values))
            block = attention(queries, keys, values, self.shape.scale, softcap=self.shape.softcap)
            part = block if part is None else merge(part, block)
        assert part is not None
        return part

    def attend(self, row: int, segment: Segment, view: View, select: Select) -> Attended:
        """As ``Store.attend``, for one query: the device attends sinks and window while the host selects and attends
        what it selected."""
        (sinks_stop, window_start), on_host = view.spans[0], segment._replace(queries=segment.queries.cpu())
        reader = self.reader(row)
        if self.is_remote if self.at_once is None else self.at_once:
            near = submit(lambda: self._attend_near(row, segment, view))
            try:
                selected, num_selected, selection = self._attend_selected(on_host, reader, view, select)
            finally:
                part = near.result()  # nothing is left running
        else:
            part = self._attend_near(row, segment, view)
            selected, num_selected, selection = self._attend_selected(on_host, reader, view, select)
        visible = num_selected + sinks_stop + segment.stop - min(window_start, segment.stop)
        if selected is None:
            assert part is not None
            return Attended(part, selection, visible)
        selected = self._on_device(selected)
        return Attended(selected if part is None else merge(part, selected), selection, visible)

    def _attend_selected(
        self, segment: Segment, reader: RowReader, view: View, select: Select
    ) -> tuple[Part | None, int | float | Tensor, Selection | None]:
        """Attend what ``select`` chooses, on the host; with how many tokens that is."""
        with record_function(HOST_SPAN):
            selection = select(segment, reader)
            if selection is None:
                return None, 0, None
            if view.reposition is not None:
                distant, positions = repositioned(self.shape, segment, view)
                part, visible = attend_repositioned_selection(self.shape, distant, positions, reader, selection)
                return part, visible, selection
            nothing_else = view._replace(spans=[(0, segment.stop)])  # no sinks, and a window behind the query
            return *attend_sparse(self.shape, segment, reader, nothing_else, selection), selection

    def _attend_near(self, row: int, segment: Segment, view: View) -> Part | None:
        """Attend sinks and window on the device; None where there are none."""
        sinks_stop, window_start = view.spans[0]
        if view.reposition is not None and sinks_stop:
            distant, positions = repositioned(self.shape, segment, view)
            keys, values = self.near(row, 0, sinks_stop)
            part, _ = attend_sinks(self.shape, distant, positions, keys, values, view.spans[:1])
            recent = self._attend_near(row, segment, View([(0, window_start)]))
            return part if recent is None else merge(part, recent)
        spans = [(0, sinks_stop), (min(window_start, segment.stop), segment.stop)]
        near = [self.near(row, *span) for span in spans if span[0] < span[1]]
        if not near:
            return None
        keys, values = (torch.cat(tensors, 1).unsqueeze(0) for tensors in zip(*near))
        return attention(segment.queries, keys, values, self.shape.scale, softcap=self.shape.softcap)

    def _on_device(self, part: Part) -> Part:
        return Part(part.output.to(self.device), part.lse.to(self.device))

    def repage(self, page_size: int, summaries: Iterable[str]) -> None:
        super().repage(page_size, summaries)
        self._fresh = None

    def crop(self, row: int, length: int) -> None:
        self._settle()  # its last page may be copied
        self._fresh = None
        super().crop(row, length)
        self._resident.crop(row, length)

    def fork(self, sources: Sequence[int]) -> None:
        self._settle()
        self._fresh = None
        super().fork(sources)
        self._resident.clear()

    def take_transfers(self) -> Transfers:
        copied, self._copied_bytes = self._copied_bytes, 0
        return Transfers(copied)

    @property
    def is_remote(self) -> bool:
        return self.device.type != "cpu"

    @property
    def num_device_bytes(self) -> int:
        return self._resident.num_bytes
