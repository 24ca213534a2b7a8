"""KV on the device that attends it: paged pools of one layer for all sequences of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvsift.errors import UnsupportedDevice, unknown
from kvsift.kernels.page_summary import summarise, summarise_pages
from kvsift.native.coded_rows import coded_width
from kvsift.stores.base import Attended, Pools, Segment, Select, Store, View
from kvsift.stores.kv_pool import LayerPool
from kvsift.stores.page_pool import PagePool
from kvsift.stores.page_table import PageTable
from kvsift.stores.parts import attend_dense, attend_sparse
from kvsift.stores.reader import RowReader
from kvsift.types import LayerShape, Part

KVDtype = Literal["auto", "int8"]
KV_DTYPES: tuple[KVDtype, ...] = ("auto", "int8")
SUMMARISED_TOKENS = 32768  # at once; bounds temporary memory


class PagedStore(Store):
    """Keys, values and page summaries of one layer on the device of the model.

    Args:
        shape: the layer.
        num_rows: sequences in the batch.
        page_size: tokens per page.
        like: a tensor with the device and dtype of the keys.
        summaries: kinds to maintain (``kernels.page_summary.SUMMARIES``).
        reserve: tokens a sequence is expected to reach; saves copies, limits nothing.
        table: pages of the sequences, which all layers of a cache share; by default a table and a pool of this layer
            alone.
        kv_dtype: "auto" keeps keys and values as they come, "int8" in 8 bits (``native.coded_rows``): what is selected
            and attended is what is stored.
    """

    table: PageTable
    objections = (
        *Store.objections,
        (lambda case: case.place.kv_dtype != "auto"
         and next((rule for rule in case.plan.rules if rule.evicts), None),
         "{found} frees what it drops, and keys and values are kept in 8 bits with kv_dtype=int8. Leave out evict, or "
         "kv_dtype."),
    )  # fmt: skip
    by_page: ClassVar[bool] = True  # codes in 8 bits are laid out for kernels of a GPU (``kernels.coded_pages``)

    def __init__(
        self, shape: LayerShape, num_rows: int, page_size: int, like: Tensor, summaries: Iterable[str] = (),
        reserve: int = 0, table: PageTable | None = None, *, kv_dtype: KVDtype = "auto",
    ) -> None:  # fmt: skip
        self.kv_dtype, self.rounds = kv_dtype, kv_dtype == "int8"
        self.shape, self.page_size, self.reserve = shape, page_size, reserve
        self.lengths = [0] * num_rows
        self._open: set[int] = set()  # sequences whose page being filled has no summary of its present tokens
        self._like = like.new_empty(0)
        self._use(PageTable(num_rows) if table is None else table)
        self.repage(page_size, summaries)

    def _use(self, table: PageTable) -> None:
        """Store in these pages from now on."""
        self.table, self._steps, self._copies = table, table.steps, len(table.copies)
        self.pool = table.kv.layer(self.shape.layer, self.page_size, self._new_pool)
        self.token_bytes = self.pool.token_bytes
        self.kinds: tuple[str, ...] = ()

    def _new_pool(self, pages: PagePool) -> LayerPool:
        return LayerPool(
            self.shape, self.page_size, self._like, pages, coded_keys=self.rounds, coded_values=self.rounds,
            by_page=self.rounds and self.by_page,
        )  # fmt: skip

    @classmethod
    def check_knobs(cls, *, kv_dtype: str = "auto", **knobs: Any) -> None:
        if kv_dtype not in KV_DTYPES:
            raise unknown("kv_dtype", str(kv_dtype), KV_DTYPES)

    @classmethod
    def bytes_per_token(cls, head_dim: int, dtype: torch.dtype, *, kv_dtype: KVDtype = "auto", **knobs: Any) -> int:
        return 2 * (coded_width(head_dim) if kv_dtype == "int8" else head_dim * dtype.itemsize)

    @property
    def num_bytes(self) -> int:
        return self.pool.num_bytes

    @property
    def keys(self) -> Tensor:
        """[num_kv_heads, num_pages, page_size, head_dim]"""
        return self.pool.keys

    @property
    def values(self) -> Tensor:
        """As ``keys``; the width of packed values differs."""
        return self.pool.values

    @property
    def summaries(self) -> dict[str, Tensor]:
        """Page summaries that are maintained: kind -> [num_kv_heads, num_pages, width]."""
        return {kind: self.pool.summaries[kind] for kind in self.kinds}

    def pools(self) -> Pools:
        return Pools(*self.pool.as_read, self.summaries)

    def append(self, row: int, keys: Tensor, values: Tensor) -> None:
        if not torch.is_inference_mode_enabled():  # pools outlive the block they were made in
            with torch.inference_mode():
                PagedStore.append(self, row, keys, values)
            return
        start, stop = self.lengths[row], self.lengths[row] + keys.shape[1]
        if start == stop:
            return
        self._grow(row, stop)
        with self.pool.lock:
            self._store(row, stop, keys, values)
            self._summarise(row, start // self.page_size, self.kinds)

    @torch.inference_mode()
    def adopt(self, row: int, length: int, stale: bool) -> None:
        """Begin a sequence with ``length`` tokens, whose pages the table has adopted; ``stale``: some lack
        summaries."""
        assert length % self.page_size == 0, "pages that are shared are full"
        self.lengths[row] = length
        with self.pool.lock:
            self._fit()
            if stale:
                self._summarise(row, 0, self.kinds)

    @torch.inference_mode()
    def begin_copy(self, row: int, length: int) -> None:
        """Begin a sequence with ``length`` tokens of pages that the table has adopted; the last one, if it is not full,
        is copied."""
        self.lengths[row] = length
        self._own_partial_page(row)
        self._summarise(row, length // self.page_size, self.kinds)

    @torch.inference_mode()
    def restore(self, row: int, keys: Tensor, values: Tensor, summaries: Mapping[str, Tensor]) -> None:
        self._grow(row, keys.shape[1])
        with self.pool.lock:
            self._store(row, keys.shape[1], keys, values)
            pages = self._reader(row).pages(0, self.table.num_pages(row))
            given = [kind for kind in self.kinds if kind in summaries]
            for kind in given:
                self.pool.summaries[kind][:, pages] = summaries[kind].to(self.pool.summaries[kind].device)
            if len(given) < len(self.kinds):
                self._summarise(row, 0, [kind for kind in self.kinds if kind not in given])

    def _grow(self, row: int, length: int) -> None:
        self.table.grow(row, -(-length // self.page_size), -(-self.reserve // self.page_size))

    def _store(self, row: int, stop: int, keys: Tensor, values: Tensor) -> None:
        """Write the tokens up to position ``stop``, without summaries."""
        start = self.lengths[row]
        if self.pool.pages.num_pages > self.pool.keys.shape[1]:
            self._fit()
        self.lengths[row] = stop
        self._write(self._reader(row).slots(start, stop), keys, values)

    @torch.inference_mode()
    def reserve_rows(self, lengths: Sequence[int]) -> None:
        self.table.reserve_scratch()
        for row, length in enumerate(lengths):
            self.table.reserve(row, -(-length // self.page_size))
        with self.pool.lock:
            self._fit(exactly=True)

    @torch.inference_mode()
    def advance(self, row: int, length: int, stale_from: int | None = None) -> None:
        self.table.grow(row, -(-length // self.page_size))
        self.lengths[row] = length
        if stale_from is not None:
            self._summarise(row, stale_from // self.page_size, self.kinds)
            self.summarise_open_page(row)

    def reader(self, row: int) -> RowReader:
        return self._reader(row)

    def _reader(self, row: int) -> RowReader:
        return RowReader(self.pool, self.table, row, self.lengths[row], self.summarise_open_page)

    def attend_all(self, row: int, segment: Segment) -> Part:
        return attend_dense(self.shape, segment, self.reader(row))

    def attend(self, row: int, segment: Segment, view: View, select: Select) -> Attended:
        reader = self.reader(row)
        selection = select(segment, reader)
        part, visible = attend_sparse(self.shape, segment, reader, view, selection)
        return Attended(part, selection, visible)

    @torch.inference_mode()
    def repage(self, page_size: int, summaries: Iterable[str]) -> None:
        """As ``Store.repage``; the tokens are copied if the page size changes."""
        if page_size != self.page_size:
            rows = [reader.rows() for reader in map(self.reader, range(self.num_rows))]
            self.page_size, self.lengths = page_size, [0] * self.num_rows
            self._use(self.table.successor(self._steps, page_size))
            for row, tokens in enumerate(rows):
                self.append(row, *tokens)
        self.kinds, before = tuple(summaries), self.kinds
        self._maintain()
        for row in range(self.num_rows) if set(self.kinds) - set(before) else ():
            self._summarise(row, 0, [kind for kind in self.kinds if kind not in before])

    def _maintain(self) -> None:
        self.pool.maintain(self, self.kinds)

    @torch.inference_mode()
    def crop(self, row: int, length: int) -> None:
        if length >= self.lengths[row]:
            return
        self.lengths[row] = length
        self.table.shrink(row, -(-length // self.page_size))
        self._own_partial_page(row)
        self._summarise(row, length // self.page_size, self.kinds)

    @torch.inference_mode()
    def fork(self, sources: Sequence[int]) -> None:
        """As ``Store.fork``; full pages are shared, the page being filled is copied."""
        if self.table.take_step(self._steps, "fork", *sources):
            self.table.fork(sources)
        self._steps += 1
        self.lengths = [self.lengths[source] for source in sources]
        self._open = {row for row, source in enumerate(sources) if source in self._open}
        for row in range(self.num_rows):
            self._own_partial_page(row)

    def empty_copy(self, num_rows: int, table: PageTable | None = None, reserve: int = 0) -> PagedStore:
        """An empty store like this one, in the pages of ``table`` or a pool of its own."""
        shape, page_size, like = self.shape, self.page_size, self._like
        return PagedStore(shape, num_rows, page_size, like, self.kinds, reserve, table, kv_dtype=self.kv_dtype)

    def leave_pool(self) -> None:
        """Free the tensors of this layer, unless other caches store in them; this store is of no use afterwards."""
        self.table.kv.leave(self.shape.layer, self)

    def copy_of_row(self, row: int) -> PagedStore:
        """A store of one sequence that begins as a copy of this store's ``row``, with full pages shared."""
        table = PageTable(1, self.table.kv)
        table.adopt(0, self.table.runs(row))
        shape, page_size, like = self.shape, self.page_size, self._like
        other = PagedStore(shape, 1, page_size, like, (), self.reserve, table, kv_dtype=self.kv_dtype)
        other.lengths, other.kinds = [self.lengths[row]], self.kinds
        other._open = {0} if row in self._open else set()
        other._maintain()
        other._own_partial_page(0)
        return other

    def _write(self, slots: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        if self.pool.coded_values:
            keys, values = self.pool.rows_of(keys, values)
        self.pool.write(slots, keys, values)

    def _fit(self, exactly: bool = False) -> None:
        self.pool.fit(exactly)

    def _pages(self, row: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of pages of a sequence, [num_kv_heads, stop - first, page_size, head_dim], where they are to
        be summarised."""
        pages = self._reader(row).pages(first, stop)
        keys, values = self.pool.keys[:, pages], self.pool.values[:, pages]
        return (self.pool.keys_of(keys), self.pool.values_of(values)) if self.pool.coded_values else (keys, values)

    @torch.inference_mode()
    def _own_partial_page(self, row: int) -> None:
        if self.lengths[row] % self.page_size:
            self.table.unshare_last(row)
        with self.pool.lock:
            self._fit()
            for source, target in self.table.copies[self._copies :]:
                self.pool.copy_page(source, target)
        self._copies = len(self.table.copies)

    def _summarise(self, row: int, first_page: int, kinds: Iterable[str]) -> None:
        """Summarise full pages from ``first_page`` on. The one being filled waits: most plans never score it."""
        # Always from the keys themselves, never from the old summary: token by token, by chunk and after a
        # rollback the row is the same, bit for bit. At most one page is read twice.
        whole, partial = divmod(self.lengths[row], self.page_size)
        step = max(1, SUMMARISED_TOKENS // self.page_size)
        for first in range(first_page, whole, step) if kinds else ():
            self._write_summaries(row, (first, min(first + step, whole)), kinds)
        (self._open.add if partial else self._open.discard)(row)

    @torch.inference_mode()
    def summarise_open_page(self, row: int) -> None:
        whole, partial = divmod(self.lengths[row], self.page_size)
        with self.pool.lock:
            if row in self._open and partial:
                self._write_summaries(row, (whole, whole + 1), self.kinds, partial)
            self._open.discard(row)

    def _write_summaries(self, row: int, pages: tuple[int, int], kinds: Iterable[str], partial: int = 0) -> None:
        """Summarise pages; of one that is not full, the first ``partial`` tokens."""
        keys, values = (None, None) if self.pool.by_page else self._pages(row, *pages)
        device = self.pool.keys.device if keys is None else keys.device
        valid = torch.arange(self.page_size, device=device).unsqueeze(0) < partial if partial else None
        places = self._reader(row).pages(*pages)
        for kind in kinds:
            held = self.pool.summaries[kind]
            if keys is None:
                rows = summarise_pages(kind, *self.pool.as_read, places, held, valid)
            else:
                rows = summarise(kind, keys, valid, values)
            with self.pool.lock:
                self.pool.summaries[kind][:, places] = rows.to(held.device)


def note_tokens(stores: Sequence[PagedStore], length: int) -> None:
    """Record that the only sequence has ``length`` tokens in each layer, the last ones written with the summaries of
    pages that are full now: as ``append`` without a call for each layer."""
    is_open = length % stores[0].page_size > 0
    for store in stores:
        store.lengths[0] = length
        (store._open.add if is_open else store._open.discard)(0)


class HostStore(PagedStore):
    """As ``PagedStore``; refuses a model on another device."""

    not_captured = (
        (lambda case: case.place.kv_dtype == "int8",
         "with placement=host the compiled core reads keys and values in int8, and no kernel does"),
    )  # fmt: skip
    by_page = False  # as the compiled core reads them

    def __init__(
        self, shape: LayerShape, num_rows: int, page_size: int, like: Tensor, summaries: Iterable[str] = (),
        reserve: int = 0, table: PageTable | None = None, *, kv_dtype: KVDtype = "auto",
    ) -> None:  # fmt: skip
        if like.device.type != "cpu":
            raise UnsupportedDevice(
                f"placement=host keeps the model on the CPU, and this one is on {like.device}. Move it, or use "
                "placement=split or placement=offload."
            )
        super().__init__(shape, num_rows, page_size, like, summaries, reserve, table, kv_dtype=kv_dtype)
