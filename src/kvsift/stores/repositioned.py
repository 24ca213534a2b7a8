"""Attention to sinks and selection from other positions than the queries' own (``Method.reposition``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsift.kernels.attention import attention, attention_reference
from kvsift.kernels.merge import merge
from kvsift.kernels.rerotate import rerotate
from kvsift.stores.base import Attended, Segment, View
from kvsift.stores.parts import attend_selection, attend_spans, attend_sparse, gather
from kvsift.stores.reader import RowReader
from kvsift.types import LayerShape, Moved, Part, Selection


def attend_view(
    shape: LayerShape, segment: Segment, reader: RowReader, view: View, selection: Selection | None
) -> Attended:
    """Attend what a view shows, and a selection."""
    attend = attend_sparse if view.reposition is None else attend_repositioned
    part, visible = attend(shape, segment, reader, view, selection)
    return Attended(part, selection, visible)


def attend_repositioned(
    shape: LayerShape, segment: Segment, reader: RowReader, view: View, selection: Selection | None
) -> tuple[Part, float | Tensor]:
    """Attend as ``attend_sparse`` does, by a method that repositions."""
    spans = view.spans
    part, visible = attend_spans(shape, segment, reader, [(0, window_start) for _, window_start in spans])
    distant, positions = repositioned(shape, segment, view)
    last = max(sinks_stop for sinks_stop, _ in spans)
    if last:
        keys, values = reader.keys(0, last), reader.values(0, last)
        sinks, num_sinks = attend_sinks(shape, distant, positions, keys, values, spans)
        part, visible = merge(part, sinks), visible + num_sinks
    if selection is not None:
        selected, num_selected = attend_repositioned_selection(shape, distant, positions, reader, selection)
        part, visible = merge(part, selected), visible + num_selected * segment.num_queries
    return part, visible


def repositioned(shape: LayerShape, segment: Segment, view: View) -> tuple[Segment, Moved]:
    """Return the segment with its queries rotated to where they see sinks and selection from, and these positions."""
    assert shape.rope is not None, "refused at the start"
    assert view.reposition is not None
    own = torch.arange(segment.start, segment.stop)
    positions = view.reposition(own, view.spans)
    rotated = rerotate(segment.queries[0], own, positions.queries, shape.rope)
    return segment._replace(queries=rotated.unsqueeze(0)), positions


def attend_sinks(
    shape: LayerShape, distant: Segment, positions: Moved, keys: Tensor, values: Tensor,
    spans: Sequence[tuple[int, int]],
) -> tuple[Part, int]:  # fmt: skip
    """Attend the first tokens, [num_kv_heads, count, head_dim], of which each query sees those before its
    ``sinks_stop``; with how many that is, summed over queries."""
    tokens = torch.arange(keys.shape[1])
    keys, values = _rotated(shape, positions, keys, tokens).unsqueeze(0), values.unsqueeze(0)
    stops = [sinks_stop for sinks_stop, _ in spans] if len(spans) > 1 else [spans[0][0]] * distant.num_queries
    if len(set(stops)) == 1:
        return attention(distant.queries, keys, values, shape.scale, softcap=shape.softcap), sum(stops)
    mask = (tokens < torch.tensor(stops).unsqueeze(1)).to(keys.device)  # [num_queries, count]
    part = attention_reference(distant.queries, keys, values, shape.scale, mask=mask, softcap=shape.softcap)
    return part, sum(stops)


def attend_repositioned_selection(
    shape: LayerShape, distant: Segment, positions: Moved, reader: RowReader, selection: Selection
) -> tuple[Part, Tensor]:
    """Attend selected tokens; with how many each query sees, a mean over heads."""
    keys, values = gather(shape, reader, selection)
    unit_size, units = selection.unit_size, selection.units
    tokens = (units.unsqueeze(-1) * unit_size + torch.arange(unit_size, device=units.device)).flatten(1)
    return attend_selection(shape, distant, selection, (_rotated(shape, positions, keys, tokens), values))


def _rotated(shape: LayerShape, positions: Moved, keys: Tensor, tokens: Tensor) -> Tensor:
    """Keys [num_heads, count, head_dim] of ``tokens`` [num_heads or 1, count], rotated if they are repositioned."""
    if positions.keys is None:
        return keys
    assert shape.rope is not None, "refused at the start"
    own = tokens.expand(keys.shape[:2]).flatten()
    rotated = rerotate(keys.flatten(0, 1).unsqueeze(0), own, torch.full_like(own, positions.keys), shape.rope)
    return rotated.view(keys.shape)
