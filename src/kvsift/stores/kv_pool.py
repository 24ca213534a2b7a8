"""Tensors behind a pool of pages: keys, values and page summaries of every layer.

Pools are [num_kv_heads, num_pages, page_size, head_dim]: a run of pages is a view [num_kv_heads, tokens, head_dim], so
attention over it copies nothing. A page's summary has the page's own number, so whatever shares, copies or returns a
page includes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsift.errors import UnsupportedPlan
from kvsift.kernels.coded_pages import codes_of, read_rows, write_rows
from kvsift.kernels.page_summary import row_format, summarise_pages
from kvsift.native.coded_rows import coded_width, decode_rows, encode_rows
from kvsift.native.memory import huge_empty
from kvsift.stores.page_pool import PagePool, PoolLock, Run
from kvsift.stores.transfers import pinned_empty
from kvsift.types import LayerShape

NOISE_PAGES = 2048  # written at once


class LayerPool:
    """Keys, values and page summaries of one layer, grown with the pool of pages.

    Args:
        shape: the layer.
        page_size: tokens per page.
        like: a tensor with the device of the keys, and the dtype in which they come.
        pages: counts references to its pages.
        coded_keys, coded_values: keep codes of 8 bits (``native.coded_rows``) instead.
        by_page: codes of a page lie together (``kernels.coded_pages``); by default rows do, as the compiled core reads.
        side_by_side: a token's value lies behind its key. A device that reads few tokens over the bus mostly waits for
            addresses, and finds both by one; the compiled core reads neither in place then.
        pinned: use page-locked host memory, which this device reads and writes on its own.

    Attributes:
        keys, values: [num_kv_heads, num_pages, page_size, width].
        stored: the tensors that hold them, contiguous: one if they are side by side, else both.
        head_dim, dtype: those of keys and values as they are appended and read.
        token_bytes: bytes of keys and values of one token.
        on_host: whether keys and values are in memory that the compiled core reads, and as it reads them.
        summaries: kind -> [num_kv_heads, num_pages, width].
        lock: held while tokens are written or the tensors grow.
        moves: how often tensors were replaced.
    """

    def __init__(
        self, shape: LayerShape, page_size: int, like: Tensor, pages: PagePool, *, coded_keys: bool = False,
        coded_values: bool = False, by_page: bool = False, side_by_side: bool = False,
        pinned: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.page_size, self.pages, self.lock = page_size, pages, PoolLock()
        self.head_dim, self.dtype = shape.head_dim, like.dtype
        self.coded_keys, self.coded_values, self.by_page = coded_keys, coded_values, by_page
        self._pinned = pinned
        self.moves = 0
        widths = [coded_width(shape.head_dim) if coded else shape.head_dim for coded in (coded_keys, coded_values)]
        dtypes = [torch.int8 if coded else like.dtype for coded in (coded_keys, coded_values)]
        if side_by_side:
            widths, dtypes = [sum(widths)], dtypes[:1]
        self.stored = tuple(
            like.new_empty(shape.num_kv_heads, 0, page_size, width, dtype=dtype) for width, dtype in zip(widths, dtypes)
        )
        self.keys, self.values = self.parts(self.stored)
        self.token_bytes = sum(len(pool) * pool.shape[3] * pool.element_size() for pool in (self.keys, self.values))
        self.on_host = self.keys.is_cpu and not by_page and not side_by_side
        self.summaries: dict[str, Tensor] = {}
        self._users: weakref.WeakKeyDictionary[object, tuple[str, ...]] = weakref.WeakKeyDictionary()

    @property
    def tensors(self) -> list[Tensor]:
        return [self.keys, self.values, *self.summaries.values()]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def has_room(self) -> bool:
        """Whether there is memory for every page."""
        return self.pages.num_pages <= self.keys.shape[1]

    def fit(self, exactly: bool = False, spare: int = 0) -> None:
        """Allocate memory for every page, and by default for as many again as there were; ``exactly``: for ``spare``
        more pages."""
        present, needed = self.keys.shape[1], self.pages.num_pages
        if needed <= present:
            return
        target = needed + spare if exactly else max(needed, 2 * present)
        stored = tuple(_grown(pool, target, self._new_tokens) for pool in self.stored)
        summaries = {kind: _grown(pool, target, _new_summaries) for kind, pool in self.summaries.items()}
        self.stored, self.summaries = stored, summaries  # all or none, should memory be short
        self.keys, self.values = self.parts(stored)
        self.moves += 1

    def _new_tokens(self, like: Tensor, sizes: tuple[int, ...]) -> Tensor:
        return like.new_empty(sizes) if self._pinned is None else pinned_empty(like, sizes, self._pinned)

    def maintain(self, user: object, kinds: Iterable[str], device: torch.device | None = None) -> None:
        """Note the kinds of page summary that a store maintains, each stored from now on; drop those that none does."""
        with self.lock:  # else two stores could both make room, and one would write into what the other replaces
            self._users[user] = tuple(kinds)
            for kind in self._users[user]:
                if kind not in self.summaries:
                    width, dtype = row_format(kind, self.head_dim, self.page_size)
                    sizes = *self.keys.shape[:2], width
                    like = self.keys.new_empty(0, dtype=dtype or self.dtype, device=device)
                    self.summaries[kind] = _new_summaries(like, sizes)
                    self.moves += 1
            for kind in self.summaries.keys() - {kind for user in self._present_users() for kind in self._users[user]}:
                del self.summaries[kind]

    def is_used_only_by(self, user: object) -> bool:
        """Whether no other store than ``user`` maintains these tensors."""
        return all(other is user for other in self._present_users())

    def _present_users(self) -> list[object]:
        """A copy: stores of other threads may go while it is read."""
        return [user for user in [reference() for reference in self._users.keyrefs()] if user is not None]

    def write_noise(self, runs: Iterable[Run]) -> None:
        """Write random numbers, and their summaries, into unused pages: steps over them can be timed."""
        for start, stop in runs:
            for first in range(start, stop, NOISE_PAGES):
                pages = slice(first, min(first + NOISE_PAGES, stop))
                sizes = len(self.keys), pages.stop - first, self.page_size, self.head_dim
                keys, values = (torch.randn(sizes, dtype=self.dtype, device=self.keys.device) for _ in range(2))
                slots = slice(pages.start * self.page_size, pages.stop * self.page_size)
                self.write(slots, *(new.flatten(1, 2) for new in self.rows_of(keys, values)))
                for kind, rows in self.summaries.items():
                    rows[:, pages] = summarise_pages(kind, *self.as_read, pages, rows)

    @staticmethod
    def parts(rows: Sequence[Tensor]) -> Sequence[Tensor]:
        """Keys and values, views of rows [..., width] of ``stored``."""
        return rows if len(rows) == 2 else rows[0].chunk(2, -1)

    def joined(self, rows: Sequence[Tensor]) -> Sequence[Tensor]:
        """The reverse of ``parts``, a copy if they are side by side."""
        return rows if len(self.stored) == 2 else [torch.cat([*rows], -1)]

    def rows_of(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, [..., head_dim], as they are stored."""
        if self.coded_keys and keys.dtype != torch.int8:  # else they were read as they are stored
            keys = encode_rows(keys, turned=True)
        return keys, encode_rows(values) if self.coded_values and values.dtype != torch.int8 else values

    def keys_of(self, rows: Tensor) -> Tensor:
        """Stored keys, [..., width], as they are read: [..., head_dim]."""
        return decode_rows(rows, self.dtype, turned=True) if self.coded_keys else rows

    def values_of(self, rows: Tensor) -> Tensor:
        """As ``keys_of``."""
        return decode_rows(rows, self.dtype) if self.coded_values else rows

    @property
    def as_read(self) -> tuple[Tensor, Tensor]:
        """Keys and values as kernels read them (``kernels.paged.PagedKV``)."""
        return (codes_of(self.keys), codes_of(self.values)) if self.by_page else (self.keys, self.values)

    def write(self, slots: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        """Write tokens in the form in which they are stored, [num_kv_heads, count, width], to slots of pages that are
        flattened."""
        for pool, rows in ((self.keys, keys), (self.values, values)):
            if self.by_page:
                write_rows(codes_of(pool), *self._places(slots), rows)
            else:
                pool.flatten(1, 2)[:, slots] = rows

    def read(self, pool: Tensor, slots: slice | Tensor) -> Tensor:
        """Return what ``write`` has written to keys or values, a view where it can be; or rows of ``stored``."""
        if self.by_page:
            return read_rows(codes_of(pool), *self._places(slots))
        rows = pool.flatten(1, 2)[:, slots]
        return rows if pool.is_contiguous() else rows.contiguous()

    def _places(self, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop, device=self.keys.device)
        return slots // self.page_size, slots % self.page_size

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page with its summaries."""
        for tensor in self.tensors:
            tensor[:, target] = tensor[:, source]


@dataclass
class KVPool:
    """Pages and tensors of all layers; several caches, and so several documents, may share it.

    Attributes:
        pages: which pages are free.
        layers: layers by true layer index.
        steady: what is attended must not depend, in any bit, on where its pages lie.
    """

    pages: PagePool = field(default_factory=PagePool)
    layers: dict[int, LayerPool] = field(default_factory=dict)
    steady: bool = False

    def layer(self, index: int, page_size: int, make: Callable[[PagePool], LayerPool]) -> LayerPool:
        """Tensors of a layer, made when they are first needed."""
        with self.pages.lock:
            pool = self.layers.get(index)
            if pool is None:
                pool = self.layers[index] = make(self.pages)
        if pool.page_size != page_size:
            raise UnsupportedPlan(
                f"the pool has pages of {pool.page_size} tokens, and the plan needs pages of {page_size}. Give the "
                f"plan page_size={pool.page_size}, or the cache a pool of its own."
            )
        return pool

    @property
    def moves(self) -> int:
        """How often tensors were replaced."""
        return sum(layer.moves for layer in self.layers.values())

    def leave(self, index: int, user: object) -> None:
        """Free the tensors of a layer unless another store than ``user`` uses them."""
        with self.pages.lock:
            if index in self.layers and self.layers[index].is_used_only_by(user):
                del self.layers[index]


def granules_of(pool: Tensor, granule_size: int) -> Tensor:
    """View keys or values of a pool as granules in the order of heads and slots, [count, granule_size, width]."""
    return pool.flatten(0, 2).unflatten(0, (-1, granule_size))


def _grown(pool: Tensor, num_pages: int, make: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Tensor:
    grown = make(pool, (pool.shape[0], num_pages, *pool.shape[2:]))
    grown[:, : pool.shape[1]] = pool
    return grown


def _new_summaries(like: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Every step reads all of these in order, so they are worth huge pages. Of keys and values it reads few, and they
    would take memory that is not written yet."""
    return huge_empty(sizes, like.dtype) if like.is_cpu else like.new_empty(sizes)
