"""Attention where what is not visible to the newest queries is dropped for good."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.placement.device import DeviceStore, RowReader
from kvsift.placement.evicting import EvictingStore
from kvsift.runtime.attend import Segment, attend_dense, attend_spans
from kvsift.runtime.plan import Plan
from kvsift.types import LayerShape, Part, Selection


def evicts(plan: Plan, layer: int) -> bool:
    """Whether a layer drops tokens for good under a plan."""
    rule = plan.decode
    return rule is not None and rule.evicts and layer not in rule.budget.dense_layers


def refuse_prompt(plan: Plan, store: DeviceStore, row: int) -> None:
    """Refuse another prompt for a row of which something is gone, unless prompts are read so.

    Raises:
        InputError: if this is one.
    """
    if isinstance(store, EvictingStore) and store.has_dropped(row) and not plan.evicts_prompt:
        raise InputError(
            f"{store.lengths[row] - store.num_held(row)} tokens of this cache were dropped for good while it generated "
            "(evict=true), and another prompt would be read without them. Read everything into a new cache, or leave "
            "evict out: the same tokens are then hidden from generated ones only. Methods of both phases can read "
            "prompts so: both=METHOD:evict=true."
        )


def drop_hidden(
    store: EvictingStore, row: int, segment: Segment, spans: tuple[int, int], selection: Selection | None
) -> RowReader:
    """Drop what the first query of a segment sees of neither sinks, window nor selection; a reader of the rest."""
    sinks_stop, window_start = spans
    chosen = torch.empty(1, 0, dtype=torch.int64, device=store.keys.device) if selection is None else selection.units
    store.keep(row, sinks_stop, chosen, min(window_start, segment.stop))
    return store.row(row)


def attend_kept(
    shape: LayerShape, segment: Segment, reader: RowReader, spans: Sequence[tuple[int, int]]
) -> tuple[Part, int | float | Tensor]:
    """Every query over everything that is left, and how many tokens that is, summed over queries. ``spans`` says where
    their windows begin, if they slide within the segment."""
    if len(spans) > 1:
        return attend_spans(shape, segment, reader, spans)
    num_queries = segment.stop - segment.start
    seen = num_queries * reader.keys(0, segment.stop).shape[1] - num_queries * (num_queries - 1) // 2
    return attend_dense(shape, segment, reader), seen
