"""Attention in which sinks and selection are seen from other positions than the queries' own (``Method.move``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.kernels.attention import attention, attention_reference
from kvsift.kernels.merge import merge
from kvsift.kernels.rerotate import rerotate
from kvsift.methods.base import Method
from kvsift.placement.device import RowReader
from kvsift.runtime.attend import Segment, attend_selection, attend_spans, gather
from kvsift.runtime.plan import Plan
from kvsift.types import LayerShape, Moved, Part, Rope, Selection


def check_rope(plan: Plan, rope: Rope | None, why: str = "") -> None:
    """Refuse a plan that turns queries to other positions where nobody knows how the model rotates them."""
    moving = next((rule for rule in plan.rules if rule.method.moves), None)
    if moving is not None and rope is None:
        why = why or "it must do so in all layers alike, whatever the length of the context"
        raise InputError(
            f"{moving} sees tokens from other positions, and how this model rotates queries and keys is not known: "
            f"{why}. Give positions=absolute."
        )


def attend_moved(
    shape: LayerShape, method: Method, segment: Segment, reader: RowReader, spans: Sequence[tuple[int, int]],
    selection: Selection | None,
) -> tuple[Part, float | Tensor]:  # fmt: skip
    """As ``attend_sparse``, by a method that moves."""
    part, visible = attend_spans(shape, segment, reader, [(0, window_start) for _, window_start in spans])
    far, moved = seen_from_afar(shape, method, segment, spans)
    last = max(sinks_stop for sinks_stop, _ in spans)
    if last:
        sinks, seen = attend_sinks(shape, far, moved, reader.keys(0, last), reader.values(0, last), spans)
        part, visible = merge(part, sinks), visible + seen
    if selection is not None:
        chosen, each = attend_chosen(shape, far, moved, reader, selection)
        part, visible = merge(part, chosen), visible + each * (segment.stop - segment.start)
    return part, visible


def seen_from_afar(
    shape: LayerShape, method: Method, segment: Segment, spans: Sequence[tuple[int, int]]
) -> tuple[Segment, Moved]:
    """The segment with its queries turned to where they see sinks and selection from, and where that is."""
    assert shape.rope is not None, "refused at the start"
    positions = torch.arange(segment.start, segment.stop)
    moved = method.move(positions, spans)
    turned = rerotate(segment.queries[0], positions, moved.queries, shape.rope)
    return segment._replace(queries=turned.unsqueeze(0)), moved


def attend_sinks(
    shape: LayerShape, far: Segment, moved: Moved, keys: Tensor, values: Tensor, spans: Sequence[tuple[int, int]]
) -> tuple[Part, int]:
    """The first tokens, [num_kv_heads, count, head_dim], of which each query sees those before its ``sinks_stop``, and
    how many that is, summed over queries."""
    places = torch.arange(keys.shape[1])
    keys, values = _placed(shape, moved, keys, places).unsqueeze(0), values.unsqueeze(0)
    num_queries = far.stop - far.start
    stops = [sinks_stop for sinks_stop, _ in spans] if len(spans) > 1 else [spans[0][0]] * num_queries
    mask = None
    if len(set(stops)) > 1:
        mask = (places < torch.tensor(stops).unsqueeze(1)).to(keys.device)  # [num_queries, count]
    if mask is None:
        return attention(far.queries, keys, values, shape.scale, softcap=shape.softcap), sum(stops)
    return attention_reference(far.queries, keys, values, shape.scale, mask=mask, softcap=shape.softcap), sum(stops)


def attend_chosen(
    shape: LayerShape, far: Segment, moved: Moved, reader: RowReader, selection: Selection
) -> tuple[Part, Tensor]:
    """Selected tokens, and how many each query sees, a mean over heads."""
    keys, values = gather(shape, reader, selection)
    size, units = selection.unit_size, selection.units
    places = (units.unsqueeze(-1) * size + torch.arange(size, device=units.device)).flatten(1)
    return attend_selection(shape, far, selection, (_placed(shape, moved, keys, places), values))


def _placed(shape: LayerShape, moved: Moved, keys: Tensor, places: Tensor) -> Tensor:
    """Keys [num_heads, count, head_dim] of tokens at ``places`` [num_heads or 1, count], turned if they are moved."""
    if moved.keys is None:
        return keys
    assert shape.rope is not None, "refused at the start"
    flat = places.expand(keys.shape[:2]).flatten()
    turned = rerotate(keys.flatten(0, 1).unsqueeze(0), flat, torch.full_like(flat, moved.keys), shape.rope)
    return turned.view(keys.shape)
