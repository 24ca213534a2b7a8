"""Captured steps over the sequences of a cache, and what later sequences can use again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvsift.engine.graphs.slots import Slots, StepKind
from kvsift.layer.paged_decode import list_capacity, rule_of, unit_size_of
from kvsift.models.hf.sparse import SparseCache
from kvsift.models.step import Step
from kvsift.plan.plan import Rule

BLOCK = 8  # tokens: as many as one answer is worth drafting
BLOCK_SEQUENCES = 4  # that are verified together: products of 32 sequences take hardly longer than those of one
STEADY_SLOTS = 16  # as many as sequences may take steps together
Crossover = Callable[[SparseCache, Slots, Rule], int]


class Session:
    """Captured steps over the pools of one cache.

    Args:
        step: of the model.
        cache: every layer has a token, and pages reserved for all tokens to come.
        crossover: returns the context length below which dense steps are faster.
        capture: False runs steps without graphs, for tests on a CPU.
        rules: decode rules that sequences may have (``Slots``); the cache's own by default.
        steady: what a sequence answers is not to depend on others: all steps are of as many slots, and each sequence is
            attended by its own mode.
        max_pages: of a sequence, in a pool that may grow: ``KVPool.moves`` tells when these steps are of no use any
            more. By default those of the cache's longest sequence, and its pool does not grow.
    """

    def __init__(
        self, step: Step, cache: SparseCache, crossover: Crossover, capture: bool = True,
        rules: Sequence[Rule | None] | None = None, max_pages: int | None = None, steady: bool = False,
    ) -> None:  # fmt: skip
        self.cache, self.steady = cache, steady
        self._step, self._crossover = step, crossover
        self._rules = [rule_of(cache.run.plan)] if rules is None else rules
        self._is_open = True
        self.max_pages = round_up(cache.table.longest if max_pages is None else max_pages)
        self._angles = step.angles(self.max_pages * cache.page_size)
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._slots: dict[tuple[object, ...], Slots] = {}
        self._blocks: dict[tuple[int, int, int], Slots] = {}
        self._held = cache.table.pool
        if max_pages is None:
            self._held.hold(self)

    def forget(self) -> None:
        """Release graphs and pools; this session is of no use afterwards."""
        self._slots.clear()
        self._blocks.clear()
        self._is_open = False
        self._held.let_go(self)

    @property
    def holds(self) -> bool:
        """Whether the pools have not moved; they cannot, unless a cache has taken other ones."""
        return self._is_open

    def slots(self, num_slots: int, rules: Sequence[Rule | None] = ()) -> Slots:
        """Return slots for at least so many sequences: one, two, four, eight, ... ``rules`` are theirs, whose budgets
        may have grown."""
        key = self._key(num_slots, rules)
        if key not in self._slots:
            every, number = [*self._rules, *rules], self._number(num_slots)
            self._slots[key] = Slots(self._step, self._angles, self.cache, every, number, self.max_pages, self._pool)
        return self._slots[key]

    @property
    def keeps_bits(self) -> bool:
        """Whether steps of blocks may be of any number of sequences (``models.step``)."""
        return self._step.keeps_bits

    def blocks(self, number: int, seqs: int, size: int) -> Slots:
        """Return slots of at least so many sequences with a block of ``size`` tokens each; others for each number.

        Where bits depend on the number of sequences, there are ``BLOCK_SEQUENCES`` sequences with ``BLOCK`` tokens.
        """
        key = (number, _bucket(seqs), size) if self.keeps_bits else (number, BLOCK_SEQUENCES, BLOCK)
        if key not in self._blocks:
            sizes = key[1] * key[2], self.max_pages
            self._blocks[key] = Slots(self._step, self._angles, self.cache, [None], *sizes, self._pool, key[2])
        return self._blocks[key]

    def captured(self, num_slots: int, rules: Sequence[Rule | None], kind: StepKind) -> bool:
        """Return whether a step for so many sequences with these rules is captured."""
        key = self._key(num_slots, rules)
        return key in self._slots and self._slots[key].captured(kind)

    def _key(self, num_slots: int, rules: Sequence[Rule | None]) -> tuple[object, ...]:
        """Of slots: their number, the units of a list, and which layers are dense under some rule."""
        every, page_size = [*self._rules, *rules], self.cache.page_size
        unit_size = unit_size_of(every, page_size)
        max_units = self.max_pages * page_size // unit_size
        needs = [list_capacity(rule.budget, max_units, unit_size) for rule in every if rule is not None]
        dense = {tuple(rule.budget.dense_layers) for rule in every if rule is not None}
        return self._number(num_slots), max(needs, default=0), frozenset(dense)

    def _number(self, num_slots: int) -> int:
        return STEADY_SLOTS if self.steady else _bucket(num_slots)

    def dense_below(self, slots: Slots, rule: Rule) -> int:
        """Return the context length below which dense steps are to be preferred."""
        return self._crossover(self.cache, slots, rule)


def sequence_lengths(lengths: Sequence[int], page_size: int) -> list[int]:
    """Return what to reserve for sequences of these lengths: a little more, for the next call, and sequences for all
    slots."""
    roomy = [round_up(-(-length // page_size)) * page_size for length in lengths]
    return roomy + [0] * (_bucket(len(lengths)) - len(lengths))


def round_up(pages: int) -> int:
    """Round up to a multiple of a 32nd of the power of two above: few numbers, and at most a sixteenth too many."""
    step = max((1 << max(pages - 1, 0).bit_length()) // 32, 8)
    return -(-pages // step) * step


def _bucket(seqs: int) -> int:
    return 1 << max(seqs - 1, 0).bit_length()
