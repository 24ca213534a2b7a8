"""Sparse segments of one prefill chunk in one launch, without synchronising with the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsift.kernels.list_slots import list_slots
from kvsift.kernels.segment_attention import Rows, Spans, segment_attention
from kvsift.types import LayerShape, Part, Selection


def is_plain(selection: Selection) -> bool:
    """Whether a selection is nothing but a list of units."""
    return selection.log_weight is selection.extra is selection.rest is None and not selection.for_above


def attend_segments(
    shape: LayerShape, queries: Tensor, start: int, spans: Spans, units: Tensor, counts: Tensor, unit_size: int,
    rows: Rows,
) -> Part:  # fmt: skip
    """Sinks, selection, window and own past of every query.

    Args:
        shape: the layer.
        queries: of all segments, [num_query_heads, num_queries, head_dim].
        start: position of the first query.
        spans: window and own past of each segment.
        units: int32 [num_segments, num_heads, capacity], of sinks and selected tokens.
        counts: int32 [num_segments, num_heads], how many units of a list count.
        unit_size: tokens per unit.
        rows: the cache, the segments' own tokens included.
    """
    slots, counts = list_slots(units, counts, unit_size, rows, max(shape.num_kv_heads, units.shape[1]))
    return segment_attention(queries, rows, start, spans, slots, counts, shape.scale, shape.softcap)


def list_units(sink_units: int, selections: Sequence[Selection]) -> tuple[Tensor, Tensor]:
    """Units and counts, as above, of plain selections, behind so many units of sinks."""
    most, device = max(selection.units.shape[1] for selection in selections), selections[0].units.device
    units = torch.stack([pad(each.units, (0, most - each.units.shape[1]), value=-1) for each in selections])
    sinks = torch.arange(sink_units, device=device).expand(*units.shape[:2], -1)
    return torch.cat([sinks, units], 2).to(torch.int32), ((units >= 0).sum(2) + sink_units).to(torch.int32)
