"""What the lists of a captured step missed, by exact attention: the probes of ``runtime.probe``, from outside."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from kvsift.engine.counting import Row
from kvsift.engine.slots import Recorded, Slots
from kvsift.runtime.paged_decode import DecodeLayer
from kvsift.runtime.plan import Rule
from kvsift.runtime.probe import probe
from kvsift.types import Selection


class Probe(NamedTuple):
    """What one layer's list kept for one row. It counts once the row turns out to have wanted the step."""

    row: Row
    layer: int
    recall: float
    recovery: float

    def add(self) -> None:
        tally = self.row.stats.tally(self.layer, "decode")
        tally.probes += 1
        tally.recall, tally.recovery = tally.recall + self.recall, tally.recovery + self.recovery


@torch.inference_mode()
def probe_rows(slots: Slots, recorded: Recorded, seated: Sequence[Row], rule: Rule) -> tuple[list[Probe], float]:
    """Compare the step that was just run with exact attention, for the rows whose turn it is.

    Returns:
        The probes, and the seconds they took.
    """
    spent, probes = 0.0, []
    sparse = [index for index, layer in enumerate(slots.layers) if layer.summary is not None]
    for slot, row in enumerate(seated):
        length, every = row.written, row.stats.probe_every
        if not sparse or every == 0 or row.transcript.done:
            continue
        if rule.is_dense(slots.layers[sparse[0]].shape.layer, length - 1, length):
            continue
        due = row.sparse_steps % every == 0
        row.sparse_steps += 1
        if not due:
            continue
        if slots.tokens.is_cuda:
            torch.cuda.synchronize(slots.tokens.device)  # the step itself is no part of the probe
        started = perf_counter()
        for index in sparse:
            layer, (pages, counts) = slots.layers[index], recorded.lists[index]
            assert pages is not None
            assert counts is not None
            kept = _probe(layer, slot, length, recorded.queries[index][slot], pages[slot], counts[slot])
            probes.append(Probe(row, layer.shape.layer, *kept))
        spent += perf_counter() - started
    return probes, spent


def _probe(
    layer: DecodeLayer, slot: int, length: int, queries: Tensor, pages: Tensor, counts: Tensor
) -> tuple[float, float]:
    """queries [num_query_heads, head_dim]; pages int32 [num_rows, capacity]; counts int32 [num_rows]."""
    page_size = layer.kv.page_size
    physical = layer.kv.table[slot, : -(-length // page_size)].long()
    keys = layer.kv.keys[:, physical].flatten(1, 2)[:, :length]
    listed = torch.arange(pages.shape[1], device=pages.device) < counts.unsqueeze(1)
    selection = Selection(pages.long().masked_fill(~listed, -1), page_size)
    return probe(layer.shape, queries.unsqueeze(1), keys, (0, length), selection)
