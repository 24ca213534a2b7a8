"""The cache of one layer in vLLM's blocks, with the page summaries that kvsift keeps beside it, and sparse attention of
one generated token over it, by the composed path of ``layer.sparse_attention``.

Summaries are keyed by physical block: prefix hits, chunked prefill and preempted requests find them, or write them
again, like the keys themselves. A row is computed from the cache whenever a token is written into its page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.errors import UnsupportedCall
from kvsift.kernels.merge import with_sink_logit
from kvsift.kernels.page_summary import row_format, summarise
from kvsift.layer.accounting import Tally
from kvsift.layer.layer_messages import LayerMessages
from kvsift.layer.probe import probe
from kvsift.layer.selection import Selector, view_of, with_estimates
from kvsift.methods.common.anchors import Reuse
from kvsift.native.shapes import HeadRows, PooledRows
from kvsift.plan.plan import Rule
from kvsift.stores.base import Segment
from kvsift.stores.parts import attend_sparse
from kvsift.stores.reader import RowReader
from kvsift.types import LayerShape

Summaries = tuple[tuple[str, int], ...]  # kinds, each with its page size
PAGES_AT_ONCE = 512  # bounds temporary memory
Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]  # keys, values, cache, slots
BASE = 128  # digits that every dtype of a cache holds exactly


class BlockLayout(NamedTuple):
    """Places of the numbers of a token within a block of one KV head, found by letting vLLM's kernels write one.

    On a CPU the order depends on the instruction set: keys are transposed within a block on most, so a kernel that
    writes is the only description that holds for all.
    """

    keys: Tensor  # int64 [block_size, head_dim]
    values: Tensor  # int64 [block_size, head_dim]

    @property
    def block_size(self) -> int:
        return self.keys.shape[0]

    @classmethod
    def find(cls, cache: Tensor, write: Write) -> BlockLayout:
        """Return the layout of a cache [num_blocks, num_kv_heads, block_size, 2 * head_dim] that ``write`` fills.

        ``write`` takes keys and values [block_size, num_kv_heads, head_dim] and slots int64 [block_size].

        Raises:
            InputError: if it does not write every number to a place of its own.
        """
        _, heads, block_size, width = cache.shape
        shape = (block_size, width // 2)
        ids = torch.arange(1, block_size * width + 1).view(2, *shape)  # of keys, then of values; 0 is never written
        seen = torch.zeros(block_size * width, dtype=torch.int64)
        for power in range(3):
            digits = (ids // BASE**power % BASE).to(cache.dtype).unsqueeze(2).expand(2, block_size, heads, shape[1])
            scratch = torch.zeros(2, *cache.shape[1:], dtype=cache.dtype)
            write(digits[0].contiguous(), digits[1].contiguous(), scratch, torch.arange(block_size) + block_size)
            seen += scratch[1, -1].flatten().to(torch.int64) * BASE**power
        order = seen.argsort()
        if not torch.equal(seen[order], ids.flatten()):
            raise UnsupportedCall(
                "this vLLM packs the numbers of its KV cache in a way that kvsift does not know. Take --dtype float32, "
                "or start vLLM without the kvsift settings."
            )
        return cls(*order.view(2, *shape))

    def read(self, cache: Tensor, order: Tensor, blocks: Tensor, offsets: Tensor, heads: Tensor) -> Tensor:
        """Return numbers of tokens, [..., head_dim]; ``order`` is ``keys`` or ``values``.

        blocks, offsets, heads int64 that broadcast to [...]: the block of each token, its place in it, and its head.
        """
        numbers = cache.view(-1)  # raises where this would be a copy of the cache
        in_block = cache.shape[2] * cache.shape[3]
        places = ((blocks * cache.shape[1] + heads) * in_block).unsqueeze(-1) + order[offsets]
        return numbers.index_select(0, places.flatten()).view(places.shape)  # twice as fast as numbers[places]


class BlockCache:
    """Keys, values and page summaries of one layer.

    Args:
        kv: [num_blocks, num_kv_heads, block_size, 2 * head_dim], as vLLM allocates it.
        layout: layout of a block.
        summaries: summaries to maintain; page sizes divide the block size.

    Attributes:
        rows: rows by kind and page size, [num_kv_heads, num_blocks * block_size / page_size, width].
    """

    def __init__(self, kv: Tensor, layout: BlockLayout, summaries: Summaries) -> None:
        self.kv, self.layout = kv, layout
        num_blocks, self.num_kv_heads, self.block_size, width = kv.shape
        self.head_dim = width // 2
        self.rows: dict[tuple[str, int], Tensor] = {}
        for kind, page_size in summaries:
            row_width, dtype = row_format(kind, self.head_dim, page_size)
            shape = (self.num_kv_heads, num_blocks * (self.block_size // page_size), row_width)
            self.rows[kind, page_size] = torch.zeros(shape, dtype=dtype or kv.dtype)

    @property
    def summary_bytes(self) -> int:
        """Bytes of all summaries."""
        return sum(rows.nbytes for rows in self.rows.values())

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return self.num_kv_heads * 2 * self.head_dim * self.kv.element_size()

    def keys(self, slots: Tensor) -> Tensor:
        """Keys at slots int64 [.., n]: for every KV head [num_kv_heads, n, head_dim] if there is one list of them, else
        those of the heads in order, the lists of as many consecutive query heads for each."""
        return self._read(self.layout.keys, slots)

    def values(self, slots: Tensor) -> Tensor:
        """As ``keys``."""
        return self._read(self.layout.values, slots)

    def _read(self, order: Tensor, slots: Tensor) -> Tensor:
        lists = self.num_kv_heads if slots.dim() == 1 else len(slots)
        heads = torch.arange(lists).unsqueeze(1) // (lists // self.num_kv_heads)
        return self.layout.read(self.kv, order, slots // self.block_size, slots % self.block_size, heads)

    def summarise(self, slots: Tensor) -> None:
        """Write the summaries of the pages that hold ``slots`` int64 [num_tokens], which vLLM has just written.

        Negative slots are padding. Tokens of a page behind the last of these are not valid yet: vLLM fills a block in
        order, and never two requests one block.
        """
        slots = slots[slots >= 0]
        for (kind, page_size), rows in self.rows.items():
            pages, page_of = (slots // page_size).unique(return_inverse=True)
            last = torch.zeros_like(pages).scatter_reduce_(0, page_of, slots % page_size, "amax")
            offsets = torch.arange(page_size)
            for first in range(0, len(pages), PAGES_AT_ONCE):
                part = slice(first, first + PAGES_AT_ONCE)
                tokens = (pages[part].unsqueeze(1) * page_size + offsets).flatten()
                keys, values = (read(tokens).unflatten(1, (-1, page_size)) for read in (self.keys, self.values))
                valid = offsets <= last[part].unsqueeze(1)
                rows[:, pages[part]] = summarise(kind, keys, None if bool(valid.all()) else valid, values)

    def reader(self, blocks: Tensor, length: int, page_size: int) -> BlockReader:
        """Return a sequence in logical order: blocks int64 [num_blocks of it], tokens cached, tokens per page."""
        return BlockReader(self, blocks, length, page_size)


class BlockReader(RowReader):
    """One sequence in a ``BlockCache``."""

    def __init__(self, cache: BlockCache, blocks: Tensor, length: int, page_size: int) -> None:
        self._cache, self._blocks, self._length, self._page_size = cache, blocks, length, page_size

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def in_place(self) -> bool:
        return False  # the compiled core reads rows, and the numbers of a key are not side by side

    def keys(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self._cache.keys(self._range(start, stop))

    def values(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self._cache.values(self._range(start, stop))

    def _range(self, start: int, stop: int | None) -> Tensor:
        return self._slots(torch.arange(start, self._length if stop is None else stop))

    def _slots(self, positions: Tensor) -> Tensor:
        block_size = self._cache.block_size
        return self._blocks[positions // block_size] * block_size + positions % block_size

    def summary_in_place(self, kind: str, units: slice) -> HeadRows:
        per_block = self._cache.block_size // self._page_size
        runs = torch.stack([self._blocks * per_block, torch.full_like(self._blocks, per_block)], 1)
        return PooledRows(self._cache.rows[kind, self._page_size], runs, units.stop - units.start, units.start)

    def summary(self, kind: str, units: slice | Tensor) -> Tensor:
        rows, per_block = self._cache.rows[kind, self._page_size], self._cache.block_size // self._page_size
        if isinstance(units, slice):
            units = torch.arange(units.start, units.stop)
            return rows[:, self._blocks[units // per_block] * per_block + units % per_block]
        heads = torch.arange(len(units)).unsqueeze(1) // (len(units) // len(rows))
        return rows[heads, self._blocks[units // per_block] * per_block + units % per_block]

    def keys_of(self, pages: Tensor) -> Tensor:
        return self.gather(pages, self._page_size)[0]

    def gather(self, granules: Tensor, granule_size: int) -> tuple[Tensor, Tensor]:
        tokens = granules.clamp_min(0).unsqueeze(-1) * granule_size + torch.arange(granule_size)
        slots = self._slots(tokens.flatten(1).clamp_max(self._length - 1))
        return self._cache.keys(slots), self._cache.values(slots)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a sequence in vLLM's blocks has no {name}")


def attend_token(
    shape: LayerShape, rule: Rule, query: Tensor, cache: BlockCache, blocks: Tensor, length: int, tally: Tally,
    sink_logit: Tensor | None = None, is_probed: bool = False, reuse: Reuse | None = None,
    messages: LayerMessages | None = None, row: int = 0,
) -> Tensor:  # fmt: skip
    """Return the attention of one token, the last of ``length`` cached ones, [num_query_heads, head_dim].

    Args:
        shape: the layer.
        rule: a rule whose methods keep no memory besides page summaries (``settings.read_plan``).
        query: [num_query_heads, head_dim].
        cache: cache of the layer.
        blocks: int64 [num_blocks], physical blocks of the sequence, enough for ``length``.
        length: tokens.
        tally: counts the query.
        sink_logit: [num_query_heads].
        is_probed: compare with exact attention.
        reuse: which selection the layer reuses; None: it selects.
        messages: between the layers of a step, in which layers below pass theirs up; by default there are none.
        row: row of the step, which all layers call alike.
    """
    segment = Segment(query[None, :, None], length - 1, length)
    reader = cache.reader(blocks[: -(-length // cache.block_size)], length, rule.method.summary_page_size)
    messages = LayerMessages() if messages is None else messages
    messages.begin(row, shape.layer)
    selector, view = Selector(shape, rule, "decode", reuse, row, messages, tally), view_of(rule, segment)
    selection = selector.select_in(view)(segment, reader)
    part, visible = attend_sparse(shape, segment, reader, view, selection)
    part = part if selection is None else with_estimates(part, selection)[0]
    part = part if sink_logit is None else with_sink_logit(part, sink_logit)
    tally.add_query(float(visible), length, cache.token_bytes)
    if is_probed:
        tally.add_probe(*probe(shape, query[:, None], reader.keys(), view.spans[0], selection))
    return part.output[0, :, 0]
