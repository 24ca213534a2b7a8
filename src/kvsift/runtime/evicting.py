"""Attention where what is not visible to the newest query is dropped for good."""

from __future__ import annotations

import torch

from kvsift.errors import InputError
from kvsift.placement.device import DeviceStore, RowReader
from kvsift.placement.evicting import EvictingStore
from kvsift.runtime.attend import Segment, attend_dense
from kvsift.runtime.plan import Plan
from kvsift.types import LayerShape, Part, Selection


def evicts(plan: Plan, layer: int) -> bool:
    """Whether a layer drops tokens for good under a plan."""
    rule = plan.decode
    return rule is not None and rule.evicts and layer not in rule.budget.dense_layers


def refuse_prompt(store: DeviceStore, row: int) -> None:
    """Refuse another prompt for a row of which something is gone.

    Raises:
        InputError: if this is one.
    """
    if isinstance(store, EvictingStore) and store.has_dropped(row):
        raise InputError(
            f"{store.lengths[row] - store.num_held(row)} tokens of this cache were dropped for good while it generated "
            "(evict=true), and another prompt would be read without them. Read everything into a new cache, or leave "
            "evict out: the same tokens are then hidden from generated ones only."
        )


def drop_hidden(
    store: EvictingStore, row: int, segment: Segment, spans: tuple[int, int], selection: Selection | None
) -> RowReader:
    """Drop what one query sees of neither sinks, window nor selection; a reader of the rest."""
    sinks_stop, window_start = spans
    chosen = torch.empty(1, 0, dtype=torch.int64, device=store.keys.device) if selection is None else selection.units
    store.keep(row, sinks_stop, chosen, min(window_start, segment.stop))
    return store.row(row)


def attend_kept(shape: LayerShape, segment: Segment, reader: RowReader) -> tuple[Part, int]:
    """One query over everything that is left, and how many tokens that is."""
    part = attend_dense(shape, segment, reader)
    return part, reader.keys(0, segment.stop).shape[1]
