"""Sparse segments of one prefill chunk in one launch, without synchronising with the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsift.kernels.segment_attention import Rows, Span, segment_attention
from kvsift.stores.base import Segment
from kvsift.types import LayerShape, Part, Selection


def is_plain(selection: Selection) -> bool:
    """Whether a selection is nothing but a list of units."""
    return selection.log_weight is selection.extra is selection.rest is None and not selection.for_above


def attend_segments(
    shape: LayerShape, queries: Tensor, segments: Sequence[Segment], spans: Sequence[tuple[int, int]],
    selections: Sequence[Selection], rows: Rows,
) -> tuple[Part, list[int | Tensor]]:  # fmt: skip
    """Sinks, selection, window and own past of every query.

    Args:
        shape: the layer.
        queries: of all segments, [num_query_heads, num_queries, head_dim].
        segments: one behind the other.
        spans: (sinks_stop, window_start) of each.
        selections: of each, plain ones.
        rows: the cache, the segments' own tokens included.

    Returns:
        The part of all segments; how many selected tokens each shows, a mean over the heads.
    """
    first = segments[0].start
    own = [Span(s.start - first, s.stop - first, min(window, s.start)) for s, (_, window) in zip(segments, spans)]
    slots, counts, seen = listed(shape, [sinks for sinks, _ in spans], selections, rows)
    return segment_attention(queries, rows, first, own, slots, counts, shape.scale, shape.softcap), seen


def listed(
    shape: LayerShape, sinks: Sequence[int], selections: Sequence[Selection], rows: Rows
) -> tuple[Tensor, Tensor | None, list[int | Tensor]]:
    """Sinks and selected tokens of every segment and list.

    Returns:
        Slots int32 [num_segments, num_lists, capacity]; counts int32 [num_segments, num_lists], or None if all lists
        are full; how many of each segment are selected ones.
    """
    size, device = selections[0].unit_size, selections[0].units.device
    num_lists = max(shape.num_kv_heads, selections[0].units.shape[0])
    most = max(selection.units.shape[1] for selection in selections)
    full = all(selection.full and selection.units.shape[1] == most for selection in selections)
    same = [s.units if s.units.shape[1] == most else pad(s.units, (0, most - s.units.shape[1])) for s in selections]
    units = torch.stack(same)  # [num_segments, num_heads, most]
    tokens = units if size == 1 else (units.unsqueeze(-1) * size + torch.arange(size, device=device)).flatten(2)
    counts = None
    if not full:
        held = [s.units.new_full(s.units.shape[:1], s.units.shape[1]) if s.full else _held(s) for s in selections]
        counts = (torch.stack(held) * size + sinks[0]).to(torch.int32).expand(-1, num_lists)
        tokens = tokens.clamp_min(0)
    if sinks[0]:
        assert len(set(sinks)) == 1, "segments of one chunk that select have the same sinks"
        tokens = torch.cat([torch.arange(sinks[0], device=device).expand(*tokens.shape[:2], -1), tokens], 2)
    seen: list[int | Tensor] = [
        s.units.shape[1] * size if s.full else _held(s).double().mean() * size for s in selections
    ]
    return rows.slots(tokens).to(torch.int32).expand(-1, num_lists, -1), counts, seen


def _held(selection: Selection) -> Tensor:
    return (selection.units >= 0).sum(1)
