"""Counters of sequences that captured steps decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsift.engine.sampling import ConstrainedChooser, Sampling
from kvsift.kernels.split_attention import ESTIMATED_WHOLE
from kvsift.layer.accounting import RunStats
from kvsift.layer.guards import widened_rule
from kvsift.layer.paged_decode import DecodeLayer, StepMode, page_spans
from kvsift.layer.sparse_attention import SparseAttention
from kvsift.models.hf.cache import SparseCache
from kvsift.plan.budget import Budget
from kvsift.plan.guard import Guard
from kvsift.plan.plan import Rule


@dataclass(eq=False)
class CapturedSequence:
    """A sequence that captured steps decode.

    Attributes:
        cache: has its keys and values.
        stats: its counters.
        start: tokens cached before the first step.
        most: steps that may be needed.
        token: the next to feed, as far as the tokens of steps were read.
        rule: decode rule with its present budget; None is dense.
        sampling: how tokens are chosen.
        constraint: what changes their logits before.
        guard: guard of its budget.
        setup_s: what its group had spent on captures when it joined.
        steps: number of steps whose tokens were read.
        done: it needs no more.
        dense: for each step launched for it, whether it was dense.
        sparse_steps: number of sparse steps so far, those before ``start`` included; probes go by it.
        sparse_before: that number before each step launched.
        stale_from: the first position whose page has no summary yet, since dense steps write none.
        dense_below: context length below which it is dense, in the slots that it has.
        sparse_mode: mode of a step in which all sequences are sparse and have its rule.
        stays_dense: its guard has seen every budget fall short.
        budgets: budgets that it had before, each with the number of steps launched for it when it changed.
        counted: int64 [2 * layers], visible tokens and estimated shares (``Slots.results``) in the slots that it had
            before.
        counted_in_slot: int64 [2 * layers], those in its present slot, up to the last step that was read.
    """

    cache: SparseCache
    stats: RunStats
    start: int
    most: int
    token: int
    rule: Rule | None
    sampling: Sampling = field(default_factory=Sampling)
    constraint: ConstrainedChooser | None = None
    guard: Guard = field(default_factory=Guard)
    setup_s: float = 0.0
    steps: int = 0
    done: bool = False
    dense: list[bool] = field(default_factory=list)
    sparse_steps: int = 0
    sparse_before: list[int] = field(default_factory=list)
    stale_from: int | None = None
    dense_below: int = 0
    sparse_mode: StepMode = "sparse"
    stays_dense: bool = False
    budgets: list[tuple[int, Budget]] = field(default_factory=list)
    counted: Tensor | int = 0
    counted_in_slot: Tensor | int = 0
    _counted_before: Tensor | int = 0  # in this slot, without the last step that was read

    def __post_init__(self) -> None:
        self._planned = self.rule

    @property
    def written(self) -> int:
        """Tokens in the cache, those of steps that were launched and not read included."""
        return self.start + len(self.dense)

    @property
    def remaining(self) -> int:
        """Steps that may still have to be launched."""
        return 0 if self.done else self.most - len(self.dense)

    def mode(self, ahead: int = 0) -> StepMode:
        """Return the mode that this sequence needs in the next step, or in one that many steps later."""
        return "dense" if self.written + 1 + ahead < self.dense_below else self.sparse_mode

    @property
    def is_guarded(self) -> bool:
        """Whether its budget is guarded, and may grow."""
        return self.rule is not None and self.rule.budget.min_recovery is not None and not self.stays_dense

    @property
    def will_widen(self) -> bool:
        """Whether its budget grows before the next step."""
        return self.is_guarded and self._planned is not None and self.guard.widens(self._planned.budget)

    def recall(self) -> None:
        """Forget the steps that were launched and not read: they will be launched again."""
        self.sparse_steps = [*self.sparse_before, self.sparse_steps][self.steps]
        del self.dense[self.steps :], self.sparse_before[self.steps :]
        self.count_slot()
        if self.stale_from is not None:
            self.stale_from = min(self.stale_from, self.written)

    def go_on(self, token: int, counted: Tensor) -> None:
        """Take the next step that was read: the token, and what was counted in the slot up to it."""
        self._counted_before, self.counted_in_slot = self.counted_in_slot, counted
        self.steps, self.token = self.steps + 1, token

    def go_back(self, steps: int, token: int) -> None:
        """Have taken so many steps, the last one read or not: it is taken again."""
        if steps < self.steps:
            self.counted_in_slot = self._counted_before
        self.steps, self.token = steps, token

    def count_slot(self) -> None:
        """Keep what was counted in a slot that the sequence leaves."""
        self.counted, self.counted_in_slot, self._counted_before = self.counted + self.counted_in_slot, 0, 0

    def write_summaries(self) -> None:
        """Write the summaries that dense steps have left out."""
        for attention in self.cache.attentions:
            attention.store.advance(0, self.written, self.stale_from)
        self.stale_from = None

    def widen(self) -> None:
        """Take the budget that the guard has decided on, before a step whose token will be read."""
        if not self.is_guarded:
            return
        assert self._planned is not None
        assert self.rule is not None
        if widening := self.guard.settle(self.written, self._planned.budget):
            self.stats.widenings.append(widening)
        rule = widened_rule(self._planned, self.guard)
        self.stays_dense = rule is None  # the rule stays: dense steps leave summaries to be written by it
        if rule is not None and rule != self.rule:
            self.budgets.append((len(self.dense), self.rule.budget))
            self.rule = rule


def add_counts(seq: CapturedSequence, layers: Sequence[DecodeLayer], over_bus: bool = False) -> None:
    """Count the steps of a sequence in every layer; ``over_bus`` where a GPU attends keys and values in host memory."""
    lengths = seq.start + 1 + torch.arange(seq.steps)
    sparse = ~torch.tensor(seq.dense[: seq.steps], dtype=torch.bool)
    counted = torch.zeros(2 * len(layers), dtype=torch.int64) + seq.counted + seq.counted_in_slot
    add_steps(seq.stats, layers, lengths, sparse, seq.rule, counted, seq.budgets, over_bus)


def add_steps(
    stats: RunStats, layers: Sequence[DecodeLayer], lengths: Tensor, sparse: Tensor, rule: Rule | None,
    counted: Tensor, budgets: Sequence[tuple[int, Budget]] = (), over_bus: bool = False,
) -> None:  # fmt: skip
    """Count steps in every layer.

    Args:
        stats: counters of the sequence.
        layers: layers of the model.
        lengths: int64 [steps], tokens of the context in each step, its own included.
        sparse: bool [steps], which of the steps were sparse.
        rule: decode rule.
        counted, budgets: as in ``CapturedSequence``.
        over_bus: as in ``add_counts``.
    """
    for layer, visible_in_lists, estimated in zip(layers, *counted.unflatten(0, (2, -1)).tolist()):
        is_dense = rule is None or rule.budget.is_dense(layer.shape)
        kv_bytes = _add(stats, layer, lengths, sparse & (not is_dense), visible_in_lists)
        if over_bus:
            stats.tally(layer.shape.layer, "decode").kv_bytes_copied += kv_bytes
        if rule is None or is_dense or layer.method is None:
            continue
        start = 0
        for stop, budget in [*budgets, (len(lengths), rule.budget)]:
            _add_selection(stats, layer, lengths[start:stop][sparse[start:stop]], budget)
            start = stop
        tally = stats.tally(layer.shape.layer, "decode")
        tally.estimated = tally.estimated + estimated / ESTIMATED_WHOLE / layer.shape.num_query_heads


def add_blocks(stats: RunStats, layers: Sequence[SparseAttention], blocks: Sequence[tuple[int, int]]) -> None:
    """Count blocks of tokens that were attended densely and read the cache once: of each the tokens cached before it,
    and its own."""
    seen = sum(sum(range(length + 1, length + count + 1)) for length, count in blocks)
    read = sum(length + count for length, count in blocks)
    for layer in layers:
        tally, num_bytes = stats.tally(layer.shape.layer, "decode"), read * layer.store.token_bytes
        tally.queries += sum(count for _, count in blocks)
        tally.context_tokens += seen
        tally.visible_tokens = tally.visible_tokens + seen
        tally.kv_bytes_dense += num_bytes
        tally.kv_bytes_read += num_bytes


def _add(stats: RunStats, layer: DecodeLayer, lengths: Tensor, sparse: Tensor, visible_in_lists: int) -> int:
    """Count steps at these lengths; the bytes of keys and values that they read."""
    shape = layer.shape
    tally, per_head = stats.tally(shape.layer, "decode"), 2 * layer.kv.vector_bytes
    per_token = shape.num_kv_heads * per_head
    tally.queries += len(lengths)
    tally.context_tokens += int(lengths.sum())
    tally.kv_bytes_dense += int(lengths.sum()) * per_token
    full = int(lengths[~sparse].sum())
    lists = shape.num_kv_heads if layer.shares else shape.num_query_heads
    tally.visible_tokens = tally.visible_tokens + full + visible_in_lists / lists
    kv_bytes = full * per_token + visible_in_lists * per_head
    tally.kv_bytes_read += kv_bytes
    return int(kv_bytes)


def _add_selection(stats: RunStats, layer: DecodeLayer, lengths: Tensor, budget: Budget) -> None:
    """Count the steps that selected, of those at these lengths."""
    if not len(lengths):
        return
    tally, unit_size, page_size = stats.tally(layer.shape.layer, "decode"), layer.batch.unit_size, layer.kv.page_size
    first, stop, chosen, _ = page_spans(budget, lengths, unit_size).long().unbind(1)
    selects = chosen < stop - first
    tally.sparse_queries += int(selects.sum())
    if layer.estimates:
        tally.estimated_queries += int(selects.sum())
    if layer.summary is None:  # the layer reuses what another selected
        return
    pages = -(-stop * unit_size // page_size) - first * unit_size // page_size
    per_page = layer.shape.num_kv_heads * layer.summary.shape[2] * layer.summary.element_size()
    tally.index_bytes_read += int(pages[selects].sum()) * per_page
