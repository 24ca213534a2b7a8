"""Captured steps whose tokens have the same bits whatever is computed beside them.

Each row of a step has a block of slots, for tokens that follow one another: one of them for dense decoding, or those of
a verification (``batching.exact``). All steps multiply the same number of tokens, and attend each as if it were alone
(``kernels.block_attention``). Drafts are steps under the plan, on whose bits nothing depends.

The device is not kept waiting: a verification is launched behind its drafts, whose tokens it takes on the device, and
while rows propose nothing, a step is launched before the tokens of the one before are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.batching.exact.decoder import Proposal
from kvsift.batching.exact.step import Checked
from kvsift.batching.row import Row
from kvsift.engine.accounting import DecodeSteps, add_blocks, add_steps
from kvsift.engine.row_groups import Group, PoolSession
from kvsift.engine.sampling import Sampling
from kvsift.engine.session import BLOCK, BLOCK_ROWS
from kvsift.engine.slots import Assignment, Block, Slots, StepKind, StepMode, drafts_at
from kvsift.engine.transcript import Request
from kvsift.kernels.block_attention import reach
from kvsift.layer.paged_decode import DecodeLayer, rule_of
from kvsift.models.transformers_cache import SparseCache
from kvsift.plan.plan import Rule
from kvsift.stores.kv_pool import KVPool

PLAIN_STEPS = 64  # that slots are made ready for at once
FEW_PLAIN = 8  # steps in turn without proposals after which a row is expected to go on so


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
        plain: steps in turn for which it has proposed nothing.
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
    plain: int = 0


class PlainStep(NamedTuple):
    """A step of one token for each row, launched and not read, and the steps to come that the slots are ready for.

    Attributes:
        slots: that it runs on.
        rows: of the part.
        tokens: that it feeds.
        chosen: int64 [slots], on the host once the event has come.
        number: of the step since its rows were assigned.
    """

    slots: Slots
    rows: list[Row]
    tokens: list[int]
    chosen: Tensor
    event: torch.cuda.Event | None
    number: int


class BlockGroup(Group[RowBlocks]):
    """Rows that are dense or exact."""

    def __init__(self, source: PoolSession, rotation: int | None) -> None:
        super().__init__(source, rotation)
        self._setup_s = 0.0
        self._ahead: dict[int, PlainStep] = {}  # by the number of their slots
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
        kept = [self._rows[row] for row in rows]
        number, ahead = self._number(rows), self._ahead.pop(self._number(rows), None)
        with self._setting_up() as setup:
            slots = self._blocks(rows)
            kind = setup.prepare(slots, "dense")
        fed = [row.token for row in rows]
        if ahead is None or ahead.slots is not slots or (ahead.rows, ahead.tokens) != (rows, fed):
            slots.assign_blocks(self._blocks_of(rows, [[token] for token in fed]), PLAIN_STEPS)
            ahead = self._launch(slots, rows, kind, 0, fed)
        rests = all(row.exact is None or each.plain >= FEW_PLAIN for row, each in zip(rows, kept))
        after = None
        if rests and ahead.number + 1 < PLAIN_STEPS and all(row.length - row.num_cached > 2 for row in rows):
            after = self._launch(slots, rows, kind, ahead.number + 1)
        if ahead.event is not None:
            ahead.event.synchronize()
        every = ahead.chosen.tolist()
        chosen = [every[each.place % BLOCK_ROWS * BLOCK] for each in kept]
        if after is not None:
            self._ahead[number] = after._replace(tokens=chosen)
        for row, each in zip(rows, kept):
            each.plain += 1
            each.blocks.append((row.num_cached, 1))
        return chosen

    def _launch(
        self, slots: Slots, rows: Sequence[Row], kind: StepKind, number: int, tokens: Sequence[int] = ()
    ) -> PlainStep:
        slots.run(kind, number)
        chosen = torch.empty(slots.num_slots, dtype=torch.int64, pin_memory=slots.tokens.is_cuda)
        chosen.copy_(slots.tokens, non_blocking=True)
        event = None
        if slots.tokens.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(slots.tokens.device))
        return PlainStep(slots, list(rows), list(tokens), chosen, event, number)

    def most_verified(self, row: Row) -> int:
        """Tokens of the next block of a row, at most."""
        stretch = reach(self._blocks([row]).layers[0].kv)
        return min(BLOCK, stretch - row.num_cached % stretch)

    def check(self, rows: Sequence[Row], proposals: Sequence[Proposal]) -> Checked:
        """Draft and verify (``ExactModel.check``)."""
        drafting = [row for row, proposal in zip(rows, proposals) if proposal.drafts]
        if not drafting and not any(proposal.tokens for proposal in proposals):
            started = perf_counter() - self._setup_s
            following = [[token] for token in self.step(rows)]
            return Checked([()] * len(rows), following, 0.0, perf_counter() - self._setup_s - started)
        self._ahead.pop(self._number(rows), None)  # what it stores is stored again
        with self._setting_up() as setup:
            slots, drafts = self._blocks(rows), None
            kind = setup.prepare(slots, "dense")
            if drafting:
                drafts = self._source.slots(len(drafting), self._rules)
                modes = {drafts.sparse_mode(self._rows[row].rule) for row in drafting}
                draft_kind = setup.prepare(drafts, modes.pop() if len(modes) == 1 else "mixed")
        clock = Clock(slots.tokens.device)
        fed: dict[Row, Sequence[int]] = {row: [row.token, *each.tokens] for row, each in zip(rows, proposals)}
        drafted = None
        if drafts is not None:
            counts = [proposal.drafts for proposal in proposals if proposal.drafts]
            drafted = self._draft(drafts, draft_kind, drafting, counts)
            for slot, (row, count) in enumerate(zip(drafting, counts)):
                places = range(slot, count * drafts.num_slots, drafts.num_slots)
                fed[row] = [row.token, *map(drafts_at, places)]
        clock.mark()
        slots.assign_blocks(self._blocks_of(rows, list(fed.values())), drafted=drafted)
        slots.run(kind, 0)
        chosen = slots.tokens.view(-1, BLOCK).tolist()
        draft_s, verify_s = clock.read()
        of_drafts = [] if drafted is None else drafted.tolist()
        tokens = [[of_drafts[drafts_at(each)] if each < 0 else each for each in fed[row][1:]] for row in rows]
        for row, each in zip(rows, tokens):
            kept = self._rows[row]
            kept.plain = 0 if each else kept.plain + 1
            kept.blocks.append((row.num_cached, 1 + len(each)))
        following = [chosen[self._rows[row].place % BLOCK_ROWS][: len(fed[row])] for row in rows]
        return Checked(tokens, following, draft_s, verify_s)

    def _draft(self, slots: Slots, kind: StepKind, rows: Sequence[Row], counts: Sequence[int]) -> Tensor:
        """Choose so many tokens of each row under its rule, int64 [steps * slots]; what they store is overwritten."""
        steps, drafted = max(counts), list[Tensor]()
        slots.assign([self._assignment(row) for row in rows], steps)
        for number in range(steps):
            for slot, count_of_row in enumerate(counts):
                if count_of_row == number:
                    slots.release(slot)
            slots.run(kind, number)
            drafted.append(slots.tokens.clone())
        self._layers, counted = slots.layers, slots.results[1:].clone()
        for slot, (row, count_of_row) in enumerate(zip(rows, counts)):
            kept = self._rows[row]
            kept.drafts += range(row.num_cached + 1, row.num_cached + count_of_row + 1)
            kept.counted = kept.counted + counted[:, slot]
        return torch.cat(drafted)

    def _blocks_of(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> dict[int, Block]:
        """Consecutive tokens of each row, by the place of its block."""
        blocks = {}
        for row, fed in zip(rows, tokens):
            kept = self._rows[row]
            blocks[kept.place % BLOCK_ROWS] = Block(kept.pages, row.num_cached, fed, kept.sampling, _drawn(row))
        return blocks

    def _blocks(self, rows: Sequence[Row]) -> Slots:
        return self._source.blocks(self._number(rows), self._rules)

    def _number(self, rows: Sequence[Row]) -> int:
        """Of the slots of a part; those of exact rows have odd ones."""
        return 2 * (self._rows[rows[0]].place // BLOCK_ROWS) + (rows[0].exact is not None)

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
        self._ahead.clear()

    def release(self, kv: KVPool) -> None:
        if self._source.kv is kv:
            for kept in self._rows.values():
                self._count(kept)
            self._layers = ()  # they hold the tensors
        super().release(kv)

    def leave(self, row: Row) -> None:
        self._ahead.pop(self._number([row]), None)
        kept = self._rows.pop(row)
        row.steps, row.setup_s = None, self.setup_s - kept.setup_s
        self._count(kept)
        add_blocks(kept.cache.stats, kept.cache.attentions, kept.blocks)

    def _count(self, kept: RowBlocks) -> None:
        """Count the drafts of a row so far."""
        if kept.drafts:
            lengths = torch.tensor(kept.drafts)
            drafts = DecodeSteps(lengths, torch.ones_like(lengths, dtype=torch.bool))
            counted = torch.zeros(2 * len(self._layers), dtype=torch.int64) + torch.as_tensor(kept.counted).cpu()
            add_steps(kept.cache.stats, self._layers, drafts, kept.rule, counted)
            kept.drafts, kept.counted = [], 0


class Clock:
    """Seconds before and after a mark, of the device where the host launches ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._started, self._marks = perf_counter(), list[Any]()
        self.mark()

    def mark(self) -> None:
        if self._stream is None:
            self._marks.append(perf_counter())
            return
        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record(self._stream)

    def read(self) -> tuple[float, float]:
        """Before the mark and after it until now, when the device has nothing more to do."""
        first, second = self._marks
        before = second - first if self._stream is None else first.elapsed_time(second) / 1000
        return before, perf_counter() - self._started - before


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
