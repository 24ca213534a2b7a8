"""Captured steps over a pool of keys and values: their slots, and when they have to be captured again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvsift.engine.graphs.slots import Slots, StepKind
from kvsift.layer.paged_decode import list_capacity, rule_of, unit_size_of
from kvsift.models.captured_step import Step
from kvsift.models.hf.slot_states import SlotStates
from kvsift.models.hf.sparse import SparseCache
from kvsift.plan.plan import Rule
from kvsift.stores.kv_pool import KVPool
from kvsift.stores.page_table import PageTable

BLOCK_TOKENS = 8  # as many as one answer is worth drafting
BLOCK_SEQUENCES = 4  # that are verified together: products of 32 sequences take hardly longer than those of one
STEADY_SLOTS = 16  # as many as sequences may take steps together
Crossover = Callable[[Slots, Rule], int]
OpenCache = Callable[[Rule | None, PageTable], SparseCache]


class Session:
    """Slots for sequences that join and leave, over a pool that may grow. They are captured again when the tensors of
    the pool have moved, or a sequence is longer than any before.

    Args:
        kv: the pool.
        step: step of the model.
        open_cache: returns an empty cache under a decode rule, over the pages of a table, and with a scratch page.
        crossover: returns the context length below which dense steps are faster.
        capture: False runs steps without CUDA graphs, for tests on a CPU.
        steady: what a sequence answers is not to depend on others: all steps are of as many slots, and each sequence is
            attended by its own mode.

    Attributes:
        table: page table of the scratch page.
    """

    def __init__(
        self, kv: KVPool, step: Step, open_cache: OpenCache, crossover: Crossover, capture: bool = True,
        steady: bool = False,
    ) -> None:  # fmt: skip
        self.kv, self.steady = kv, steady
        self._step, self._open_cache, self._crossover, self._capture = step, open_cache, crossover, capture
        self.table = PageTable(1, kv)
        self._pages = 1  # of the longest sequence
        self._moves = self._max_pages = 0  # of the pool and of a sequence, when steps were last captured
        self.release()

    def need(self, num_pages: int) -> None:
        """Make room for a sequence of so many pages, rounded up to a power of two: captures are rarer as it grows."""
        if num_pages > self._pages:
            self._pages = 1 << (num_pages - 1).bit_length()

    def expect(self, num_pages: int) -> None:
        """Make room for sequences of so many pages, the longest that may come."""
        self._pages = max(self._pages, num_pages)

    def release(self) -> None:
        """Drop the tensors."""
        self._cache: SparseCache | None = None
        self._angles = torch.empty(0)
        self._graph_memory: Any = None  # that their CUDA graphs share
        self._slots: dict[tuple[object, ...], Slots] = {}
        self._states: SlotStates | None = None  # of the most slots so far, which fewer share
        self._blocks: dict[tuple[int, int, int], Slots] = {}

    @property
    def holds(self) -> bool:
        """Whether slots that were returned may be used on: the pool behind them has not moved."""
        return self._cache is not None and self._moves == self.kv.moves

    @property
    def keeps_bits(self) -> bool:
        """Whether steps of blocks may be of any number of sequences (``models.captured_step``)."""
        return self._step.keeps_bits

    def slots(self, num_slots: int, rules: Sequence[Rule | None]) -> Slots:
        """Return slots for at least so many sequences with these rules, all of one method: one, two, four, ... Budgets
        may have grown since."""
        cache, key = self._ready(rules), self._key(num_slots, rules)
        if key not in self._slots:
            every, number = [rule_of(cache.run.plan), *rules], self._number(num_slots)
            self._slots[key] = self._new_slots(cache, every, number)
        return self._slots[key]

    def blocks(self, number: int, seqs: int, size: int, rules: Sequence[Rule | None]) -> Slots:
        """Return slots of at least so many sequences with a block of ``size`` tokens each, whose steps write the
        summaries of these rules; others for each number.

        Where bits depend on the number of sequences, there are ``BLOCK_SEQUENCES`` sequences with
        ``BLOCK_TOKENS`` tokens.
        """
        cache = self._ready(rules)
        key = (number, _bucket(seqs), size) if self.keeps_bits else (number, BLOCK_SEQUENCES, BLOCK_TOKENS)
        if key not in self._blocks:
            self._blocks[key] = self._new_slots(cache, [None], key[1] * key[2], block=key[2])
        return self._blocks[key]

    def captured(self, num_slots: int, rules: Sequence[Rule | None], kind: StepKind) -> bool:
        """Return whether a step for so many sequences with these rules is captured."""
        key = self._key(num_slots, rules) if self.holds else ()
        return key in self._slots and self._slots[key].captured(kind)

    def dense_below(self, slots: Slots, rule: Rule) -> int:
        """Return the context length below which dense steps are to be preferred."""
        return self._crossover(slots, rule)

    def _ready(self, rules: Sequence[Rule | None]) -> SparseCache:
        """The cache over the pool as it is, for sequences as long as may come and under one of these rules."""
        rule = next((rule for rule in rules if rule is not None), None)
        if self._cache is None or not self.holds or self._max_pages < self._pages or not self._takes(rule):
            self.release()
            cache = self._open_cache(rule, self.table)
            self._moves, self._max_pages = self.kv.moves, round_up(self._pages)
            self._angles = self._step.angles(self._max_pages * cache.page_size)
            self._graph_memory = torch.cuda.graph_pool_handle() if self._capture else None
            self._cache = cache  # last: memory may have been short
        return self._cache

    def _takes(self, rule: Rule | None) -> bool:
        own = self._rule
        if self.steady:
            return own == rule
        return rule is None or (own is not None and own.method == rule.method)

    def _new_slots(self, cache: SparseCache, rules: Sequence[Rule | None], number: int, block: int = 0) -> Slots:
        if self._states is None or self._states.num_slots < number:
            self._states = SlotStates(cache.layers, number, self._step.writes_states)
        return Slots(
            self._step, self._angles, cache, rules, number, self._max_pages, self._graph_memory, block,
            self._states.first(number),
        )  # fmt: skip

    @property
    def _rule(self) -> Rule | None:
        assert self._cache is not None, "slots come first"
        return rule_of(self._cache.run.plan)

    def _key(self, num_slots: int, rules: Sequence[Rule | None]) -> tuple[object, ...]:
        """Return what slots are told apart by: their number, the units of a list, and the layers that are dense under
        some rule."""
        assert self._cache is not None, "slots come first"
        every, page_size = [self._rule, *rules], self._cache.page_size
        unit_size = unit_size_of(every, page_size)
        max_units = self._max_pages * page_size // unit_size
        needs = [list_capacity(rule.budget, max_units, unit_size) for rule in every if rule is not None]
        dense = {tuple(rule.budget.dense_layers) for rule in every if rule is not None}
        return self._number(num_slots), max(needs, default=0), frozenset(dense)

    def _number(self, num_slots: int) -> int:
        return STEADY_SLOTS if self.steady else _bucket(num_slots)


def fixed_slots(step: Step, cache: SparseCache, num_slots: int, pages: int, capture: bool) -> Slots:
    """Return slots for sequences of at most so many pages of a cache's pool, under its plan. They are of no use any
    more once the pool grows."""
    max_pages = round_up(pages)
    angles, memory = step.angles(max_pages * cache.page_size), torch.cuda.graph_pool_handle() if capture else None
    return Slots(step, angles, cache, [rule_of(cache.run.plan)], num_slots, max_pages, memory)


def round_up(pages: int) -> int:
    """Round up to a multiple of a 32nd of the power of two above: few numbers, and at most a sixteenth too many."""
    step = max((1 << max(pages - 1, 0).bit_length()) // 32, 8)
    return -(-pages // step) * step


def _bucket(seqs: int) -> int:
    return 1 << max(seqs - 1, 0).bit_length()
