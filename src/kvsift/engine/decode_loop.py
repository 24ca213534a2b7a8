"""Rows that decode together, without waiting for the host: the next step runs while the last one's tokens are read.

A row that ends is known to have ended one step late; what that step wrote is taken back when the loop is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvsift.engine.counting import Row, Shown, add_counts
from kvsift.engine.probing import Probe, probe_rows
from kvsift.engine.slots import Seat, Slots, StepKind
from kvsift.runtime.plan import Rule

IN_FLIGHT = 2  # steps launched ahead of the last token read
MOVE_STEPS = 512  # so many steps must be left before fewer slots are worth capturing: a second for microseconds each


class Host(Protocol):
    """Where a loop finds its slots (``engine.session``)."""

    def slots(self, num_slots: int) -> Slots:
        """Of at least so many sequences."""

    def knows(self, num_slots: int, kind: StepKind) -> bool:
        """Whether a step for so many sequences is captured."""

    def dense_below(self, slots: Slots) -> int:
        """Contexts shorter than this are shown in full."""


class Flight(NamedTuple):
    """A step whose tokens have not been read."""

    tokens: Tensor  # int64 [slots], on the host once the event has come
    event: torch.cuda.Event | None
    seated: Sequence[Row]
    probes: Sequence[Probe]


class DecodeLoop:
    """Tokens for all rows until each is done; iterating yields (index of the row, text that can be shown).

    Args:
        host: of the slots.
        rows: requests whose first token has been chosen.
        rule: the decode rule; None is dense.

    Attributes:
        setup_s: seconds spent capturing graphs and measuring the crossover.
        dense_below: contexts shorter than this were shown in full.
    """

    def __init__(self, host: Host, rows: Sequence[Row], rule: Rule | None) -> None:
        self._host, self._rows, self._rule = host, rows, rule
        self._paused_s = sum(row.stats.probe_s for row in rows)  # no part of any token's time
        self._flights: deque[Flight] = deque()
        self._shown = Shown()
        self._buffers: list[Tensor] = []
        self.setup_s = 0.0
        self.dense_below = 0

    def __iter__(self) -> Iterator[tuple[int, str]]:
        slots: Slots | None = None
        try:
            while seated := [row for row in self._rows if row.remaining > 0]:
                slots = self._seat(seated)
                yield from self._drive(slots, seated)
                self._shown.follow(slots, False)
        finally:
            self._flights.clear()
            if slots is not None:
                self._shown.follow(slots, False)
                add_counts(self._rows, slots.layers, self._shown, None if self._rule is None else self._rule.budget)

    def _seat(self, seated: Sequence[Row]) -> Slots:
        started = perf_counter()
        slots = self._host.slots(len(seated))
        longest, steps = max(row.written for row in seated), max(row.remaining for row in seated)
        self.dense_below = self._host.dense_below(slots)
        for length in (longest + 1, longest + steps):
            slots.prepare(self._kind(seated, length))
        slots.seat([_seat_of(row) for row in seated], steps)
        self._buffers = [_host_buffer(slots.tokens) for _ in range(IN_FLIGHT + 1)]
        seconds = perf_counter() - started
        self.setup_s, self._paused_s = self.setup_s + seconds, self._paused_s + seconds
        return slots

    def _kind(self, rows: Sequence[Row], longest: int) -> StepKind:
        dense = self._rule is None or longest < self.dense_below
        return StepKind(dense, any(row.transcript.request.sampling.temperature > 0 for row in rows))

    def _drive(self, slots: Slots, seated: Sequence[Row]) -> Iterator[tuple[int, str]]:
        number, leaving = 0, False
        while True:
            while not leaving and len(self._flights) < IN_FLIGHT and any(row.remaining > 0 for row in seated):
                longest = max(row.written for row in seated if not row.transcript.done)
                wanted = self._kind(seated, longest + 1)
                # once the longest row has ended, others may be short again; nothing is captured for that
                kind = wanted if slots.knows(wanted) else wanted._replace(dense=False)
                self._flights.append(self._launch(slots, seated, kind, number))
                number += 1
            if not self._flights:
                return
            yield from self._land(slots, self._flights.popleft())
            leaving = leaving or self._should_move(slots, seated)

    def _launch(self, slots: Slots, seated: Sequence[Row], kind: StepKind, number: int) -> Flight:
        self._shown.follow(slots, not kind.dense)
        self._follow_summaries(slots, seated, kind)
        recorded, probes = slots.run(kind, number), list[Probe]()
        buffer, event = self._buffers[number % len(self._buffers)], None
        buffer.copy_(slots.tokens, non_blocking=True)
        if buffer.is_pinned():
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(slots.tokens.device))
        for row in seated:
            if not row.transcript.done:
                row.dense.append(kind.dense)
        if self._rule is not None and not kind.dense:
            lengths = [1 if row.transcript.done else row.written for row in seated]
            self._shown.lengths += lengths + [1] * (slots.num_slots - len(seated))
            probes, seconds = probe_rows(slots, recorded, seated, self._rule)
            self._paused_s += seconds
        return Flight(buffer, event, seated, probes)

    def _follow_summaries(self, slots: Slots, seated: Sequence[Row], kind: StepKind) -> None:
        if self._rule is None:
            return
        for row in seated:
            if row.transcript.done:
                continue
            if kind.dense and row.stale_from is None:
                row.stale_from = row.written
            elif not kind.dense and row.stale_from is not None:
                slots.catch_up(row.row, row.written, row.stale_from)
                row.stale_from = None

    def _land(self, slots: Slots, flight: Flight) -> Iterator[tuple[int, str]]:
        if flight.event is not None:
            flight.event.synchronize()
        time = perf_counter() - self._paused_s
        for probe in flight.probes:
            if not probe.row.transcript.done:
                probe.add()
        for slot, (row, token) in enumerate(zip(flight.seated, flight.tokens.tolist())):
            if row.transcript.done:
                continue
            piece = row.transcript.take(token, time)
            if row.transcript.done:
                slots.park(slot)
            if piece:
                yield row.row, piece

    def _should_move(self, slots: Slots, seated: Sequence[Row]) -> bool:
        """Whether what is left goes on in fewer slots."""
        left = [row for row in seated if not row.transcript.done]
        if not left or 2 * len(left) > slots.num_slots:
            return False
        steps, kind = max(row.remaining for row in left), self._kind(left, max(row.written for row in left) + 1)
        return steps > 0 and (steps >= MOVE_STEPS or self._host.knows(len(left), kind))


def _seat_of(row: Row) -> Seat:
    transcript = row.transcript
    return Seat(
        row.row, row.written, transcript.new_ids[-1], transcript.request.sampling, drawn=len(transcript.new_ids)
    )


def _host_buffer(tokens: Tensor) -> Tensor:
    return torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.is_cuda)
