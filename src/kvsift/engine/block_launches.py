"""What groups of blocks have launched, and where rows were before it."""

from __future__ import annotations

from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.batching.row import Row
from kvsift.engine.slots import Slots, StepKind, drafts_at


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


class RowPlace(NamedTuple):
    """How far a row is."""

    row: Row
    num_cached: int
    token: int  # the next to feed

    @classmethod
    def of(cls, row: Row) -> RowPlace:
        return cls(row, row.num_cached, row.token)

    @property
    def drawn(self) -> int:
        """Tokens of the answer so far, the next to feed included."""
        return self.num_cached - len(self.row.ids) + 1


class Drafts(NamedTuple):
    """Drafts that are launched.

    Attributes:
        slots: that they run on.
        places: of the rows, before them.
        counts: of each row.
        tokens: int64 [steps * slots], on the device.
        counted: int64 [2 * layers, slots], what they have counted (``Slots.results``).
        clock: marked behind them.
    """

    slots: Slots
    places: list[RowPlace]
    counts: list[int]
    tokens: Tensor
    counted: Tensor
    clock: Clock

    def of(self, slot: int) -> list[int]:
        """Numbers that stand for the drafts of a slot (``drafts_at``)."""
        return [drafts_at(slot + number * self.slots.num_slots) for number in range(self.counts[slot])]


class PlainStep(NamedTuple):
    """A step of one token for each row, launched and not read, and the steps to come that the slots are ready for.

    Attributes:
        slots: that it runs on.
        places: of the rows, before it.
        chosen: int64 [slots], on the host once the event has come.
        number: of the step since its rows were assigned.
    """

    slots: Slots
    places: list[RowPlace]
    chosen: Tensor
    event: torch.cuda.Event | None
    number: int


def launch_plain(slots: Slots, kind: StepKind, places: list[RowPlace], number: int) -> PlainStep:
    """Launch a step; ``places`` may be told later."""
    slots.run(kind, number)
    chosen = torch.empty(slots.num_slots, dtype=torch.int64, pin_memory=slots.tokens.is_cuda)
    chosen.copy_(slots.tokens, non_blocking=True)
    event = None
    if slots.tokens.is_cuda:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(slots.tokens.device))
    return PlainStep(slots, places, chosen, event, number)
