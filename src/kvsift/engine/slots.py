"""Sequences that decode side by side: static buffers, the step over them, and the step captured as a CUDA graph.

A slot belongs to a row of a cache, or is parked: it then decodes nonsense on a scratch page, over and over at
position 0, so that a batch of three can run as one of four.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.engine.sampling import Sampling, draw, likeliest
from kvsift.models.decoder_step import DecoderStep
from kvsift.models.transformers_step import TransformersStep
from kvsift.runtime.paged_decode import DecodeBatch, DecodeLayer, rule_of
from kvsift.runtime.plan import Plan
from kvsift.runtime.sequence import SparseAttention

Step = DecoderStep | TransformersStep


class StepKind(NamedTuple):
    """What a graph is captured for."""

    dense: bool  # everything is shown
    sampled: bool  # tokens are drawn; else the likeliest is taken


class Recorded(NamedTuple):
    """A captured step, and what the last replay of it left behind in each layer."""

    graph: torch.cuda.CUDAGraph | None  # None: the step is run as it is, for tests on a CPU
    queries: list[Tensor]  # [slots, num_query_heads, head_dim]
    lists: list[tuple[Tensor | None, Tensor | None]]  # pages [slots, num_rows, capacity], counts [slots, num_rows]


class Seat(NamedTuple):
    """A row that takes a slot."""

    row: int  # of the cache
    length: int  # tokens cached
    token: int  # the next to feed
    sampling: Sampling
    drawn: int  # tokens chosen so far, the one to feed included


class SlotBatch(DecodeBatch):
    """A batch in which parked slots stand still."""

    def __init__(self, table: Tensor, page_size: int, plan: Plan) -> None:
        rule = rule_of(plan)
        super().__init__(table, [1] * len(table), page_size, None if rule is None else rule.budget)
        self.parked = torch.ones_like(self.lengths)

    def advance(self) -> None:
        self.lengths.sub_(self.parked)
        super().advance()


class Slots:
    """Buffers and graphs of ``num_slots`` sequences.

    Args:
        step: of the model.
        angles: rotary angles of all positions.
        attentions: of every layer; their pools must not move while this lives.
        plan: its decode rule chooses the pages.
        num_slots: sequences side by side.
        max_pages: of a sequence.
        pool: of memory that graphs share; None runs steps as they are.
    """

    def __init__(
        self, step: Step, angles: Tensor, attentions: Sequence[SparseAttention], plan: Plan, num_slots: int,
        max_pages: int, pool: Any,
    ) -> None:  # fmt: skip
        device = angles.device
        self._step, self._angles, self._attentions, self._pool = step, angles, attentions, pool
        first = attentions[0].store
        assert first.scratch is not None
        self._scratch = first.scratch
        self._table = torch.full((num_slots, max_pages), first.scratch, dtype=torch.int32, device=device)
        self.batch = SlotBatch(self._table, first.page_size, plan)
        self.layers = [_layer(attention, self.batch, plan) for attention in attentions]
        self._summaries = [attention.store.summaries for attention in attentions]
        self.tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._knobs = torch.zeros(3, num_slots, dtype=torch.float64, device=device)  # temperature, top_p, noise
        self._noise = torch.zeros(0, num_slots, dtype=torch.float64, device=device)  # of the steps to come
        self._recorded: dict[StepKind, Recorded] = {}

    @property
    def num_slots(self) -> int:
        return len(self.tokens)

    def knows(self, kind: StepKind) -> bool:
        """Whether a step of this kind is captured."""
        return kind in self._recorded

    def prepare(self, kind: StepKind) -> None:
        """Capture a step of this kind, if that has not happened yet. Nothing may be seated: the step is run."""
        if kind in self._recorded:
            return
        self.seat([], 0)
        queries: list[Tensor] = []
        graph = None
        if self._pool is not None:
            with on_device(self.tokens.device):
                warm_up(lambda: self._run(kind, []))
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool):
                    self._run(kind, queries)
        self._recorded[kind] = Recorded(graph, queries, [(layer.pages, layer.counts) for layer in self.layers])
        self.count()

    @torch.inference_mode()
    def seat(self, seats: Sequence[Seat], steps: int) -> None:
        """Slot i is ``seats[i]`` from now on, for at most so many steps; the others are parked."""
        free = self.num_slots - len(seats)
        self._table.fill_(self._scratch)
        for slot, seat in enumerate(seats):
            pages = [attention.store.table.planned(seat.row) for attention in self._attentions]
            assert all(each == pages[0] for each in pages), "layers grew apart"
            self._table[slot, : len(pages[0])] = torch.tensor(pages[0][: self._table.shape[1]], dtype=torch.int32)
        self.batch.lengths.copy_(torch.tensor([seat.length for seat in seats] + [1] * free))
        self.batch.parked.copy_(torch.tensor([0] * len(seats) + [1] * free))
        self.tokens.copy_(torch.tensor([seat.token for seat in seats] + [0] * free))
        knobs = [(seat.sampling.temperature, seat.sampling.top_p, 0.0) for seat in seats] + [(0.0, 1.0, 0.0)] * free
        self._knobs.copy_(torch.tensor(knobs, dtype=torch.float64).T)
        noise = [
            torch.zeros(steps, dtype=torch.float64)
            if seat.sampling.temperature == 0
            else seat.sampling.noise(seat.drawn + steps, seat.drawn)
            for seat in seats
        ] + [torch.zeros(steps, dtype=torch.float64)] * free
        self._noise = torch.stack(noise, 1).to(self.tokens.device)

    @torch.inference_mode()
    def park(self, slot: int) -> None:
        """This slot is done; steps already under way still run it."""
        self._table[slot].fill_(self._scratch)
        self.batch.lengths[slot].fill_(1)
        self.batch.parked[slot].fill_(1)

    @torch.inference_mode()
    def run(self, kind: StepKind, number: int) -> Recorded:
        """One step, the ``number``-th since rows were seated; ``tokens`` are then the next ones."""
        recorded = self._recorded[kind]
        if kind.sampled:
            self._knobs[2].copy_(self._noise[number])
        queries: list[Tensor] = []
        with on_device(self.tokens.device):
            if recorded.graph is not None:
                recorded.graph.replay()
                return recorded
            self._run(kind, queries)
        return Recorded(None, queries, [(layer.pages, layer.counts) for layer in self.layers])

    def catch_up(self, row: int, written: int, stale_from: int) -> None:
        """Write the summaries that steps which showed everything have left out."""
        for attention in self._attentions:
            attention.store.advance(row, written, stale_from)

    def count(self) -> list[int]:
        """Tokens shown in each layer since the last call, summed over the rows of lists; waits for the device."""
        counted = torch.stack([layer.visible[0] for layer in self.layers]).tolist()
        for layer in self.layers:
            layer.visible.zero_()
        return [int(each) for each in counted]

    @torch.inference_mode()
    def _run(self, kind: StepKind, queries: list[Tensor]) -> None:
        self.batch.advance()
        # what nobody asks for until the context is long is not kept up token by token (``catch_up``)
        summaries = [{}] * len(self.layers) if kind.dense else self._summaries
        logits = self._step(self.tokens, self._angles, self.batch, self.layers, summaries, kind.dense, watched=queries)
        self.tokens.copy_(draw(logits, *self._knobs) if kind.sampled else likeliest(logits))


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Kernels and graphs are launched on the current device, which need not be the model's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def warm_up(run: Callable[[], None]) -> None:
    """Run something twice beside the main stream, as capturing wants it: kernels are compiled, libraries set up.

    Raises:
        RuntimeError: if the second run makes the host wait, which cannot be captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    torch.cuda.current_stream().wait_stream(stream)


def _layer(attention: SparseAttention, batch: DecodeBatch, plan: Plan) -> DecodeLayer:
    shape, store, rule = attention.shape, attention.store, rule_of(plan)
    if rule is None or shape.layer in rule.budget.dense_layers:
        return DecodeLayer(shape, batch, store.keys, store.values)
    summary = store.summaries[rule.method.summaries[0]]
    return DecodeLayer(shape, batch, store.keys, store.values, summary, rule.method)
