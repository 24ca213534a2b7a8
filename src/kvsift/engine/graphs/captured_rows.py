"""Captured steps of rows that join and leave: the host reads the tokens of a step while the next one runs.

The end of a row shows one step late. What was launched for it after its end is written into pages of its own, and is
not read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvsift.engine.graphs.accounting import DecodeRow, add_counts
from kvsift.engine.graphs.feeds import Assignment
from kvsift.engine.graphs.probing import Probe, probe_rows
from kvsift.engine.graphs.slots import Slots, StepKind, tokens_of
from kvsift.engine.sampling import CHOICES, choice_of
from kvsift.layer.paged_decode import ALWAYS, StepMode
from kvsift.plan.plan import Rule

LAUNCHED_AHEAD = 2  # steps launched ahead of the last token read
MOVE_STEPS = 512  # so many steps must be left before fewer slots are worth capturing: a second for microseconds each


class SlotSource(Protocol):
    """The slots of rows (``engine.graphs.session``)."""

    def slots(self, num_slots: int, rules: Sequence[Rule | None]) -> Slots:
        """Return slots for at least so many sequences with these rules."""

    def captured(self, num_slots: int, rules: Sequence[Rule | None], kind: StepKind) -> bool:
        """Return whether a step for them is captured."""

    def dense_below(self, slots: Slots, rule: Rule) -> int:
        """Return the context length below which dense steps are to be preferred."""

    @property
    def steady(self) -> bool:
        """Whether what a row answers is not to depend on the others."""

    @property
    def holds(self) -> bool:
        """Whether slots that were returned may be used on: the pools behind them have not moved."""


class LaunchedStep(NamedTuple):
    """A step whose results have not been read."""

    results: Tensor  # ``Slots.results``, on the host once the event has come
    event: torch.cuda.Event | None
    rows: Sequence[DecodeRow]  # by slot
    probes: Sequence[Probe]


class CapturedRows:
    """Rows that decode in captured steps over the slots of a source.

    Attributes:
        setup_s: seconds spent capturing graphs and measuring the crossover.
        dense_below: contexts shorter than this were dense.
    """

    def __init__(self, source: SlotSource) -> None:
        self._source = source
        self._slots: Slots | None = None
        self._rows: list[DecodeRow] = []  # by slot; one that is done keeps its slot, idle, until the others move
        self._number = 0  # of the next step since rows were assigned
        self._moves = False  # to other slots, once no step is launched
        self._launched: deque[LaunchedStep] = deque()
        self._buffers: list[Tensor] = []
        self.setup_s = 0.0
        self.dense_below = 0

    def prepare(self, rule: Rule | None, num_rows: int) -> int:
        """Capture all steps that one, two, four, ... rows under a rule may take, dense rows beside; returns how many.
        No row has a place."""
        started, count = perf_counter(), 0
        for number in [1 << power for power in reversed(range((num_rows - 1).bit_length() + 1))]:
            slots = self._source.slots(number, [rule])
            modes: set[StepMode] = {"dense"} if rule is None else {"dense", "mixed", slots.sparse_mode(rule)}
            if self._source.steady:
                modes = {"mixed"}
            if rule is not None:
                self._source.dense_below(slots, rule)
            for mode, choice in product(modes, CHOICES):
                kind = StepKind(mode, choice)
                count += not slots.captured(kind)
                slots.prepare(kind)
        self.setup_s += perf_counter() - started
        return count

    def ready(self, rows: Sequence[DecodeRow]) -> list[DecodeRow]:
        """Those of the rows for which ``step`` has a token: a row that joins waits for what was launched without it."""
        return [row for row in rows if not self._launched or row in self._launched[0].rows]

    def step(self, rows: Sequence[DecodeRow]) -> list[int]:
        """Read the next token of each row.

        Args:
            rows: all that go on, apart from some that are not ``ready``; others go on later. What is done has left.
        """
        present = [row for row in self._rows if not row.done]
        if any(row not in rows for row in present):
            self.recall()
            present = []
        joins = len(present) < len(rows)
        self._moves = self._moves or not self._source.holds or self._should_move(present)
        if not self._launched and (self._moves or joins):
            self._assign(rows)
        while not self._moves and len(self._launched) < LAUNCHED_AHEAD and any(row.remaining > 0 for row in rows):
            self._launch(rows)
            self._moves = any(row.will_widen for row in rows if row.remaining > 0)
        return self._read(rows)

    def stop_ahead(self) -> None:
        """Launch nothing more before the rows take places again, because some wait to join."""
        self._moves = True

    def leave(self, row: DecodeRow) -> None:
        """End a row, and count its steps."""
        row.done = True
        if row in self._rows and self._slots is not None:
            self._slots.release(self._rows.index(row))
        if row.steps:
            slots = self._slots or self._source.slots(1, [row.rule])
            add_counts(row, slots.layers, slots.over_bus)

    def recall(self) -> None:
        """Forget what was launched and not read. Rows go on from the tokens that were read."""
        self._launched.clear()
        self._moves = True
        for row in self._rows:
            row.recall()
        self._rows = []

    def release(self) -> None:
        """Let go of the slots, after ``recall``."""
        self._slots = None

    def _assign(self, rows: Sequence[DecodeRow]) -> None:
        started = perf_counter()
        for row in rows:
            row.widen()
        slots = self._slots = self._source.slots(len(rows), [row.rule for row in rows])
        for row in rows:
            self._prepare(row, slots)
        steps = max(row.remaining for row in rows)
        for step in {0} | {row.dense_below - row.written - 1 for row in rows}:  # where rows become sparse
            if running := [row for row in rows if 0 <= step < row.remaining]:
                slots.prepare(self._kind(rows, running, step))
        slots.assign([_assignment(row) for row in rows], steps)
        self._rows, self._number, self._moves = list(rows), 0, False
        self._buffers = [_host_buffer(slots.results) for _ in range(LAUNCHED_AHEAD + 1)]
        seconds = perf_counter() - started
        self.setup_s += seconds
        self._pause(seconds)

    def _prepare(self, row: DecodeRow, slots: Slots) -> None:
        row.count_slot()
        row.sparse_mode, row.dense_below = slots.sparse_mode(row.rule), ALWAYS
        if row.rule is not None and not row.stays_dense:
            measured = self._source.dense_below(slots, row.rule)
            if not row.budgets:  # else the guard has decided on a budget for which dense steps may be faster
                self.dense_below = max(self.dense_below, measured)
            row.dense_below = max(measured, row.rule.budget.min_context)

    def _pause(self, seconds: float) -> None:
        """Let seconds be no part of the time of any token."""
        for row in self._rows:
            row.stats.probe_s += 0.0 if row.done else seconds

    def _launch(self, rows: Sequence[DecodeRow]) -> None:
        slots = self._slots
        assert slots is not None
        kind = self._kind(self._rows, rows)
        if not slots.captured(kind):  # rows have ended, and with them the other mode of a mixed step
            kind = kind._replace(mode="mixed")
        for row in rows:
            if row.remaining > 0:
                row.widen()  # notes what was probed; a budget that grows has stopped the launches before
            _follow_summaries(row, kind)
            row.dense.append(row.mode() == "dense")
            row.sparse_before.append(row.sparse_steps)
        step = slots.run(kind, self._number)
        buffer, event = self._buffers[self._number % len(self._buffers)], None
        self._number += 1
        buffer.copy_(slots.results, non_blocking=True)
        if buffer.is_pinned():
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(slots.tokens.device))
        probes, seconds = probe_rows(slots, step, self._rows)
        self._pause(seconds)
        self._launched.append(LaunchedStep(buffer, event, self._rows, probes))

    def _read(self, rows: Sequence[DecodeRow]) -> list[int]:
        step = self._launched.popleft()
        if step.event is not None:
            step.event.synchronize()
        for probe in step.probes:
            if not probe.row.done:
                probe.add()
        tokens, counted = tokens_of(step.results), step.results[2:].clone()
        read = []
        for row in rows:
            slot = step.rows.index(row)
            row.go_on(tokens[slot], counted[:, slot])
            read.append(row.token)
        return read

    def _kind(self, rows: Sequence[DecodeRow], running: Sequence[DecodeRow], ahead: int = 0) -> StepKind:
        """The step that these of the rows need, so many steps from now."""
        modes: set[StepMode] = {"mixed"} if self._source.steady else {row.mode(ahead) for row in running}
        return StepKind(modes.pop() if len(modes) == 1 else "mixed", choice_of(row.sampling for row in rows))

    def _should_move(self, rows: Sequence[DecodeRow]) -> bool:
        """Return whether the rows that are left move to fewer slots."""
        if self._slots is None or not rows or 2 * len(rows) > self._slots.num_slots or self._source.steady:
            return False
        steps, kind = max(row.remaining for row in rows), self._kind(rows, rows)
        rules = [row.rule for row in rows]
        return steps > 0 and (steps >= MOVE_STEPS or self._source.captured(len(rows), rules, kind))


def _follow_summaries(row: DecodeRow, kind: StepKind) -> None:
    """Note where summaries begin to be missing; write them before the first sparse step.

    Mixed steps write the summaries of all rows, and so leave no gap behind a row that is dense in them.
    """
    if row.rule is None:
        return
    if kind.mode == "dense" and row.stale_from is None:
        row.stale_from = row.written
    elif row.mode() != "dense" and row.stale_from is not None:
        row.write_summaries()


def _assignment(row: DecodeRow) -> Assignment:
    pages = row.cache.table.planned(row.place)
    return Assignment(pages, row.written, row.token, row.sampling, row.steps + 1, row.rule, row.dense_below)


def _host_buffer(results: Tensor) -> Tensor:
    return torch.empty(results.shape, dtype=results.dtype, pin_memory=results.is_cuda)
