"""KV that is evicted for good: a sequence keeps the tokens that a method keeps, and the rest of its memory is freed.

Until something is evicted a sequence is a ``PagedStore`` of its own, so that its pages are among no other sequence's.
Then it becomes two tensors with the tokens that are left, in their order, equally many for every KV head. Tokens keep
their positions: sinks and window are the same for all heads, and a list per head names the tokens between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvsift.errors import EvictedTokens
from kvsift.stores.base import Attended, Segment, Select, Store, View
from kvsift.stores.page_table import PageTable
from kvsift.stores.paged import PagedStore
from kvsift.stores.parts import attend_dense, attend_repositioned, attend_spans, attend_sparse
from kvsift.stores.reader import RowReader
from kvsift.types import LayerShape, Part, Selection

ROOM = 64  # tokens that can be appended before a sequence is copied


@dataclass
class LeftTokens:
    """The tokens that are left of a sequence: sinks below ``first``, chosen ones, and all from position ``stop`` on."""

    first: int
    stop: int
    chosen: Tensor  # int64 [num_kv_heads, num_chosen], positions between first and stop, ascending
    keys: Tensor  # [num_kv_heads, capacity, head_dim]
    values: Tensor
    count: int

    def slot(self, position: int) -> int:
        """The slot of a position that is the same for all heads."""
        if position <= self.first:
            return position
        assert position >= self.stop, "between sinks and window every head has tokens of its own"
        return position - self.stop + self.first + self.chosen.shape[1]

    def slots(self, tokens: Tensor) -> Tensor:
        """Slots of tokens that are left, int64 [num_kv_heads, count]."""
        tokens = tokens.contiguous()
        chosen = torch.searchsorted(self.chosen, tokens) + self.first
        recent = tokens - self.stop + self.first + self.chosen.shape[1]
        return torch.where(tokens < self.first, tokens, torch.where(tokens < self.stop, chosen, recent))

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add new tokens, [num_kv_heads, num_new, head_dim]."""
        start, stop = self.count, self.count + keys.shape[1]
        if stop > self.keys.shape[1]:
            self.keys, self.values = (_with_room(pool[:, :start], stop - start) for pool in (self.keys, self.values))
        self.keys[:, start:stop], self.values[:, start:stop] = keys, values
        self.count = stop


class EvictingStore(Store):
    """Sequences of one layer that can evict tokens; freed memory cannot be restored.

    Attributes:
        row_stores: a ``PagedStore`` of one sequence for each.
        left: what is left of the sequences that have evicted tokens.
    """

    evicts = True
    captures = False

    def __init__(self, row_stores: Sequence[PagedStore]) -> None:
        self.row_stores = list(row_stores)
        self.shape, self.page_size = row_stores[0].shape, row_stores[0].page_size
        self.left: dict[int, LeftTokens] = {}
        self._checkpoints: dict[int, tuple[int, LeftTokens]] = {}  # sequences' lengths, and the tokens left of them
        self._lengths = {row: store.lengths[0] for row, store in enumerate(row_stores)}

    @classmethod
    def of(cls, store: Any) -> EvictingStore:
        """A store that continues with what a ``PagedStore`` holds; each sequence is copied to a pool of its own."""
        rows = []
        for row in range(store.num_rows):
            rows.append(store.empty_copy(1, reserve=store.reserve))
            reader = store.reader(row)
            rows[row].append(0, reader.keys(), reader.values())
        store.leave_pool()
        return cls(rows)

    def whole(self, table: PageTable | None) -> PagedStore:
        """A store in the pages of ``table`` that continues with these sequences, of which nothing is evicted."""
        assert not self.left
        store = self.row_stores[0].empty_copy(len(self.row_stores), table)
        for row, one in enumerate(self.row_stores):
            reader = one.reader(0)
            store.append(row, reader.keys(), reader.values())
        return store

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return [
            self._lengths[row] if row in self.left else store.lengths[0] for row, store in enumerate(self.row_stores)
        ]

    @property
    def token_bytes(self) -> int:  # type: ignore[override]
        return self.row_stores[0].token_bytes

    @property
    def num_bytes(self) -> int:
        left = [*self.left.values(), *(tokens for _, tokens in self._checkpoints.values())]
        tensors = {id(tensor): tensor for tokens in left for tensor in (tokens.keys, tokens.values, tokens.chosen)}
        pools = {id(store.pool): store.pool.num_bytes for store in self.row_stores}  # forks share one
        return sum(pools.values()) + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def num_stored(self, row: int) -> int:
        return self.left[row].count if row in self.left else self.row_stores[row].lengths[0]

    @torch.inference_mode()  # pools outlive the block they were made in
    def append(self, row: int, keys: Tensor, values: Tensor) -> None:
        if row not in self.left:
            self.row_stores[row].append(0, keys, values)
            return
        self.left[row].append(keys, values)
        self._lengths[row] += keys.shape[1]

    def reader(self, row: int) -> RowReader:
        """What is left of a sequence, in its order."""
        store = self.row_stores[row]
        if row not in self.left:
            return store.reader(0)
        return LeftReader(store, self.left[row], self._lengths[row])

    def attend_all(self, row: int, segment: Segment) -> Part:
        return attend_dense(self.shape, segment, self.reader(row))

    def attend(self, row: int, segment: Segment, view: View, select: Select) -> Attended:
        """As ``Store.attend``; with ``view.evict`` what the first query does not see is evicted."""
        reader = self.reader(row)
        selection = select(segment, reader)
        attend = attend_sparse
        if view.evict:
            (sinks_stop, window_start), device = view.spans[0], segment.queries.device
            chosen = torch.empty(1, 0, dtype=torch.int64, device=device) if selection is None else selection.units
            self.evict(row, sinks_stop, chosen, min(window_start, segment.stop))
            attend = _attend_left if view.reposition is None else attend_repositioned
        part, visible = attend(self.shape, segment, self.reader(row), view, selection)
        return Attended(part, selection, visible)

    @torch.inference_mode()
    def evict(self, row: int, first: int, chosen: Tensor, stop: int) -> None:
        """Evict what is not below ``first``, not chosen and not from ``stop`` on; chosen int64 [num_kv_heads, count],
        ascending, or one row for all."""
        left, reader, length = self.left.get(row), self.reader(row), self.lengths[row]
        chosen = chosen.expand(self.shape.num_kv_heads, -1)
        if chosen.shape[1] == stop - first:
            return
        slots = chosen if left is None else left.slots(chosen)
        count = first + chosen.shape[1] + length - stop
        pools = [_left_tokens(read, first, slots, stop, count) for read in (reader.keys, reader.values)]
        self.left[row] = LeftTokens(first, stop, chosen.contiguous(), pools[0], pools[1], count)
        self._lengths[row] = length
        if left is None:
            self.row_stores[row] = self.row_stores[row].empty_copy(1)

    def checkpoint(self) -> None:
        """As ``Store.checkpoint``; what is left now stays in memory once more."""
        # nothing is written among the tokens of a sequence that has evicted some: what is left now can be shared
        self._checkpoints = {row: (self._lengths[row], replace(left)) for row, left in self.left.items()}

    def can_crop(self, row: int, length: int) -> bool:
        checkpoint = self._checkpoints.get(row)
        return (
            row not in self.left or length >= self._lengths[row] or (checkpoint is not None and checkpoint[0] == length)
        )

    def check_crop(self, row: int, length: int) -> None:
        if not self.can_crop(row, length):
            evicted = self._lengths[row] - self.num_stored(row)
            raise EvictedTokens(
                f"this cache cannot go back from {self._lengths[row]} tokens to {length}: {evicted} of them were "
                "dropped for good to make room for the last ones (evict=true). Read the text again into a new cache, "
                "or leave evict out: the same tokens are then only hidden."
            )

    def crop(self, row: int, length: int) -> None:
        self.check_crop(row, length)
        if row not in self.left:
            self.row_stores[row].crop(0, length)
        elif length < self._lengths[row]:
            self._lengths[row], self.left[row] = length, replace(self._checkpoints[row][1])

    def fork(self, sources: Sequence[int]) -> None:
        left = {row: self.left[source] for row, source in enumerate(sources) if source in self.left}
        self._lengths = dict(enumerate(self._lengths[source] for source in sources))
        self.row_stores = [self.row_stores[source].copy_of_row(0) for source in sources]
        self.left = {
            row: replace(tokens, keys=tokens.keys.clone(), values=tokens.values.clone()) for row, tokens in left.items()
        }
        self._checkpoints.clear()

    def repage(self, page_size: int, summaries: Iterable[str]) -> None:
        """As ``Store.repage``.

        Raises:
            InputError: if something was evicted.
        """
        if self.left:
            raise EvictedTokens(
                "this cache has dropped tokens for good (evict=true), so no other plan can go on with it. Start with "
                "an empty cache, or leave evict out."
            )
        kinds, self.page_size = tuple(summaries), page_size
        for store in self.row_stores:
            store.repage(page_size, kinds)


class LeftReader(RowReader):
    """What is left of a sequence, in logical order; positions are those of the sequence.

    A range of positions yields the tokens of it that are left; it begins and ends where all heads have the same.
    """

    def __init__(self, store: PagedStore, left: LeftTokens, length: int) -> None:
        super().__init__(store.pool, store.table, 0, length, store.summarise_open_page)
        self._left = left

    @property
    def in_place(self) -> bool:
        return False  # tokens are not at their positions

    def keys(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[num_kv_heads, number of tokens left from start to stop, head_dim]; everything by default."""
        return self._left.keys[:, self._range(start, stop)]

    def values(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[num_kv_heads, number of tokens left from start to stop, head_dim]; everything by default."""
        return self._left.values[:, self._range(start, stop)]

    def _range(self, start: int, stop: int | None) -> slice:
        return slice(self._left.slot(start), self._left.slot(self.length if stop is None else stop))


def _attend_left(
    shape: LayerShape, segment: Segment, reader: RowReader, view: View, selection: Selection | None
) -> tuple[Part, int | float | Tensor]:
    """Attend everything that is left; with how many tokens that is, summed over queries. The view says where windows
    begin, if they slide within the segment."""
    if len(view.spans) > 1:
        return attend_spans(shape, segment, reader, view.spans)
    num_queries = segment.num_queries
    visible = num_queries * reader.keys(0, segment.stop).shape[1] - num_queries * (num_queries - 1) // 2
    return attend_dense(shape, segment, reader), visible


def _left_tokens(read: Callable[..., Tensor], first: int, slots: Tensor, stop: int, count: int) -> Tensor:
    """What ``read`` yields below ``first``, at ``slots`` of each head and from ``stop`` on, and room for more."""
    tokens = read()
    left = tokens.new_empty(tokens.shape[0], count + ROOM, tokens.shape[2])
    heads, last = torch.arange(len(tokens), device=tokens.device).unsqueeze(1), first + slots.shape[1]
    left[:, :first], left[:, first:last], left[:, last:count] = read(0, first), tokens[heads, slots], read(stop)
    return left


def _with_room(tokens: Tensor, num_new: int) -> Tensor:
    count = tokens.shape[1]
    room = tokens.new_empty(tokens.shape[0], count + num_new + ROOM, tokens.shape[2])
    room[:, :count] = tokens
    return room
