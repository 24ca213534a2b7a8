"""Captured steps whose tokens have the same bits whatever is computed beside them.

Each row of a step has a block of slots, for tokens that follow one another: one of them for dense decoding, or those of
a verification (``batching.exact``). All steps multiply the same number of tokens, and attend each as if it were alone
(``kernels.block_attention``). Drafts are steps under the plan, on whose bits nothing depends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter

import torch
from torch import Tensor

from kvsift.batching.row import Row
from kvsift.engine.accounting import DecodeSteps, add_blocks, add_steps
from kvsift.engine.row_groups import Group, PoolSession
from kvsift.engine.sampling import Sampling
from kvsift.engine.session import BLOCK, BLOCK_ROWS
from kvsift.engine.slots import Assignment, Block, Slots, StepKind, StepMode
from kvsift.engine.transcript import Request
from kvsift.kernels.block_attention import reach
from kvsift.layer.paged_decode import DecodeLayer, rule_of
from kvsift.models.transformers_cache import SparseCache
from kvsift.plan.plan import Rule
from kvsift.stores.kv_pool import KVPool


@dataclass
class RowBlocks:
    """What a group keeps of a row.

    Attributes:
        cache: of the row.
        pages: int32, of the row, those to come included.
        sampling: how its tokens are chosen.
        rule: of its drafts.
        place: of its block, which no other row of its kind (exact or not) has.
        setup_s: what the group had spent on captures when the row joined.
        blocks: tokens cached before each block, and its own.
        drafts: lengths of the context in the drafts.
        counted: int64 [2 * layers], what drafts have counted (``Slots.results``).
    """

    cache: SparseCache
    pages: Tensor
    sampling: Sampling
    rule: Rule | None
    place: int
    setup_s: float
    blocks: list[tuple[int, int]] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    counted: Tensor | int = 0


class BlockGroup(Group[RowBlocks]):
    """Rows that are dense or exact."""

    def __init__(self, source: PoolSession, rotation: int | None) -> None:
        super().__init__(source, rotation)
        self._setup_s = 0.0
        self._layers: Sequence[DecodeLayer] = ()  # of the last drafts

    @property
    def setup_s(self) -> float:
        return self._setup_s

    def join(self, row: Row, request: Request) -> None:
        cache = row.cache
        assert cache is not None
        pages = torch.tensor(cache.table.planned(0), dtype=torch.int32, device=cache.attentions[0].like.device)
        taken = {kept.place for each, kept in self._rows.items() if (each.exact is None) == (row.exact is None)}
        place = next(place for place in count() if place not in taken)
        self._rows[row] = RowBlocks(cache, pages, request.sampling, rule_of(row.plan), place, self.setup_s)
        self._source.need(cache.table.longest)

    def parts(self, rows: Sequence[Row]) -> list[list[Row]]:
        parts: dict[tuple[bool, int], list[Row]] = {}
        for row in rows:
            parts.setdefault((row.exact is None, self._rows[row].place // BLOCK_ROWS), []).append(row)
        return list(parts.values())

    def step(self, rows: Sequence[Row]) -> list[int]:
        return [tokens[0] for tokens in self.verify(rows, [[row.token] for row in rows])]

    def most_verified(self, row: Row) -> int:
        """Tokens of the next block of a row, at most."""
        stretch = reach(self._blocks([row]).layers[0].kv)
        return min(BLOCK, stretch - row.num_cached % stretch)

    def verify(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> list[list[int]]:
        """Feed consecutive tokens of each row of a part; the tokens that follow them."""
        with self._setting_up() as setup:
            slots = self._blocks(rows)
            kind = setup.prepare(slots, "dense")
        kept = [self._rows[row] for row in rows]
        blocks = {
            each.place % BLOCK_ROWS: Block(each.pages, row.num_cached, fed, each.sampling, _drawn(row))
            for row, each, fed in zip(rows, kept, tokens)
        }
        slots.assign_blocks(blocks)
        slots.run(kind, 0)
        chosen = slots.tokens.view(-1, BLOCK).tolist()
        for row, each, fed in zip(rows, kept, tokens):
            each.blocks.append((row.num_cached, len(fed)))
        return [chosen[each.place % BLOCK_ROWS][: len(fed)] for each, fed in zip(kept, tokens)]

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[list[int]]:
        """Choose so many tokens of each row under its rule; what they store is overwritten."""
        steps, kept = max(counts), [self._rows[row] for row in rows]
        with self._setting_up() as setup:
            slots, drafted = self._source.slots(len(rows), self._rules), list[Tensor]()
            modes = {slots.sparse_mode(each.rule) for each in kept}
            kind = setup.prepare(slots, modes.pop() if len(modes) == 1 else "mixed")
            slots.assign([self._assignment(row) for row in rows], steps)
        for number in range(steps):
            for slot, count_of_row in enumerate(counts):
                if count_of_row == number:
                    slots.release(slot)
            slots.run(kind, number)
            drafted.append(slots.tokens.clone())
        tokens, counted = torch.stack(drafted, 1).tolist(), slots.results[1:].cpu()
        self._layers = slots.layers
        for slot, (row, each, count_of_row) in enumerate(zip(rows, kept, counts)):
            each.drafts += range(row.num_cached + 1, row.num_cached + count_of_row + 1)
            each.counted = each.counted + counted[:, slot]
        return [each[:count_of_row] for each, count_of_row in zip(tokens, counts)]

    def _blocks(self, rows: Sequence[Row]) -> Slots:
        """Slots of a part; those of exact rows have odd numbers."""
        number = 2 * (self._rows[rows[0]].place // BLOCK_ROWS) + (rows[0].exact is not None)
        return self._source.blocks(number, self._rules)

    def _assignment(self, row: Row) -> Assignment:
        kept = self._rows[row]
        return Assignment(kept.pages, row.num_cached, row.token, kept.sampling, _drawn(row), kept.rule)

    @property
    def _rules(self) -> list[Rule | None]:
        """Of all rows: slots depend on them, and should not change from step to step."""
        return [kept.rule for kept in self._rows.values()]

    @contextmanager
    def _setting_up(self) -> Iterator[Setup]:
        """Let no token count the time of this block if steps are captured in it."""
        started, setup = perf_counter(), Setup(any(kept.sampling.temperature > 0 for kept in self._rows.values()))
        yield setup
        if setup.has_captured:
            seconds = perf_counter() - started
            self._setup_s += seconds
            for kept in self._rows.values():
                kept.cache.stats.probe_s += seconds

    def recall(self) -> None:
        """Nothing is launched ahead."""

    def release(self, kv: KVPool) -> None:
        if self._source.kv is kv:
            for kept in self._rows.values():
                self._count(kept)
            self._layers = ()  # they hold the tensors
        super().release(kv)

    def leave(self, row: Row) -> None:
        kept = self._rows.pop(row)
        row.steps, row.setup_s = None, self.setup_s - kept.setup_s
        self._count(kept)
        add_blocks(kept.cache.stats, kept.cache.attentions, kept.blocks)

    def _count(self, kept: RowBlocks) -> None:
        """Count the drafts of a row so far."""
        if kept.drafts:
            lengths = torch.tensor(kept.drafts)
            drafts = DecodeSteps(lengths, torch.ones_like(lengths, dtype=torch.bool))
            counted = torch.zeros(2 * len(self._layers), dtype=torch.int64) + kept.counted
            add_steps(kept.cache.stats, self._layers, drafts, kept.rule, counted)
            kept.drafts, kept.counted = [], 0


@dataclass
class Setup:
    """Steps that are captured unless they are.

    Attributes:
        sampled: whether tokens of some row are drawn.
        has_captured: whether one was not.
    """

    sampled: bool
    has_captured: bool = False

    def prepare(self, slots: Slots, mode: StepMode) -> StepKind:
        """Capture a step of any of the rows."""
        kind = StepKind(mode, self.sampled)
        if not slots.captured(kind):
            slots.prepare(kind)
            self.has_captured = True
        return kind


def _drawn(row: Row) -> int:
    """Tokens of the answer so far, the one to feed included."""
    return row.num_cached - len(row.ids) + 1
