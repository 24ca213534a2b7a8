"""Captured steps whose tokens have the same bits whatever is computed beside them.

Each row of a step has a block of slots, for tokens that follow one another: one of them for dense decoding, or those of
a verification (``batching.exact``). All steps multiply the same number of tokens, and attend each as if it were alone
(``kernels.block_attention``). Drafts are steps under the plan, on whose bits nothing depends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
from kvsift.layer.paged_decode import rule_of
from kvsift.models.transformers_cache import SparseCache
from kvsift.plan.plan import Rule


@dataclass
class RowBlocks:
    """What a group keeps of a row.

    Attributes:
        cache: of the row.
        pages: of the row, those to come included.
        sampling: how its tokens are chosen.
        rule: of its drafts.
        setup_s: what the group had spent on captures when the row joined.
        blocks: tokens cached before each block, and its own.
        drafts: lengths of the context in the drafts.
        counted: int64 [2 * layers], what drafts have counted (``Slots.results``).
    """

    cache: SparseCache
    pages: Sequence[int]
    sampling: Sampling
    rule: Rule | None
    setup_s: float
    blocks: list[tuple[int, int]] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    counted: Tensor | int = 0


class BlockGroup(Group[RowBlocks]):
    """Rows that are dense or exact."""

    def __init__(self, source: PoolSession, rotation: int | None) -> None:
        super().__init__(source, rotation)
        self._setup_s = 0.0

    @property
    def setup_s(self) -> float:
        return self._setup_s

    def join(self, row: Row, request: Request) -> None:
        assert row.cache is not None
        pages = row.cache.table.planned(0)
        self._rows[row] = RowBlocks(row.cache, pages, request.sampling, rule_of(row.plan), self.setup_s)
        self._source.need(row.cache.table.longest)

    def parts(self, rows: Sequence[Row]) -> list[list[Row]]:
        apart = [row for row in rows if row.exact is None], [row for row in rows if row.exact is not None]
        return [each[first : first + BLOCK_ROWS] for each in apart for first in range(0, len(each), BLOCK_ROWS)]

    def step(self, rows: Sequence[Row]) -> list[int]:
        return [tokens[0] for tokens in self.verify(rows, [[row.token] for row in rows])]

    def most_verified(self, row: Row) -> int:
        """Tokens of the next block of a row, at most."""
        stretch = reach(self._source.blocks(self._rules).layers[0].kv)
        return min(BLOCK, stretch - row.num_cached % stretch)

    def verify(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> list[list[int]]:
        """Feed consecutive tokens of each row of a part; the tokens that follow them."""
        slots, blocks = self._source.blocks(self._rules), list[Block]()
        kind = self._prepare(slots, "dense")
        for row, each in zip(rows, tokens):
            kept = self._rows[row]
            blocks.append(Block(kept.pages, row.num_cached, each, kept.sampling, _drawn(row)))
            kept.blocks.append((row.num_cached, len(each)))
        slots.assign_blocks(blocks)
        slots.run(kind, 0)
        chosen = slots.tokens.view(-1, BLOCK).tolist()
        return [chosen[number][: len(each)] for number, each in enumerate(tokens)]

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[list[int]]:
        """Choose so many tokens of each row under its rule; what they store is overwritten."""
        steps, kept = max(counts), [self._rows[row] for row in rows]
        slots, drafted = self._source.slots(len(rows), self._rules), list[Tensor]()
        kind = self._prepare(slots, slots.sparse_mode(kept[0].rule))
        slots.assign([self._assignment(row) for row in rows], steps)
        for number in range(steps):
            for slot, count in enumerate(counts):
                if count == number:
                    slots.release(slot)
            slots.run(kind, number)
            drafted.append(slots.tokens.clone())
        tokens, counted = torch.stack(drafted, 1).tolist(), slots.results[1:].cpu()
        for slot, (row, each, count) in enumerate(zip(rows, kept, counts)):
            each.drafts += range(row.num_cached + 1, row.num_cached + count + 1)
            each.counted = each.counted + counted[:, slot]
        return [each[:count] for each, count in zip(tokens, counts)]

    def _assignment(self, row: Row) -> Assignment:
        kept = self._rows[row]
        return Assignment(kept.pages, row.num_cached, row.token, kept.sampling, _drawn(row), kept.rule)

    @property
    def _rules(self) -> list[Rule | None]:
        """Of all rows: slots depend on them, and should not change from step to step."""
        return [kept.rule for kept in self._rows.values()]

    def _prepare(self, slots: Slots, mode: StepMode) -> StepKind:
        """Capture a step of any of the rows, whose time is no token's."""
        kind = StepKind(mode, any(kept.sampling.temperature > 0 for kept in self._rows.values()))
        if not slots.captured(kind):
            started = perf_counter()
            slots.prepare(kind)
            seconds = perf_counter() - started
            self._setup_s += seconds
            for kept in self._rows.values():
                kept.cache.stats.probe_s += seconds
        return kind

    def recall(self) -> None:
        """Nothing is launched ahead."""

    def leave(self, row: Row) -> None:
        kept = self._rows.pop(row)
        row.steps, row.setup_s = None, self.setup_s - kept.setup_s
        stats = kept.cache.stats
        add_blocks(stats, kept.cache.attentions, kept.blocks)
        if kept.drafts:
            lengths = torch.tensor(kept.drafts)
            drafts = DecodeSteps(lengths, torch.ones_like(lengths, dtype=torch.bool))
            counted = torch.zeros(2 * len(kept.cache.attentions), dtype=torch.int64) + kept.counted
            add_steps(stats, self._source.slots(1, [*self._rules, kept.rule]).layers, drafts, kept.rule, counted)


def _drawn(row: Row) -> int:
    """Tokens of the answer so far, the one to feed included."""
    return row.num_cached - len(row.ids) + 1
