"""Probes of captured steps: their lists beside exact attention, as ``layer.probe`` measures it."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from kvsift.engine.graphs.accounting import CapturedSequence
from kvsift.engine.graphs.slots import CapturedStep, Slots
from kvsift.kernels.coded_pages import read_pages
from kvsift.layer.paged_decode import DecodeLayer
from kvsift.layer.probe import exact_scores, recall_and_recovery, visible_tokens
from kvsift.types import Selection

PAGES_AT_ONCE = 1024  # whose keys are in float32 at once


class Probe(NamedTuple):
    """Recall and recovery of one layer's list for one sequence. It counts if the step's token is read."""

    seq: CapturedSequence
    layer: int
    recall: float
    recovery: float

    def add(self) -> None:
        tally = self.seq.stats.tally(self.layer, "decode")
        tally.probes += 1
        tally.recall, tally.recovery = tally.recall + self.recall, tally.recovery + self.recovery


@torch.inference_mode()
def probe_sequences(slots: Slots, step: CapturedStep, seqs: Sequence[CapturedSequence]) -> tuple[list[Probe], float]:
    """Compare the step that was just launched with exact attention, for the sequences whose turn it is.

    Returns:
        The probes, and the seconds they took.
    """
    spent, probes = 0.0, []
    for slot, seq in enumerate(seqs):
        layers = [] if seq.done else _sparse_layers(slots, seq)
        if not layers:
            continue
        position, every = seq.written - 1, seq.stats.probe_every
        due = seq.guard.due(position, every) if seq.is_guarded else seq.sparse_steps % every == 0
        seq.sparse_steps += 1
        if not due:
            continue
        if slots.tokens.is_cuda:
            torch.cuda.synchronize(slots.tokens.device)  # the step itself is no part of the probe
        started = perf_counter()
        for index in layers:
            layer = slots.layers[index]
            probe = Probe(seq, layer.shape.layer, *_probe(layer, slot, seq.written, step.queries[index][slot]))
            probes.append(probe)
            if seq.is_guarded:
                seq.guard.note(position, probe.layer, probe.recovery)
        spent += perf_counter() - started
    return probes, spent


def _sparse_layers(slots: Slots, seq: CapturedSequence) -> list[int]:
    """Return the layers whose lists left something out in the last step of a sequence, by index."""
    rule, length = seq.rule, seq.written
    if rule is None or seq.stats.probe_every == 0 or seq.dense[-1]:
        return []
    shapes = [layer.shape for layer in slots.layers]
    sparse = [index for index, shape in enumerate(shapes) if not rule.budget.is_dense(shape)]
    return [] if sparse and rule.is_dense(shapes[sparse[0]].attention_index, length - 1, length) else sparse


def _probe(layer: DecodeLayer, slot: int, length: int, queries: Tensor) -> tuple[float, float]:
    """Return recall and recovery; queries [num_query_heads, head_dim]."""
    assert layer.lists is not None
    units, counts = (each[slot] for each in layer.lists)
    physical = layer.kv.table[slot, : -(-length // layer.kv.page_size)].long()
    scores = [
        exact_scores(layer.shape, queries.unsqueeze(1), read_pages(layer.kv.keys, pages, turned=True).flatten(1, 2))
        for pages in physical.split(PAGES_AT_ONCE)
    ]
    shares = torch.cat(scores, 1)[:, :length].softmax(-1)
    listed = torch.arange(units.shape[1], device=units.device) < counts.unsqueeze(1)
    selection = Selection(units.long().masked_fill(~listed, -1), layer.batch.unit_size)
    return recall_and_recovery(shares, visible_tokens(layer.shape, length, (0, length), selection, units.device))
