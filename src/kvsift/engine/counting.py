"""From what the device counted to the counters of each answer.

A layer counts the tokens its lists showed, in all slots and steps together: those of parked slots, and of steps that
ran before the host knew that a row had ended. Each row gets its share of the layer's count, by what the budget allots
to its own steps; where the count is what the budget allots in all, the share is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsift.engine.slots import Slots
from kvsift.engine.transcript import Transcript
from kvsift.runtime.budget import Budget
from kvsift.runtime.paged_decode import DecodeLayer, page_spans
from kvsift.runtime.stats import RunStats


@dataclass
class Row:
    """A request under way.

    Attributes:
        row: of the cache.
        transcript: its answer so far; it begins with the token that its prompt led to.
        stats: its counters.
        start: tokens cached before the first step.
        dense: of each step launched for it, whether it showed everything.
        sparse_steps: how many steps have skipped something, those before ``start`` included; probes go by it.
        stale_from: the first position whose page has no summary yet, since steps that show everything write none.
    """

    row: int
    transcript: Transcript
    stats: RunStats
    start: int
    dense: list[bool] = field(default_factory=list)
    sparse_steps: int = 0
    stale_from: int | None = None

    @property
    def written(self) -> int:
        """Tokens in the cache, those of steps that ran too far included."""
        return self.start + len(self.dense)

    @property
    def steps(self) -> int:
        """Steps that led to a token that was wanted."""
        return len(self.transcript.times) - 1

    @property
    def remaining(self) -> int:
        """Steps that it may still want."""
        return 0 if self.transcript.done else self.transcript.request.max_new_tokens - 1 - len(self.dense)


class Shown:
    """What all slots were shown by lists.

    Attributes:
        counted: by the device, of each layer, summed over the rows of lists.
        lengths: of every slot in every step with lists.
    """

    def __init__(self) -> None:
        self.counted: list[int] = []
        self.lengths: list[int] = []
        self._counting = False

    def follow(self, slots: Slots, lists: bool) -> None:
        """Count the steps to come if they go by lists. Waits for the device where that changes."""
        if lists == self._counting:
            return
        counted = slots.count()
        if self._counting:
            self.counted = [sum(both) for both in zip(self.counted or [0] * len(counted), counted)]
        self._counting = lists


def add_counts(rows: Sequence[Row], layers: Sequence[DecodeLayer], shown: Shown, budget: Budget | None) -> None:
    """Count the wanted steps of every row, in every layer."""
    page_size = layers[0].kv.page_size
    allotted = 0 if budget is None else int(_allotted(budget, torch.tensor(shown.lengths), page_size)[0].sum())
    for row in rows:
        lengths = row.start + 1 + torch.arange(row.steps)
        listed = ~torch.tensor(row.dense[: row.steps], dtype=torch.bool)
        for layer, counted in zip(layers, shown.counted or [0] * len(layers)):
            share = counted / (allotted * list_rows(layer)) if layer.summary is not None and allotted else 0.0
            _add(row.stats, layer, lengths, listed, budget, share)


def list_rows(layer: DecodeLayer) -> int:
    """Lists per sequence in a layer."""
    return layer.shape.num_kv_heads if layer.shares else layer.shape.num_query_heads


def _add(
    stats: RunStats, layer: DecodeLayer, lengths: Tensor, listed: Tensor, budget: Budget | None, share: float
) -> None:
    shape, keys = layer.shape, layer.kv.keys
    tally, per_head = stats.tally(shape.layer, "decode"), 2 * shape.head_dim * keys.element_size()
    per_token = shape.num_kv_heads * per_head
    tally.queries += len(lengths)
    tally.context_tokens += int(lengths.sum())
    tally.kv_bytes_dense += int(lengths.sum()) * per_token
    if layer.summary is None or budget is None:
        listed = torch.zeros_like(listed)
    full = int(lengths[~listed].sum())
    tally.visible_tokens = tally.visible_tokens + full
    tally.kv_bytes_read += full * per_token
    if layer.summary is None or budget is None or not bool(listed.any()):
        return
    visible, candidates, chosen = _allotted(budget, lengths[listed], layer.kv.page_size)
    seen = share * int(visible.sum())
    tally.visible_tokens = tally.visible_tokens + seen
    tally.kv_bytes_read += seen * list_rows(layer) * per_head
    tally.sparse_queries += int((chosen < candidates).sum())
    per_page = shape.num_kv_heads * layer.summary.shape[2] * layer.summary.element_size()
    tally.index_bytes_read += int(candidates.sum()) * per_page


def _allotted(budget: Budget, lengths: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Visible tokens, candidate pages and chosen pages of a query at the end of each context."""
    first, stop, chosen, _ = page_spans(budget, lengths, page_size).long().unbind(1)
    return (first + chosen - stop) * page_size + lengths, stop - first, chosen
