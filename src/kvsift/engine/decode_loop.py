"""The decode loop of a batch: the host reads the tokens of a step while the next one runs.

The end of a row shows one step late; the tokens written after it are cropped when the loop is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvsift.engine.accounting import DecodeRow, add_counts
from kvsift.engine.probing import Probe, probe_rows
from kvsift.engine.slots import Assignment, Slots, StepKind
from kvsift.layer.paged_decode import ALWAYS
from kvsift.plan.plan import Rule

LAUNCHED_AHEAD = 2  # steps launched ahead of the last token read
MOVE_STEPS = 512  # so many steps must be left before fewer slots are worth capturing: a second for microseconds each


class SlotSource(Protocol):
    """The slots of a loop (``engine.session``)."""

    def slots(self, num_slots: int, rules: Sequence[Rule | None]) -> Slots:
        """Return slots for at least so many sequences with these rules."""

    def captured(self, num_slots: int, rules: Sequence[Rule | None], kind: StepKind) -> bool:
        """Return whether a step for them is captured."""

    def dense_below(self, slots: Slots, rule: Rule) -> int:
        """Return the context length below which dense steps are to be preferred."""


class LaunchedStep(NamedTuple):
    """A step whose results have not been read."""

    results: Tensor  # ``Slots.results``, on the host once the event has come
    event: torch.cuda.Event | None
    rows: Sequence[DecodeRow]
    probes: Sequence[Probe]


class DecodeLoop:
    """Decoding of all rows until each is done; iterating yields (index of the row, text to print).

    Args:
        source: of the slots.
        rows: requests whose first token has been chosen.

    Attributes:
        setup_s: seconds spent capturing graphs and measuring the crossover.
        dense_below: contexts shorter than this were dense.
    """

    def __init__(self, source: SlotSource, rows: Sequence[DecodeRow]) -> None:
        self._source, self._rows = source, rows
        self._paused_s = sum(row.stats.probe_s for row in rows)  # no part of any token's time
        self._launched: deque[LaunchedStep] = deque()
        self._buffers: list[Tensor] = []
        self.setup_s = 0.0
        self.dense_below = 0

    def __iter__(self) -> Iterator[tuple[int, str]]:
        slots: Slots | None = None
        try:
            while rows := [row for row in self._rows if row.remaining > 0]:
                slots = self._assign(rows)
                yield from self._decode(slots, rows)
        finally:
            self._launched.clear()
            if slots is not None:
                for row in self._rows:
                    add_counts(row, slots.layers, slots.over_bus)

    def _assign(self, rows: Sequence[DecodeRow]) -> Slots:
        started = perf_counter()
        for row in rows:
            row.widen()
        slots = self._source.slots(len(rows), [row.rule for row in rows])
        for row in rows:
            self._prepare(row, slots)
        steps = max(row.remaining for row in rows)
        for step in {0} | {row.dense_below - row.written - 1 for row in rows}:  # where rows become sparse
            if running := [row for row in rows if 0 <= step < row.remaining]:
                slots.prepare(self._kind(rows, running, step))
        slots.assign([_assignment(row) for row in rows], steps)
        self._buffers = [_host_buffer(slots.results) for _ in range(LAUNCHED_AHEAD + 1)]
        seconds = perf_counter() - started
        self.setup_s, self._paused_s = self.setup_s + seconds, self._paused_s + seconds
        return slots

    def _prepare(self, row: DecodeRow, slots: Slots) -> None:
        row.counted, row.counted_in_slot = row.counted + row.counted_in_slot, 0
        row.sparse_mode, row.dense_below = slots.sparse_mode(row.rule), ALWAYS
        if row.rule is not None and not row.stays_dense:
            measured = self._source.dense_below(slots, row.rule)
            if not row.budgets:  # else the guard has decided on a budget for which dense steps may be faster
                self.dense_below = max(self.dense_below, measured)
            row.dense_below = max(measured, row.rule.budget.min_context)

    def _kind(self, rows: Sequence[DecodeRow], running: Sequence[DecodeRow], ahead: int = 0) -> StepKind:
        modes = {row.mode(ahead) for row in running}
        sampled = any(row.transcript.request.sampling.temperature > 0 for row in rows)
        return StepKind(modes.pop() if len(modes) == 1 else "mixed", sampled)

    def _decode(self, slots: Slots, rows: Sequence[DecodeRow]) -> Iterator[tuple[int, str]]:
        number, moving = 0, False
        while True:
            while not moving and len(self._launched) < LAUNCHED_AHEAD and any(row.remaining > 0 for row in rows):
                kind = self._kind(rows, [row for row in rows if not row.transcript.done])
                if not slots.captured(kind):  # rows have ended, and with them the other mode of a mixed step
                    kind = kind._replace(mode="mixed")
                self._launched.append(self._launch(slots, rows, kind, number))
                number += 1
                moving = any(row.will_widen for row in rows if row.remaining > 0)
            if not self._launched:
                return
            yield from self._read(slots, self._launched.popleft())
            moving = moving or self._should_move(slots, rows)

    def _launch(self, slots: Slots, rows: Sequence[DecodeRow], kind: StepKind, number: int) -> LaunchedStep:
        running = [row for row in rows if not row.transcript.done]
        for row in running:
            if row.remaining > 0:
                row.widen()  # notes what was probed; a budget that grows has stopped the launches before
            _follow_summaries(slots, row, kind)
            row.dense.append(row.mode() == "dense")
        step = slots.run(kind, number)
        buffer, event = self._buffers[number % len(self._buffers)], None
        buffer.copy_(slots.results, non_blocking=True)
        if buffer.is_pinned():
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(slots.tokens.device))
        probes, seconds = probe_rows(slots, step, rows)
        self._paused_s += seconds
        return LaunchedStep(buffer, event, rows, probes)

    def _read(self, slots: Slots, step: LaunchedStep) -> Iterator[tuple[int, str]]:
        if step.event is not None:
            step.event.synchronize()
        time = perf_counter() - self._paused_s
        for probe in step.probes:
            if not probe.row.transcript.done:
                probe.add()
        tokens, counted, pieces = step.results[0].tolist(), step.results[1:].clone(), []
        for slot, row in enumerate(step.rows):
            if row.transcript.done:
                continue
            pieces.append((row.row, row.transcript.take(tokens[slot], time)))
            row.counted_in_slot = counted[:, slot]
            if row.transcript.done:
                slots.release(slot)
        yield from ((number, piece) for number, piece in pieces if piece)

    def _should_move(self, slots: Slots, rows: Sequence[DecodeRow]) -> bool:
        """Return whether the rows that are left move to fewer slots."""
        running = [row for row in rows if not row.transcript.done]
        if not running or 2 * len(running) > slots.num_slots:
            return False
        steps, kind = max(row.remaining for row in running), self._kind(running, running)
        rules = [row.rule for row in running]
        return steps > 0 and (steps >= MOVE_STEPS or self._source.captured(len(running), rules, kind))


def _follow_summaries(slots: Slots, row: DecodeRow, kind: StepKind) -> None:
    """Note where summaries begin to be missing; write them before the first sparse step.

    Mixed steps write the summaries of all rows, and so leave no gap behind a row that is dense in them.
    """
    if row.rule is None:
        return
    if kind.mode == "dense" and row.stale_from is None:
        row.stale_from = row.written
    elif row.mode() != "dense" and row.stale_from is not None:
        slots.catch_up(row.row, row.written, row.stale_from)
        row.stale_from = None


def _assignment(row: DecodeRow) -> Assignment:
    transcript, sampling = row.transcript, row.transcript.request.sampling
    drawn = len(transcript.new_ids)
    return Assignment(row.row, row.written, transcript.new_ids[-1], sampling, drawn, row.rule, row.dense_below)


def _host_buffer(results: Tensor) -> Tensor:
    return torch.empty(results.shape, dtype=results.dtype, pin_memory=results.is_cuda)
