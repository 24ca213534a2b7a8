"""Captured steps of sequences that join and leave: the host reads the tokens of a step while the next one runs.

The end of a sequence shows one step late. What was launched for it after its end is written into pages of its own, and
is not read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvsift.engine.graphs.accounting import CapturedSequence, add_counts
from kvsift.engine.graphs.feeds import Assignment
from kvsift.engine.graphs.probing import Probe, probe_sequences
from kvsift.engine.graphs.slots import Slots, StepKind, tokens_of
from kvsift.engine.sampling import CHOICES, choice_of
from kvsift.layer.paged_decode import ALWAYS, StepMode
from kvsift.plan.plan import Rule

LAUNCHED_AHEAD = 2  # steps launched ahead of the last token read
MOVE_STEPS = 512  # so many steps must be left before fewer slots are worth capturing: a second for microseconds each


class SlotSource(Protocol):
    """The slots of sequences (``engine.graphs.session``)."""

    def slots(self, num_slots: int, rules: Sequence[Rule | None]) -> Slots:
        """Return slots for at least so many sequences with these rules."""

    def captured(self, num_slots: int, rules: Sequence[Rule | None], kind: StepKind) -> bool:
        """Return whether a step for them is captured."""

    def dense_below(self, slots: Slots, rule: Rule) -> int:
        """Return the context length below which dense steps are to be preferred."""

    @property
    def steady(self) -> bool:
        """Whether what a sequence answers is not to depend on the others."""

    @property
    def holds(self) -> bool:
        """Whether slots that were returned may be used on: the pools behind them have not moved."""


class LaunchedStep(NamedTuple):
    """A step whose results have not been read."""

    results: Tensor  # ``Slots.results``, on the host once the event has come
    event: torch.cuda.Event | None
    seqs: Sequence[CapturedSequence]  # by slot
    probes: Sequence[Probe]


class CapturedSequences:
    """Sequences that decode in captured steps over the slots of a source.

    Attributes:
        setup_s: seconds spent capturing graphs and measuring the crossover.
        dense_below: contexts shorter than this were dense.
    """

    def __init__(self, source: SlotSource) -> None:
        self._source = source
        self._slots: Slots | None = None
        self._seqs: list[CapturedSequence] = []  # by slot; one that is done keeps its slot, idle, until the others move
        self._number = 0  # of the next step since sequences were assigned
        self._moves = False  # to other slots, once no step is launched
        self._launched: deque[LaunchedStep] = deque()
        self._buffers: list[Tensor] = []
        self.setup_s = 0.0
        self.dense_below = 0

    def prepare(self, rule: Rule | None, num_seqs: int) -> int:
        """Capture all steps that one, two, four, ... sequences under a rule may take, dense sequences beside; returns
        how many. No sequence has a place."""
        started, count = perf_counter(), 0
        for number in [1 << power for power in reversed(range((num_seqs - 1).bit_length() + 1))]:
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

    def ready(self, seqs: Sequence[CapturedSequence]) -> list[CapturedSequence]:
        """Those of the sequences for which ``step`` has a token: a sequence that joins waits for what was launched
        without it."""
        return [seq for seq in seqs if not self._launched or seq in self._launched[0].seqs]

    def step(self, seqs: Sequence[CapturedSequence]) -> list[int]:
        """Read the next token of each sequence.

        Args:
            seqs: all that go on, apart from some that are not ``ready``; others go on later. What is done has left.
        """
        present = [seq for seq in self._seqs if not seq.done]
        if any(seq not in seqs for seq in present):
            self.recall()
            present = []
        joins = len(present) < len(seqs)
        self._moves = self._moves or not self._source.holds or self._should_move(present)
        if not self._launched and (self._moves or joins):
            self._assign(seqs)
        while not self._moves and len(self._launched) < LAUNCHED_AHEAD and any(seq.remaining > 0 for seq in seqs):
            self._launch(seqs)
            self._moves = any(seq.will_widen for seq in seqs if seq.remaining > 0)
        return self._read(seqs)

    def stop_ahead(self) -> None:
        """Launch nothing more before the sequences take places again, because some wait to join."""
        self._moves = True

    def leave(self, seq: CapturedSequence) -> None:
        """End a sequence, and count its steps."""
        seq.done = True
        if seq in self._seqs and self._slots is not None:
            self._slots.release(self._seqs.index(seq))
        if seq.steps:
            slots = self._slots or self._source.slots(1, [seq.rule])
            add_counts(seq, slots.layers, slots.over_bus)

    def recall(self) -> None:
        """Forget what was launched and not read. Sequences go on from the tokens that were read."""
        self._launched.clear()
        self._moves = True
        for seq in self._seqs:
            seq.recall()
        self._seqs = []

    def release(self) -> None:
        """Let go of the slots, after ``recall``."""
        self._slots = None

    def _assign(self, seqs: Sequence[CapturedSequence]) -> None:
        started = perf_counter()
        for seq in seqs:
            seq.widen()
        slots = self._slots = self._source.slots(len(seqs), [seq.rule for seq in seqs])
        for seq in seqs:
            self._prepare(seq, slots)
        steps = max(seq.remaining for seq in seqs)
        for step in {0} | {seq.dense_below - seq.written - 1 for seq in seqs}:  # where sequences become sparse
            if running := [seq for seq in seqs if 0 <= step < seq.remaining]:
                slots.prepare(self._kind(seqs, running, step))
        slots.assign([_assignment(seq) for seq in seqs], steps)
        self._seqs, self._number, self._moves = list(seqs), 0, False
        self._buffers = [_host_buffer(slots.results) for _ in range(LAUNCHED_AHEAD + 1)]
        seconds = perf_counter() - started
        self.setup_s += seconds
        self._pause(seconds)

    def _prepare(self, seq: CapturedSequence, slots: Slots) -> None:
        seq.count_slot()
        seq.sparse_mode, seq.dense_below = slots.sparse_mode(seq.rule), ALWAYS
        if seq.rule is not None and not seq.stays_dense:
            measured = self._source.dense_below(slots, seq.rule)
            if not seq.budgets:  # else the guard has decided on a budget for which dense steps may be faster
                self.dense_below = max(self.dense_below, measured)
            seq.dense_below = max(measured, seq.rule.budget.min_context)

    def _pause(self, seconds: float) -> None:
        """Let seconds be no part of the time of any token."""
        for seq in self._seqs:
            seq.stats.probe_s += 0.0 if seq.done else seconds

    def _launch(self, seqs: Sequence[CapturedSequence]) -> None:
        slots = self._slots
        assert slots is not None
        kind = self._kind(self._seqs, seqs)
        if not slots.captured(kind):  # sequences have ended, and with them the other mode of a mixed step
            kind = kind._replace(mode="mixed")
        for seq in seqs:
            if seq.remaining > 0:
                seq.widen()  # notes what was probed; a budget that grows has stopped the launches before
            _follow_summaries(seq, kind)
            seq.dense.append(seq.mode() == "dense")
            seq.sparse_before.append(seq.sparse_steps)
        step = slots.run(kind, self._number)
        buffer, event = self._buffers[self._number % len(self._buffers)], None
        self._number += 1
        buffer.copy_(slots.results, non_blocking=True)
        if buffer.is_pinned():
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(slots.tokens.device))
        probes, seconds = probe_sequences(slots, step, self._seqs)
        self._pause(seconds)
        self._launched.append(LaunchedStep(buffer, event, self._seqs, probes))

    def _read(self, seqs: Sequence[CapturedSequence]) -> list[int]:
        step = self._launched.popleft()
        if step.event is not None:
            step.event.synchronize()
        for probe in step.probes:
            if not probe.seq.done:
                probe.add()
        tokens, counted = tokens_of(step.results), step.results[2:].clone()
        read = []
        for seq in seqs:
            slot = step.seqs.index(seq)
            seq.go_on(tokens[slot], counted[:, slot])
            read.append(seq.token)
        return read

    def _kind(self, seqs: Sequence[CapturedSequence], running: Sequence[CapturedSequence], ahead: int = 0) -> StepKind:
        """The step that these of the sequences need, so many steps from now."""
        modes: set[StepMode] = {"mixed"} if self._source.steady else {seq.mode(ahead) for seq in running}
        return StepKind(modes.pop() if len(modes) == 1 else "mixed", choice_of(seq.sampling for seq in seqs))

    def _should_move(self, seqs: Sequence[CapturedSequence]) -> bool:
        """Return whether the sequences that are left move to fewer slots."""
        if self._slots is None or not seqs or 2 * len(seqs) > self._slots.num_slots or self._source.steady:
            return False
        steps, kind = max(seq.remaining for seq in seqs), self._kind(seqs, seqs)
        rules = [seq.rule for seq in seqs]
        return steps > 0 and (steps >= MOVE_STEPS or self._source.captured(len(seqs), rules, kind))


def _follow_summaries(seq: CapturedSequence, kind: StepKind) -> None:
    """Note where summaries begin to be missing; write them before the first sparse step.

    Mixed steps write the summaries of all sequences, and so leave no gap behind a sequence that is dense in them.
    """
    if seq.rule is None:
        return
    if kind.mode == "dense" and seq.stale_from is None:
        seq.stale_from = seq.written
    elif seq.mode() != "dense" and seq.stale_from is not None:
        seq.write_summaries()


def _assignment(seq: CapturedSequence) -> Assignment:
    pages = seq.cache.table.planned(seq.place)
    return Assignment(pages, seq.written, seq.token, seq.sampling, seq.steps + 1, seq.rule, seq.dense_below)


def _host_buffer(results: Tensor) -> Tensor:
    return torch.empty(results.shape, dtype=results.dtype, pin_memory=results.is_cuda)
