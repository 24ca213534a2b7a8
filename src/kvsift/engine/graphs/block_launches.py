"""What groups of blocks have launched, and where sequences were before it."""

from __future__ import annotations

from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.engine.graphs.feeds import drafts_at
from kvsift.engine.graphs.slots import Slots, StepKind
from kvsift.engine.sequence import EngineSequence


class Clock:
    """Seconds between two marks: of the device, where the host launches ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """Mark where the launches so far end."""
        self._marks.append(perf_counter() if self._stream is None else torch.cuda.Event(enable_timing=True))
        if self._stream is not None:
            self._marks[-1].record(self._stream)

    def wait(self) -> None:
        """Let the host wait for the last mark."""
        if self._stream is not None:
            self._marks[-1].synchronize()

    @property
    def seconds(self) -> float:
        """Between the marks, once the last has come."""
        first, last = self._marks
        return float(last - first if self._stream is None else first.elapsed_time(last) / 1000)


class SequencePlace(NamedTuple):
    """How far a sequence is."""

    seq: EngineSequence
    num_cached: int
    token: int  # the next to feed

    @classmethod
    def of(cls, seq: EngineSequence) -> SequencePlace:
        return cls(seq, seq.num_cached, seq.token)

    @property
    def drawn(self) -> int:
        """Tokens of the answer so far, the next to feed included."""
        return self.num_cached - len(self.seq.request.ids) + 1


class Drafts(NamedTuple):
    """Drafts that are launched.

    Attributes:
        slots: the slots that they run on.
        places: states of the sequences before them.
        counts: number of drafts of each sequence.
        tokens: int64 [steps * slots], on the device.
        counted: int64 [2 * layers] of each sequence, what they have counted (``Slots.results``).
        clock: measures them.
    """

    slots: Slots
    places: list[SequencePlace]
    counts: list[int]
    tokens: Tensor
    counted: list[Tensor]
    clock: Clock

    def of(self, slot: int) -> list[int]:
        """Numbers that stand for the drafts of a slot (``drafts_at``)."""
        return [drafts_at(slot + number * self.slots.num_slots) for number in range(self.counts[slot])]


class PlainStep(NamedTuple):
    """A step of one token for each sequence, launched and not read, and the steps to come that the slots are ready for.

    Attributes:
        slots: the slots that it runs on.
        kind: kind of the step.
        places: states of the sequences before it.
        clock: measures the step.
        number: number of the step since its sequences were assigned.
        chosen: int64 [2, slots], the first of ``Slots.results``, on the host once the clock has come to its end; None:
            no token is chosen yet.
    """

    slots: Slots
    kind: StepKind
    places: list[SequencePlace]
    clock: Clock
    number: int
    chosen: Tensor | None = None

    def with_tokens(self) -> PlainStep:
        """The step, of which the tokens are chosen now."""
        chosen = to_host(self.slots.results[:2])
        self.clock.mark()
        return self._replace(chosen=chosen)


def launch_plain(slots: Slots, kind: StepKind, places: list[SequencePlace], number: int) -> PlainStep:
    """Launch a step, of which the tokens are yet to be chosen if it is constrained; ``places`` may be given later."""
    step = PlainStep(slots, kind, places, Clock(slots.tokens.device), number)
    slots.run(kind, number)
    return step if kind.constrained else step.with_tokens()


def to_host(numbers: Tensor) -> Tensor:
    """Return a tensor that will hold these numbers once a mark after this launch has come."""
    return torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda).copy_(numbers, non_blocking=True)
