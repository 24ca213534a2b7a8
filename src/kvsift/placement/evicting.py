"""KV that is dropped for good: a row keeps what a method kept, side by side, and the rest of its memory is free.

Until something is dropped a row lies in the paged pools, as in any ``DeviceStore``. Then it moves into tensors of its
own that hold the tokens that are left, in their order, equally many for every KV head; its pages are given back, and
the pools shrink. Tokens keep their positions: sinks and window are the same for all heads, and a map per head says
which tokens lie between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.placement.device import DeviceStore, RowReader

ROOM = 64  # tokens that can be appended before a row is copied


@dataclass
class Kept:
    """The tokens of a row that are left: sinks below ``first``, chosen ones, and all from position ``stop`` on."""

    first: int
    stop: int
    chosen: Tensor  # int64 [num_kv_heads, num_chosen], positions between first and stop, ascending
    keys: Tensor  # [num_kv_heads, capacity, head_dim]
    values: Tensor
    num_held: int

    def place(self, position: int) -> int:
        """Where a position lies that is the same for all heads."""
        if position <= self.first:
            return position
        assert position >= self.stop, "between sinks and window every head has tokens of its own"
        return position - self.stop + self.first + self.chosen.shape[1]

    def places(self, tokens: Tensor) -> Tensor:
        """Where tokens lie that are left, int64 [num_kv_heads, count]."""
        tokens = tokens.contiguous()
        among = torch.searchsorted(self.chosen, tokens) + self.first
        behind = tokens - self.stop + self.first + self.chosen.shape[1]
        return torch.where(tokens < self.first, tokens, torch.where(tokens < self.stop, among, behind))


class EvictingStore(DeviceStore):
    """A ``DeviceStore`` whose rows can drop tokens; memory that was freed cannot be asked for again."""

    kept: dict[int, Kept]
    marked: dict[int, tuple[int, Kept]]  # rows' lengths, and what was left of them, when they were marked

    @classmethod
    def over(cls, store: DeviceStore) -> Self:
        """A store that goes on with what another one holds."""
        evicting = cls.__new__(cls)
        evicting.__dict__.update(store.__dict__)
        evicting.kept, evicting.marked = {}, {}
        return evicting

    def has_dropped(self, row: int) -> bool:
        """Whether anything of a row is gone."""
        return row in self.kept

    def num_held(self, row: int) -> int:
        """Tokens of a row that are left."""
        return self.kept[row].num_held if row in self.kept else self.lengths[row]

    @torch.inference_mode()  # pools outlive the block they were made in
    def keep(self, row: int, first: int, chosen: Tensor, stop: int) -> None:
        """Drop what is not below ``first``, not chosen and not from ``stop`` on; chosen int64 [num_kv_heads, count],
        ascending, or one row for all."""
        held, reader = self.kept.get(row), self.row(row)
        chosen = chosen.expand(self.shape.num_kv_heads, -1)
        if chosen.shape[1] == stop - first:
            return
        places = chosen if held is None else held.places(chosen)
        num_held = first + chosen.shape[1] + self.lengths[row] - stop
        pools = [_left(read, first, places, stop, num_held) for read in (reader.keys, reader.values)]
        self.kept[row] = Kept(first, stop, chosen.contiguous(), pools[0], pools[1], num_held)
        if held is None:
            self.table.shrink(row, 0)
            self._shrink_pools()

    def append(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Write new tokens of one row, [num_kv_heads, num_new, head_dim]."""
        if row not in self.kept:
            super().append(row, keys, values)
            return
        kept, num_new = self.kept[row], keys.shape[1]
        start, stop = kept.num_held, kept.num_held + num_new
        with torch.inference_mode():
            if stop > kept.keys.shape[1]:
                kept.keys, kept.values = (_with_room(pool[:, :start], num_new) for pool in (kept.keys, kept.values))
            kept.keys[:, start:stop], kept.values[:, start:stop] = keys, values
        kept.num_held = stop
        self.lengths[row] += num_new

    def row(self, row: int) -> RowReader:
        """What is left of one sequence, in its order."""
        return KeptReader(self, row) if row in self.kept else super().row(row)

    def clear(self) -> None:
        """Forget all tokens; the pools stay."""
        super().clear()
        self.kept.clear()
        self.marked.clear()

    def mark(self) -> None:
        """What is left now may be come back to, of rows that have dropped tokens. It stays in memory once more."""
        # nothing is written among the tokens of a row that has dropped some: what is left now can be shared
        self.marked = {row: (self.lengths[row], replace(kept)) for row, kept in self.kept.items()}

    def can_crop(self, row: int, length: int) -> bool:
        """Whether everything is still there that ``crop`` needs."""
        return row not in self.kept or length >= self.lengths[row] or self._marked_at(row, length)

    def check_crop(self, row: int, length: int) -> None:
        """Refuse to go back behind what was dropped.

        Raises:
            InputError: if this would.
        """
        if not self.can_crop(row, length):
            gone = self.lengths[row] - self.num_held(row)
            raise InputError(
                f"this cache cannot go back from {self.lengths[row]} tokens to {length}: {gone} of them were dropped "
                "for good to make room for the last ones (evict=true). Read the text again into a new cache, or leave "
                "evict out: the same tokens are then only hidden."
            )

    def crop(self, row: int, length: int) -> None:
        """Forget the tokens of a row from position ``length`` on."""
        self.check_crop(row, length)
        if row in self.kept and length < self.lengths[row]:
            self.lengths[row], self.kept[row] = length, replace(self.marked[row][1])
        super().crop(row, length)

    def _marked_at(self, row: int, length: int) -> bool:
        return row in self.marked and self.marked[row][0] == length

    def fork(self, sources: Sequence[int]) -> None:
        """Row i becomes a copy of row ``sources[i]``."""
        copied = {row: self.kept[source] for row, source in enumerate(sources) if source in self.kept}
        self.kept = {
            row: replace(kept, keys=kept.keys.clone(), values=kept.values.clone()) for row, kept in copied.items()
        }
        self.marked.clear()
        super().fork(sources)

    def repage(self, page_size: int, summaries: Iterable[str]) -> None:
        """Maintain these summaries from now on.

        Raises:
            InputError: if something was dropped.
        """
        if getattr(self, "kept", None):
            raise InputError(
                "this cache has dropped tokens for good (evict=true), so no other plan can go on with it. Start with "
                "an empty cache, or leave evict out."
            )
        super().repage(page_size, summaries)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for keys, values and summaries."""
        held = [*self.kept.values(), *(kept for _, kept in self.marked.values())]
        pools = {id(pool): pool for kept in held for pool in (kept.keys, kept.values, kept.chosen)}
        return super().num_bytes + sum(pool.numel() * pool.element_size() for pool in pools.values())

    def _own_partial_page(self, row: int) -> None:
        if row not in self.kept:
            super()._own_partial_page(row)

    def _shrink_pools(self) -> None:
        """Give back the memory of pages that nobody owns, once that is half of it."""
        used = len({page for pages in self.table.rows for page in pages})
        if 2 * used > self.keys.shape[1]:
            return
        pages = torch.tensor(self.table.compact(), dtype=torch.int64, device=self.keys.device)
        self.keys, self.values = self.keys[:, pages], self.values[:, pages]
        self.summaries = {kind: pool[:, pages] for kind, pool in self.summaries.items()}


class KeptReader(RowReader):
    """What is left of one sequence of an ``EvictingStore``, in logical order; positions are those of the sequence.

    A range of positions yields the tokens of it that are left; it begins and ends where all heads have the same.
    """

    _store: EvictingStore

    @property
    def is_view(self) -> bool:
        return False  # no token lies at its position

    def keys(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[num_kv_heads, number of tokens left from start to stop, head_dim]; everything by default."""
        return self._kept.keys[:, self._held(start, stop)]

    def values(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[num_kv_heads, number of tokens left from start to stop, head_dim]; everything by default."""
        return self._kept.values[:, self._held(start, stop)]

    @property
    def _kept(self) -> Kept:
        return self._store.kept[self._row]

    def _held(self, start: int, stop: int | None) -> slice:
        return slice(self._kept.place(start), self._kept.place(self.length if stop is None else stop))


def _left(read: Callable[..., Tensor], first: int, places: Tensor, stop: int, num_held: int) -> Tensor:
    """What ``read`` yields below ``first``, at ``places`` of each head and from ``stop`` on, and room for more."""
    held = read()
    left = held.new_empty(held.shape[0], num_held + ROOM, held.shape[2])
    heads, last = torch.arange(len(held), device=held.device).unsqueeze(1), first + places.shape[1]
    left[:, :first], left[:, first:last], left[:, last:num_held] = read(0, first), held[heads, places], read(stop)
    return left


def _with_room(tokens: Tensor, num_new: int) -> Tensor:
    held = tokens.shape[1]
    room = tokens.new_empty(tokens.shape[0], held + num_new + ROOM, tokens.shape[2])
    room[:, :held] = tokens
    return room
