"""A cache whose rows are decoded by captured steps, and everything that can be used again for the next rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvsift.engine.slots import Slots, Step, StepKind
from kvsift.models.transformers import SparseCache
from kvsift.runtime.paged_decode import rule_of

Crossover = Callable[[SparseCache, Slots], int]


class Session:
    """Captured steps over the pools of one cache.

    Args:
        step: of the model.
        cache: every layer has seen a token, and has pages reserved for all that is to come.
        crossover: contexts below which slots decode faster in full.
        capture: False runs steps as they are, for tests on a CPU.
    """

    def __init__(self, step: Step, cache: SparseCache, crossover: Crossover, capture: bool = True) -> None:
        self.cache = cache
        self._step, self._crossover = step, crossover
        self._made_for = self._fingerprint()
        tables = [attention.store.table for attention in cache.attentions]
        self._max_pages = round_up(max(len(tables[0].planned(row)) for row in range(self._num_rows)))
        self._angles = step.angles(self._max_pages * cache.attentions[0].store.page_size)
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._slots: dict[int, Slots] = {}

    def forget(self) -> None:
        """Let go of graphs and pools; this session holds nothing any more."""
        self._slots.clear()
        self._made_for = ()

    @property
    def holds(self) -> bool:
        """Whether the cache is still what the steps were captured over: plan, pools, and rows that fit."""
        store = self.cache.attentions[0].store
        longest = max(len(store.table.planned(row)) for row in range(self._num_rows))
        return longest <= self._max_pages and self._fingerprint() == self._made_for

    def has_room(self, rows: Sequence[int]) -> bool:
        """Whether rows of these lengths fit into what is allocated."""
        store = self.cache.attentions[0].store
        pages = [-(-length // store.page_size) for length in rows]
        return (
            len(rows) <= self._num_rows and max(pages) <= self._max_pages and sum(pages) < store.keys.shape[1]
        )  # one page is the scratch page

    def slots(self, num_slots: int) -> Slots:
        """Of at least so many sequences: one, two, four, eight, ..."""
        num_slots = _bucket(num_slots)
        if num_slots not in self._slots:
            self._slots[num_slots] = Slots(
                self._step, self._angles, self.cache.attentions, self.cache.run.plan, num_slots, self._max_pages,
                self._pool,
            )  # fmt: skip
        return self._slots[num_slots]

    def knows(self, num_slots: int, kind: StepKind) -> bool:
        """Whether a step for so many sequences is captured."""
        return _bucket(num_slots) in self._slots and self._slots[_bucket(num_slots)].knows(kind)

    def dense_below(self, slots: Slots) -> int:
        """Contexts shorter than this are shown in full."""
        return 0 if rule_of(self.cache.run.plan) is None else self._crossover(self.cache, slots)

    @property
    def _num_rows(self) -> int:
        return self.cache.attentions[0].store.num_rows

    def _fingerprint(self) -> tuple[object, ...]:
        stores = [attention.store for attention in self.cache.attentions]
        pools = [pool for store in stores for pool in (store.keys, store.values, *store.summaries.values())]
        return str(self.cache.run.plan.decode), *(pool.data_ptr() for pool in pools)


def row_lengths(lengths: Sequence[int], page_size: int) -> list[int]:
    """What to reserve for rows of these lengths: a little more, so that the next call can use it again, and rows for
    a whole bucket of slots."""
    roomy = [round_up(-(-length // page_size)) * page_size for length in lengths]
    return roomy + [0] * (_bucket(len(lengths)) - len(lengths))


def round_up(pages: int) -> int:
    """To a multiple of a 32nd of the power of two above: few different numbers, and at most a sixteenth too many."""
    step = max((1 << max(pages - 1, 0).bit_length()) // 32, 8)
    return -(-pages // step) * step


def _bucket(rows: int) -> int:
    return 1 << max(rows - 1, 0).bit_length()
