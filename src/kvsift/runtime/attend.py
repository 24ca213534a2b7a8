"""Attention over what a rule lets some queries see: always-visible spans, the selection, and their exact merge."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from kvsift.kernels.attention import attention, attention_reference
from kvsift.kernels.merge import merge
from kvsift.kernels.unit_attention import reads_in_place, unit_attention
from kvsift.placement.device import RowReader
from kvsift.types import LayerShape, Part, Selection


class Segment(NamedTuple):
    """Consecutive new queries of one sequence, and where they stand."""

    queries: Tensor  # [1, num_query_heads, num_queries, head_dim]
    start: int  # position of the first query
    stop: int


def attend_dense(shape: LayerShape, segment: Segment, reader: RowReader) -> Part:
    """Every query over everything up to itself."""
    keys, values = (read(0, segment.stop).unsqueeze(0) for read in (reader.keys, reader.values))
    return _past_and_own(shape, segment, keys, values)  # [1, num_kv_heads, stop, head_dim]


def attend_sparse(
    shape: LayerShape, segment: Segment, reader: RowReader, spans: Sequence[tuple[int, int]],
    selection: Selection | None, whole_units: bool,
) -> tuple[Part, int | float | Tensor]:  # fmt: skip
    """Always-visible spans and the selection, and how many tokens that is, summed over queries.

    ``spans`` as for ``attend_spans``; ``whole_units``: every token of a listed unit is there.
    """
    num_queries = segment.stop - segment.start
    if selection is None:
        return attend_spans(shape, segment, reader, spans)
    plain = selection.log_weight is selection.extra is None
    if plain and num_queries == 1 and reader.is_view and reads_in_place(segment.queries, reader.keys()):
        return _attend_in_place(shape, segment, reader, spans[0], selection, whole_units)
    chosen = gather(shape, reader, selection)
    together = plain and selection.full and whole_units
    part, visible = attend_spans(shape, segment, reader, spans, chosen if together else None)
    if together:
        return part, visible + chosen[0].shape[1] * num_queries
    apart, seen = attend_selection(shape, segment, selection, chosen)
    return merge(part, apart), visible + seen * num_queries


def _attend_in_place(
    shape: LayerShape, segment: Segment, reader: RowReader, span: tuple[int, int], selection: Selection,
    whole_units: bool,
) -> tuple[Part, float | Tensor]:  # fmt: skip
    """The one query of a segment over spans and units where they lie."""
    (sinks_stop, window_start), units, size = span, selection.units, selection.unit_size
    window_start = min(window_start, segment.stop)
    part = unit_attention(
        segment.queries, reader.keys(), reader.values(), units, size,
        [(0, sinks_stop), (window_start, segment.stop)], shape.scale, shape.softcap,
    )  # fmt: skip
    always = sinks_stop + segment.stop - window_start
    if selection.full and whole_units:
        return part, always + units.shape[1] * size
    there = (segment.stop - units * size).clamp(0, size).masked_fill(units < 0, 0)
    return part, always + there.sum(1).double().mean()


def attend_spans(
    shape: LayerShape, segment: Segment, reader: RowReader, spans: Sequence[tuple[int, int]],
    chosen: tuple[Tensor, Tensor] | None = None,
) -> tuple[Part, int | Tensor]:  # fmt: skip
    """Sinks, window and the segment's own past, and how many tokens that is, summed over queries.

    ``spans`` holds (sinks_stop, window_start) of the first query, if later ones see all that it sees, or of every
    query, if their windows move along. ``chosen`` keys and values, [num_heads, count, head_dim], are attended along
    with them by all queries (and not counted).
    """
    sinks_stop, window_start = spans[0]
    window = min(window_start, segment.stop), segment.stop
    sinks_and_window = ([read(0, sinks_stop), read(*window)] for read in (reader.keys, reader.values))
    keys, values = (_joined(pieces, among) for pieces, among in zip(sinks_and_window, chosen or (None, None)))
    num_queries = segment.stop - segment.start
    if window_start > segment.start:  # nothing recent is forced
        return attention(segment.queries, keys, values, shape.scale, softcap=shape.softcap), sinks_stop * num_queries
    if len(spans) > 1:
        positions = torch.arange(segment.start, segment.stop, device=keys.device)
        key_positions = torch.cat([torch.arange(sinks_stop), torch.arange(*window)]).to(keys.device)
        sinks, oldest = torch.tensor(spans, device=keys.device).unsqueeze(2).unbind(1)  # [num_queries, 1]
        mask = (key_positions <= positions.unsqueeze(1)) & ((key_positions >= oldest) | (key_positions < sinks))
        part = attention_reference(segment.queries, keys, values, shape.scale, mask=mask, softcap=shape.softcap)
        return part, mask.sum().double()
    own = num_queries * (num_queries + 1) // 2
    visible = num_queries * (sinks_stop + segment.start - window_start) + own
    return _past_and_own(shape, segment, keys, values), visible


def _joined(pieces: list[Tensor], among: Tensor | None) -> Tensor:
    """[1, num_heads, num_tokens, head_dim]; what was chosen by head, if anything, before the last piece."""
    if among is not None:
        pieces = [piece.repeat_interleave(len(among) // len(piece), 0) for piece in pieces]
        pieces = [*pieces[:-1], among, pieces[-1]]
    return torch.cat(pieces, 1).unsqueeze(0)


def past_lse(shape: LayerShape, segment: Segment, reader: RowReader, spans: tuple[int, int]) -> Tensor:
    """Log-sum-exp over what every query of the segment always sees, [num_query_heads, num_queries].

    Sinks and window, and its own token if it comes alone: the last token of a segment must not sway the first.
    """
    sinks_stop, window_start = spans
    stop = segment.stop if segment.stop == segment.start + 1 else segment.start
    keys, values = (
        torch.cat([read(0, sinks_stop), read(min(window_start, stop), stop)], 1).unsqueeze(0)
        for read in (reader.keys, reader.values)
    )
    return attention(segment.queries, keys, values, shape.scale, softcap=shape.softcap).lse[0]


def gather(shape: LayerShape, reader: RowReader, selection: Selection) -> tuple[Tensor, Tensor]:
    """Keys and values of selected units, copied: [num_heads, count * unit_size, head_dim], at least one head per KV
    head."""
    units, size = _by_kv_head(shape, selection), selection.unit_size
    granule = gcd(size, reader.page_size)
    granules = units.unsqueeze(-1) * (size // granule) + torch.arange(size // granule, device=units.device)
    return reader.gather(granules.flatten(1), granule)


def attend_selection(
    shape: LayerShape, segment: Segment, selection: Selection, chosen: tuple[Tensor, Tensor]
) -> tuple[Part, Tensor]:
    """Selected tokens, the same for every query of the segment, some of which may not be there.

    ``chosen`` are their keys and values (``gather``). Returns the part, and visible tokens per query, a scalar mean
    over heads.
    """
    units, size = _by_kv_head(shape, selection), selection.unit_size
    keys, values = (tensor.unsqueeze(0) for tensor in chosen)
    positions = (units.unsqueeze(-1) * size + torch.arange(size, device=units.device)).flatten(1)
    seen = (units >= 0).repeat_interleave(size, 1) & (positions < segment.stop)  # [num_heads, num_tokens]
    if selection.log_weight is None and bool(seen.all()):
        part = attention(segment.queries, keys, values, shape.scale, softcap=shape.softcap)
    else:
        weight = selection.log_weight
        if weight is not None:
            weight = weight.expand(units.shape[0], -1).repeat_interleave(size, 1).unsqueeze(1)
        part = attention_reference(
            segment.queries, keys, values, shape.scale,
            mask=seen.unsqueeze(1), softcap=shape.softcap, log_weight=weight,
        )  # fmt: skip
    if selection.extra is not None:
        part = merge(part, selection.extra)
    return part, seen.sum(1).double().mean()


def _by_kv_head(shape: LayerShape, selection: Selection) -> Tensor:
    """Units of each KV head or query head."""
    units = selection.units
    return units.expand(shape.num_kv_heads, -1) if units.shape[0] == 1 else units


def _past_and_own(shape: LayerShape, segment: Segment, keys: Tensor, values: Tensor) -> Part:
    """All given keys, the last ones being the segment's own: those causally, the others in full."""
    num_queries = segment.stop - segment.start
    if num_queries == 1:
        return attention(segment.queries, keys, values, shape.scale, softcap=shape.softcap)
    past = keys.shape[2] - num_queries
    own = attention(
        segment.queries, keys[:, :, past:], values[:, :, past:], shape.scale, causal=True, softcap=shape.softcap
    )
    if past == 0:
        return own
    return merge(
        attention(segment.queries, keys[:, :, :past], values[:, :, :past], shape.scale, softcap=shape.softcap), own
    )
