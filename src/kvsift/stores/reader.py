"""One sequence of a store, in logical order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kvsift.kernels.coded_pages import codes_of, read_pages, read_rows
from kvsift.kernels.segment_attention import Rows
from kvsift.native.shapes import HeadRows, PooledRows
from kvsift.stores.kv_pool import LayerPool, granules_of
from kvsift.stores.page_table import PageTable

DECODED_TOKENS = 16384  # at once, in dense attention over keys and values in 8 bits


class RowReader:
    """Keys, values and page summaries of one sequence (``types.KVReader``); views where its pages are consecutive.

    Args:
        pool: tensors of the layer.
        table: pages of the sequences.
        row: row of the table.
        length: tokens that the layer has cached of it.
        complete: summarises the page of a sequence that is being filled; called before that summary is read.
    """

    def __init__(
        self, pool: LayerPool, table: PageTable, row: int, length: int, complete: Callable[[int], None] | None = None
    ) -> None:
        self._pool, self._table, self._row, self._length, self._complete = pool, table, row, length, complete

    @property
    def page_size(self) -> int:
        return self._pool.page_size

    @property
    def length(self) -> int:
        return self._length

    @property
    def in_place(self) -> bool:
        """Whether keys and values can be read where they are stored, on the host."""
        return self._pool.on_host and self._pool.keys.dtype == self._pool.values.dtype

    @property
    def decodes(self) -> bool:
        """Whether keys and values are read as copies in another dtype than they are stored in, and not on the host."""
        return self._pool.by_page

    def keys_in_place(self, stop: int | None = None, start: int = 0) -> HeadRows:
        """As ``keys(start, stop)``, without a copy, for the compiled core."""
        pool = self._pool
        return self._in_place(pool.keys.flatten(1, 2), start, self._length if stop is None else stop, pool.page_size)

    def values_in_place(self, stop: int | None = None) -> HeadRows:
        """As ``values(0, stop)``, without a copy, for the compiled core."""
        pool = self._pool
        return self._in_place(pool.values.flatten(1, 2), 0, self._length if stop is None else stop, pool.page_size)

    def summary_in_place(self, kind: str, units: slice) -> HeadRows:
        """As ``summary``, on the host without a copy."""
        if units.stop * self._pool.page_size > self._length:
            self._complete_summaries(units)
        pool = self._pool.summaries[kind]
        return self._in_place(pool, units.start, units.stop, 1) if pool.is_cpu else self.summary(kind, units)

    def _in_place(self, pool: Tensor, start: int, stop: int, per_page: int) -> HeadRows:
        """Rows of a pool that has ``per_page`` slots for each page."""
        first = self._table.run_start(self._row, start // per_page, -(-stop // per_page))
        if first is not None:
            offset = first * per_page + start % per_page
            return pool[:, offset : offset + stop - start]
        return PooledRows(pool, self._table.slot_runs(self._row, per_page), stop - start, start)

    def keys(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[num_kv_heads, stop - start, head_dim]; everything by default."""
        if self.decodes:
            return self._decoded(self._pool.keys, start, stop, turned=True)
        return self._pool.keys_of(self._pool.read(self._pool.keys, self.slots(start, stop)))

    def turned_keys(self, start: int = 0, stop: int | None = None) -> Tensor:
        """As ``keys``, of a reader that ``decodes``, turned as they are stored: for queries that are turned."""
        return self._decoded(self._pool.keys, start, stop)

    def values(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[num_kv_heads, stop - start, head_dim]; everything by default."""
        if self.decodes:
            return self._decoded(self._pool.values, start, stop)
        return self._pool.values_of(self.stored_values(start, stop))

    def _decoded(self, pool: Tensor, start: int, stop: int | None, turned: bool = False) -> Tensor:
        stop, size = self.length if stop is None else stop, self.page_size
        first = start // size
        pages = self.pages(first, -(-stop // size))
        tokens = read_pages(codes_of(pool), pages, self._pool.dtype, turned=turned).flatten(1, 2)
        return tokens[:, start - first * size : stop - first * size]

    def stored_values(self, start: int = 0, stop: int | None = None) -> Tensor:
        """As ``values``, in the form in which they are stored, [num_kv_heads, stop - start, width]."""
        return self._pool.read(self._pool.values, self.slots(start, stop))

    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens in the form in which they are stored, each [num_kv_heads, length, width]."""
        return self._pool.read(self._pool.keys, self.slots(0, None)), self.stored_values()

    def consecutive(self, stop: int) -> list[tuple[int, int]]:
        """Positions 0 to stop, cut where one page is not behind the other in the pool, but in a steady one; where a
        reader decodes, cut so that what is decoded at once takes little memory."""
        if self.decodes:
            return [(start, min(start + DECODED_TOKENS, stop)) for start in range(0, stop, DECODED_TOKENS)]
        if self._table.kv.steady:
            return [(0, stop)]
        stops = accumulate((run.num_pages * self.page_size for run in self._table.runs(self._row)), initial=0)
        return [(start, min(end, stop)) for start, end in pairwise(stops) if start < stop]

    def slots(self, start: int, stop: int | None) -> slice | Tensor:
        """Slots of positions start to stop in a pool whose pages are flattened."""
        stop, size = self.length if stop is None else stop, self.page_size
        first = self._table.run_start(self._row, start // size, -(-stop // size))
        if first is not None:
            offset = first * size + start % size
            return slice(offset, offset + stop - start)
        if self._pool.keys.is_cuda:  # a copy from the host would wait for what the device has to do
            return self._table.slots_on(self._row, size, self._pool.keys.device)[start:stop]
        positions = torch.arange(start, stop)
        return self._table.page_ids(self._row)[positions // size] * size + positions % size

    def pages(self, first: int, stop: int) -> slice | Tensor:
        """Pages in the pool of the sequence's pages first to stop."""
        start = self._table.run_start(self._row, first, stop)
        if start is not None:
            return slice(start, start + stop - first)
        return self._page_ids(self._pool.keys.device)[first:stop]

    def summary(self, kind: str, units: slice | Tensor) -> Tensor:
        """[num_kv_heads, len(units), width]; of pages chosen per head, [num_heads, count]: [num_heads, count, width]"""
        self._complete_summaries(units)
        pool = self._pool.summaries[kind]
        if isinstance(units, slice):
            return pool[:, self.pages(units.start, units.stop)]
        return pool[self._kv_heads(units), self.physical(units, 1)]

    def _complete_summaries(self, units: slice | Tensor) -> None:
        full = isinstance(units, slice) and units.stop * self.page_size <= self._length
        if not full and self._complete is not None:
            self._complete(self._row)

    def keys_of(self, pages: Tensor) -> Tensor:
        """Keys of complete pages chosen per head, [num_heads, count]: [num_heads, count * page_size, head_dim]"""
        rows = self._gathered(self._pool.keys, self._granule_rows(pages, self.page_size), self.page_size)
        return self._pool.keys_of(rows)

    def paged(self) -> Rows:
        """The pools, and the sequence's pages in them; what is in 8 bits is decoded."""
        keys, values = self._pool.as_read
        pages = self._table.pages_on(self._row, keys.device)
        if not self.decodes:
            return Rows(keys, values, pages)
        sizes, dtype = (len(keys), len(pages), *keys.shape[2:]), self._pool.dtype
        new_keys, new_values = (pool.new_empty(sizes, dtype=dtype) for pool in (keys, values))
        step = max(1, DECODED_TOKENS // self.page_size)
        for first in range(0, len(pages), step):
            some = slice(first, first + step)
            there = pages[some].long()
            new_keys[:, some] = read_pages(keys, there, dtype, turned=True)
            new_values[:, some] = read_pages(values, there, dtype)
        return Rows(new_keys, new_values, torch.arange(len(pages), dtype=torch.int32, device=pages.device))

    def counted(self, remembered: Tensor) -> Tensor:
        """The tensor itself."""
        return remembered

    def borrow(self, start: int, stop: int) -> Tensor:
        """As ``keys``."""
        return self.keys(start, stop)

    def borrow_in_place(self, start: int, stop: int) -> HeadRows:
        """As ``borrow``, without a copy where they are in host memory as they came."""
        in_place = self.in_place and not self._pool.coded_keys
        return self.keys_in_place(stop, start) if in_place else self.keys(start, stop)

    def count_bytes(self, num_bytes: int) -> None:
        """No-op; ``layer.selection.CountingReader`` counts."""

    def gather(self, granules: Tensor, granule_size: int) -> tuple[Tensor, Tensor]:
        """Keys and values of chosen tokens, copied out of the pools.

        Args:
            granules: int64 [num_heads, count], runs of ``granule_size`` tokens by logical index, -1 for none;
                num_heads is a multiple of the KV heads. ``granule_size`` divides the page size.

        Returns:
            Two tensors [num_heads, count * granule_size, head_dim]; what a -1 or the unwritten tail of the last
            page yields is undefined.
        """
        index = self._granule_rows(granules.clamp_min(0), granule_size)
        keys, values = (self._gathered(pool, index, granule_size) for pool in (self._pool.keys, self._pool.values))
        return self._pool.keys_of(keys), self._pool.values_of(values)

    def physical(self, granules: Tensor, per_page: int) -> Tensor:
        """Where logical granules are in the pools, ``per_page`` of them in a page."""
        first = self._table.run_start(self._row)
        if first is not None:
            return granules + first * per_page
        page_ids = self._page_ids(granules.device)
        return page_ids[granules // per_page] * per_page + granules % per_page

    def _page_ids(self, device: torch.device) -> Tensor:
        table, row = self._table, self._row
        return table.page_ids(row) if device.type == "cpu" else table.pages_on(row, device).long()

    def _granule_rows(self, granules: Tensor, granule_size: int) -> Tensor:
        """Where granules chosen per head are in a pool flattened to rows of ``granule_size`` tokens."""
        per_page = self.page_size // granule_size
        heads = self._kv_heads(granules) * (self._pool.keys.shape[1] * per_page)
        return self.physical(granules, per_page) + heads

    def _gathered(self, pool: Tensor, index: Tensor, granule_size: int) -> Tensor:
        if self._pool.by_page:
            slots = (index.unsqueeze(-1) * granule_size + torch.arange(granule_size, device=index.device)).flatten(1)
            pages, num_pages = slots // self.page_size, pool.shape[1]
            return read_rows(codes_of(pool), pages % num_pages, slots % self.page_size, pages // num_pages)
        chosen = granules_of(pool, granule_size).index_select(0, index.flatten())
        return chosen.view(index.shape[0], -1, pool.shape[3])

    def _kv_heads(self, units: Tensor) -> Tensor:
        """The KV head of each row of units chosen per head, [num_heads, 1]."""
        num_heads = units.shape[0]
        heads = torch.arange(num_heads, device=units.device) // (num_heads // len(self._pool.keys))
        return heads.unsqueeze(1)
