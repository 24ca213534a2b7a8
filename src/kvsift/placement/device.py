"""KV on the device that attends it: paged pools for one layer and the whole batch, summaries beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvsift.kernels.page_summary import SUMMARIES, summarise
from kvsift.kernels.segment_attention import Rows
from kvsift.placement.pages import PageTable
from kvsift.placement.pinned import pin
from kvsift.types import LayerShape


class DeviceStore:
    """Keys, values and page summaries of one layer for a batch of sequences.

    Pools are [num_kv_heads, num_pages, page_size, head_dim]: a row whose pages are consecutive is a view
    [num_kv_heads, length, head_dim], so dense attention copies nothing. A page's summary sits at the same physical
    index as its keys, so copying, forking and freeing a page carries it along.

    Args:
        shape: the layer.
        num_rows: sequences in the batch.
        page_size: tokens per page.
        like: a tensor with the device and dtype of the keys.
        summaries: kinds to maintain (``kernels.page_summary.SUMMARIES``).
        reserve: tokens a row is expected to reach; saves copies, limits nothing.
        pinned: keep the pools in page-locked host memory, which another device can copy from on its own.
    """

    def __init__(
        self,
        shape: LayerShape,
        num_rows: int,
        page_size: int,
        like: Tensor,
        summaries: Iterable[str] = (),
        reserve: int = 0,
        pinned: bool = False,
    ) -> None:
        self.shape = shape
        self.pinned = pinned
        self.page_size = page_size
        self.table = PageTable(num_rows)
        self.lengths = [0] * num_rows
        self.reserve = reserve
        self.scratch: int | None = None  # a page of no row, for rows of a batch that have nothing to say
        self.keys = like.new_empty(shape.num_kv_heads, 0, page_size, shape.head_dim)
        self.values = self.keys.new_empty(shape.num_kv_heads, 0, page_size, self.value_width, dtype=self.value_dtype)
        self.summaries: dict[str, Tensor] = {}  # kind -> [num_kv_heads, num_pages, width]
        self.repage(page_size, summaries)

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def value_width(self) -> int:
        """Numbers that the value of a token takes."""
        return self.shape.head_dim

    @property
    def value_dtype(self) -> torch.dtype:
        """Of these numbers."""
        return self.keys.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        widths = ((pool.shape[3], pool.element_size()) for pool in (self.keys, self.values))
        return self.shape.num_kv_heads * sum(width * size for width, size in widths)

    @torch.inference_mode()  # pools outlive the block they were made in
    def append(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Write new tokens of one row, [num_kv_heads, num_new, head_dim], and re-summarise the pages they touch."""
        start, stop = self.lengths[row], self.lengths[row] + keys.shape[1]
        if start == stop:
            return
        self.table.grow(row, -(-stop // self.page_size), -(-self.reserve // self.page_size))
        self._fit_pools()
        self._write(self._slots(row, start, stop), keys, values)
        self.lengths[row] = stop
        self._summarise(row, start // self.page_size, self.summaries)

    @torch.inference_mode()
    def reserve_rows(self, lengths: Sequence[int]) -> None:
        """Keep pages for rows of these lengths, and a scratch page: up to them, no pool will move."""
        if self.scratch is None:
            self.scratch = self.table.take()
        for row, length in enumerate(lengths):
            self.table.reserve(row, -(-length // self.page_size))
        self._fit_pools(spare=False)

    def clear(self) -> None:
        """Forget all tokens; the pools stay."""
        self.table.clear()
        self.lengths = [0] * self.num_rows

    @torch.inference_mode()
    def advance(self, row: int, length: int, stale_from: int | None = None) -> None:
        """A kernel has written tokens of a row up to ``length`` into the pages it had reserved; summaries too, but for
        those of the tokens from position ``stale_from`` on."""
        self.table.grow(row, -(-length // self.page_size))
        self.lengths[row] = length
        if stale_from is not None:
            self._summarise(row, stale_from // self.page_size, self.summaries)

    def row(self, row: int) -> RowReader:
        """What one sequence holds, in logical order."""
        return RowReader(self, row)

    @torch.inference_mode()
    def repage(self, page_size: int, summaries: Iterable[str]) -> None:
        """Maintain these summaries and no others from now on; copies the store if the page size changes."""
        if page_size != self.page_size:
            other = self._empty_like(page_size, summaries)
            for row in range(self.num_rows):
                other.append(row, self.row(row).keys(), self.row(row).values())
            self.__dict__.update(other.__dict__)
        for kind in self.summaries.keys() - set(summaries):
            del self.summaries[kind]
        for kind in summaries:
            if kind not in self.summaries:
                self._add_summary(kind)

    def _empty_like(self, page_size: int, summaries: Iterable[str]) -> DeviceStore:
        return DeviceStore(self.shape, self.num_rows, page_size, self.keys, summaries, self.reserve)

    def _write(self, slots: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        self.keys.flatten(1, 2)[:, slots] = keys
        self.values.flatten(1, 2)[:, slots] = values

    def _add_summary(self, kind: str) -> None:
        of = SUMMARIES[kind]
        self.summaries[kind] = self.keys.new_empty(*self.keys.shape[:2], of.width(self.shape.head_dim), dtype=of.dtype)
        for row in range(self.num_rows):
            self._summarise(row, 0, [kind])

    @torch.inference_mode()
    def crop(self, row: int, length: int) -> None:
        """Forget the tokens of a row from position ``length`` on."""
        if length >= self.lengths[row]:
            return
        self.lengths[row] = length
        self.table.shrink(row, -(-length // self.page_size))
        self._own_partial_page(row)
        self._summarise(row, length // self.page_size, self.summaries)

    @torch.inference_mode()
    def fork(self, sources: Sequence[int]) -> None:
        """Row i becomes a copy of row ``sources[i]``; full pages are shared, the page being filled is copied."""
        self.table.fork(sources)
        self.lengths = [self.lengths[source] for source in sources]
        for row in range(self.num_rows):
            self._own_partial_page(row)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for keys, values and summaries."""
        return sum(pool.numel() * pool.element_size() for pool in (self.keys, self.values, *self.summaries.values()))

    @property
    def num_device_bytes(self) -> int:
        """Bytes on the device of the model: here, all of them."""
        return self.num_bytes

    def _own_partial_page(self, row: int) -> None:
        if self.lengths[row] % self.page_size == 0:
            return
        copy = self.table.unshare_last(row)
        if copy is None:
            return
        self._fit_pools()
        for pool in (self.keys, self.values, *self.summaries.values()):
            pool[:, copy[1]] = pool[:, copy[0]]

    def _fit_pools(self, spare: bool = True) -> None:
        have, need = self.keys.shape[1], self.table.num_pages
        if need <= have:
            return
        target = max(need, 2 * have) if spare and have else need
        self.keys, self.values = (_grown(pool, target, self.pinned) for pool in (self.keys, self.values))
        self.summaries = {kind: _grown(pool, target) for kind, pool in self.summaries.items()}

    def _slots(self, row: int, start: int, stop: int) -> slice | Tensor:
        """Where positions start to stop of a row lie in a pool whose pages are flattened."""
        first = self.table.run_start(row)
        if first is not None:
            return slice(first * self.page_size + start, first * self.page_size + stop)
        positions = torch.arange(start, stop)
        pages = torch.tensor(self.table.rows[row], dtype=torch.int64)  # of an empty list it would be float
        slots = pages[positions // self.page_size] * self.page_size + positions % self.page_size
        return slots.to(self.keys.device)

    def _pages(self, row: int, first: int, stop: int) -> slice | Tensor:
        start = self.table.run_start(row)
        if start is not None:
            return slice(start + first, start + stop)
        return torch.tensor(self.table.rows[row][first:stop], dtype=torch.int64, device=self.keys.device)

    def _summarise(self, row: int, first_page: int, kinds: Iterable[str]) -> None:
        # Always from the keys themselves, never from the old summary: token by token, by chunk and after a
        # roll-back the row is the same, bit for bit. At most one page is read twice.
        stop_page = len(self.table.rows[row])
        if first_page >= stop_page or not kinds:
            return
        whole, rest = divmod(self.lengths[row], self.page_size)
        runs: list[tuple[int, int, Tensor | None]] = [(first_page, whole, None)]
        if rest:  # only the last page is not full
            runs.append((whole, stop_page, torch.arange(self.page_size, device=self.keys.device).unsqueeze(0) < rest))
        for first, stop, valid in runs:
            pages = self._pages(row, first, stop)
            for kind in kinds if first < stop else ():
                rows = summarise(kind, self.keys[:, pages], valid)
                self.summaries[kind][:, pages] = rows.to(self.summaries[kind].device)


class RowReader:
    """One sequence of a store in logical order (``types.KVReader``); views where pages are consecutive."""

    def __init__(self, store: DeviceStore, row: int) -> None:
        self._store, self._row = store, row

    @property
    def page_size(self) -> int:
        return self._store.page_size

    @property
    def length(self) -> int:
        return self._store.lengths[self._row]

    @property
    def is_view(self) -> bool:
        """Whether the row's pages are consecutive, so that reading it copies nothing."""
        return self._store.table.run_start(self._row) is not None

    def keys(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[num_kv_heads, stop - start, head_dim]; everything by default."""
        return self._store.keys.flatten(1, 2)[:, self._slots(start, stop)]

    def values(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[num_kv_heads, stop - start, head_dim]; everything by default."""
        return self._store.values.flatten(1, 2)[:, self._slots(start, stop)]

    def _slots(self, start: int, stop: int | None) -> slice | Tensor:
        return self._store._slots(self._row, start, self.length if stop is None else stop)

    def summary(self, kind: str, units: slice | Tensor) -> Tensor:
        """[num_kv_heads, len(units), width]; of pages chosen per head, [num_heads, count]: [num_heads, count, width]"""
        pool = self._store.summaries[kind]
        if isinstance(units, slice):
            return pool[:, self._store._pages(self._row, units.start, units.stop)]
        return pool[self._kv_heads(units), self._physical(units, 1)]

    def keys_of(self, pages: Tensor) -> Tensor:
        """Keys of complete pages chosen per head, [num_heads, count]: [num_heads, count * page_size, head_dim]"""
        return self._gathered(self._store.keys, self._places(pages, self.page_size), self.page_size)

    def paged(self) -> Rows:
        """The pools, and where in them the row lies."""
        store, first = self._store, self._store.table.run_start(self._row)
        pages, device = store.table.rows[self._row], store.keys.device
        if first is None:
            table = torch.tensor(pages, dtype=torch.int32).to(device, non_blocking=True)
        else:
            table = torch.arange(first, first + len(pages), dtype=torch.int32, device=device)
        return Rows(store.keys, store.values, table)

    def counted(self, remembered: Tensor) -> Tensor:
        """The tensor itself."""
        return remembered

    def borrow(self, start: int, stop: int) -> Tensor:
        """As ``keys``."""
        return self.keys(start, stop)

    def count_bytes(self, num_bytes: int) -> None:
        """Nobody counts here."""

    def gather(self, granules: Tensor, granule_size: int) -> tuple[Tensor, Tensor]:
        """Keys and values of chosen tokens, copied out of the pools.

        Args:
            granules: int64 [num_heads, count], runs of ``granule_size`` tokens by logical index, -1 for none;
                num_heads is a multiple of the KV heads. ``granule_size`` divides the page size.

        Returns:
            Two tensors [num_heads, count * granule_size, head_dim]; what a -1 or the unwritten tail of the last
            page yields is undefined.
        """
        index = self._places(granules.clamp_min(0), granule_size)
        keys, values = (self._gathered(pool, index, granule_size) for pool in (self._store.keys, self._store.values))
        return keys, values

    def _places(self, granules: Tensor, granule_size: int) -> Tensor:
        """Where granules chosen per head lie in a pool flattened to rows of ``granule_size`` tokens."""
        per_page = self._store.page_size // granule_size
        heads = self._kv_heads(granules) * (self._store.keys.shape[1] * per_page)
        return self._physical(granules, per_page) + heads

    def _gathered(self, pool: Tensor, index: Tensor, granule_size: int) -> Tensor:
        # one index_select over rows of granule_size tokens: each is one contiguous copy
        chosen = pool.view(-1, granule_size * pool.shape[3]).index_select(0, index.flatten())
        return chosen.view(index.shape[0], -1, pool.shape[3])

    def _physical(self, granules: Tensor, per_page: int) -> Tensor:
        """Where logical granules lie in the pools, ``per_page`` of them in a page."""
        first = self._store.table.run_start(self._row)
        if first is not None:
            return granules + first * per_page
        pages = torch.tensor(self._store.table.rows[self._row], device=granules.device)
        return pages[granules // per_page] * per_page + granules % per_page

    def _kv_heads(self, units: Tensor) -> Tensor:
        """The KV head of each row of units chosen per head, [num_heads, 1]."""
        num_heads = units.shape[0]
        heads = torch.arange(num_heads, device=units.device) // (num_heads // self._store.shape.num_kv_heads)
        return heads.unsqueeze(1)


def _grown(pool: Tensor, num_pages: int, pinned: bool = False) -> Tensor:
    grown = pool.new_empty(pool.shape[0], num_pages, *pool.shape[2:])
    if pinned:
        pin(grown)
    grown[:, : pool.shape[1]] = pool
    return grown
