"""Attention over always-visible spans and a selection, and the exact merge of the two.

A method that repositions (``Method.reposition``) has sinks and selection attended from other positions than the
queries' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from kvsift import native
from kvsift.kernels.attention import attention, attention_reference
from kvsift.kernels.merge import merge, merge_all
from kvsift.kernels.rerotate import rerotate
from kvsift.native import twins
from kvsift.native.attention import SHARE_TOKENS
from kvsift.native.coded_rows import turn
from kvsift.native.shapes import HeadRows, supports
from kvsift.stores.base import Segment, View
from kvsift.stores.reader import RowReader
from kvsift.types import LayerShape, Moved, Part, Selection

MOST_RUNS = 16  # of pages, that a GPU attends one by one; more are copied
IN_PLACE_QUERIES = 8  # of consecutive tokens, for which the compiled core reads keys once; with more, a copy is faster


def attend_dense(shape: LayerShape, segment: Segment, reader: RowReader) -> Part:
    """Dense attention: every query over everything up to itself."""
    if segment.stop - segment.start <= IN_PLACE_QUERIES and reader.in_place:
        queries, keys = segment.queries[0], reader.keys_in_place(segment.stop)
        if supports(queries, keys):
            values = reader.values_in_place(segment.stop)
            output, lse = native.attend_dense(queries, keys, values, shape.scale, shape.softcap)
            return Part(output.unsqueeze(0), lse.unsqueeze(0))
    if reader.decodes or (segment.queries.is_cuda and 1 < len(reader.consecutive(segment.stop)) <= MOST_RUNS):
        return _attend_runs(shape, segment, reader)
    keys, values = (read(0, segment.stop).unsqueeze(0) for read in (reader.keys, reader.values))
    return _past_and_own(shape, segment, keys, values)  # [1, num_kv_heads, stop, head_dim]


def _attend_runs(shape: LayerShape, segment: Segment, reader: RowReader) -> Part:
    """As ``_past_and_own``, over tokens in several runs of pages, each where it lies, or decoded: a copy of all is not
    made."""
    own = segment.stop - segment.num_queries if segment.num_queries > 1 else segment.stop
    queries, read_keys = segment.queries, reader.keys
    if reader.decodes:  # queries are turned, of which there are fewer than keys
        queries, read_keys = turn(queries), reader.turned_keys
    spans = [(*span, False) for span in reader.consecutive(own)]
    if own < segment.stop:
        spans.append((own, segment.stop, True))
    return merge_all(  # one after the other: those of a long chunk take more memory than the model's activations
        attention(
            queries, read_keys(start, stop)[None], reader.values(start, stop)[None], shape.scale, causal=causal,
            softcap=shape.softcap,
        )
        for start, stop, causal in spans
    )  # fmt: skip


def attend_verifying(shape: LayerShape, segment: Segment, reader: RowReader) -> tuple[Part, Tensor]:
    """As ``attend_dense``, of at most ``IN_PLACE_QUERIES`` tokens in host memory, with the attention of pages of 16
    tokens, float32 [num_kv_heads, num_pages]."""
    shares = torch.empty(shape.num_kv_heads, -(-segment.stop // SHARE_TOKENS), dtype=torch.float32)
    queries, keys, values = segment.queries[0], reader.keys_in_place(segment.stop), reader.values_in_place(segment.stop)
    run = native.attend_dense if supports(queries, keys) else twins.attend_dense
    output, lse = run(queries, keys, values, shape.scale, shape.softcap, shares=shares)
    return Part(output.unsqueeze(0), lse.unsqueeze(0)), shares


def attend_sparse(
    shape: LayerShape, segment: Segment, reader: RowReader, view: View, selection: Selection | None
) -> tuple[Part, int | float | Tensor]:
    """Attend what a view shows, and a selection; with how many tokens that is, summed over queries."""
    spans = view.spans
    if view.reposition is not None:
        return attend_repositioned(shape, segment, reader, view, selection)
    plain, num_queries = selection is None or selection.log_weight is None, segment.num_queries
    if plain and num_queries == 1 and reader.in_place:
        queries, keys = segment.queries[0].squeeze(1), reader.keys_in_place()
        if supports(queries, keys):
            return _attend_in_place(shape, segment, queries, keys, reader.values_in_place(), view, selection)
    if selection is None:
        return attend_spans(shape, segment, reader, spans)
    chosen = gather(shape, reader, selection)
    together = plain and selection.full and view.whole_units
    part, visible = attend_spans(shape, segment, reader, spans, chosen if together else None)
    if together:
        return part, visible + chosen[0].shape[1] * num_queries
    selected, num_selected = attend_selection(shape, segment, selection, chosen)
    return merge(part, selected), visible + num_selected * num_queries


def _attend_in_place(
    shape: LayerShape, segment: Segment, queries: Tensor, keys: HeadRows, values: HeadRows, view: View,
    selection: Selection | None,
) -> tuple[Part, float | Tensor]:  # fmt: skip
    """As ``attend_sparse``, of the one query of a segment, [num_query_heads, head_dim], over rows read in place."""
    sinks_stop, window_start = view.spans[0]
    units = torch.empty(shape.num_kv_heads, 0, dtype=torch.int64) if selection is None else selection.units
    unit_size = 1 if selection is None else selection.unit_size
    window_start = min(window_start, segment.stop)
    spans = [(0, sinks_stop), (window_start, segment.stop)]
    output, lse = native.attend_units(queries, keys, values, units, unit_size, spans, shape.scale, shape.softcap)
    part = Part(output.view(segment.queries.shape), lse.view(segment.queries.shape[:3]))
    always = sinks_stop + segment.stop - window_start
    if selection is None or (selection.full and view.whole_units):
        return part, always + units.shape[1] * unit_size
    stored = (segment.stop - units * unit_size).clamp(0, unit_size).masked_fill(units < 0, 0)
    return part, always + stored.sum(1).double().mean()


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
    num_queries = segment.num_queries
    if window_start > segment.start:  # window=0: no recent token is always visible
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
    """Return the log-sum-exp over what every query of the segment always sees, [num_query_heads, num_queries].

    Sinks and window, and its own token if it comes alone: the last token of a segment must not sway the first. Of a
    token on the host it has the bits of the compiled decode step, which attends these tokens in the same pieces.
    """
    sinks_stop, window_start = spans
    if segment.num_queries == 1 and reader.in_place:
        queries, stored = segment.queries[0].squeeze(1), reader.keys_in_place()
        if supports(queries, stored):
            part, _ = _attend_in_place(shape, segment, queries, stored, reader.values_in_place(), View([spans]), None)
            return part.lse[0]
    stop = segment.stop if segment.stop == segment.start + 1 else segment.start
    keys, values = (
        torch.cat([read(0, sinks_stop), read(min(window_start, stop), stop)], 1).unsqueeze(0)
        for read in (reader.keys, reader.values)
    )
    return attention(segment.queries, keys, values, shape.scale, softcap=shape.softcap).lse[0]


def gather(shape: LayerShape, reader: RowReader, selection: Selection) -> tuple[Tensor, Tensor]:
    """Keys and values of selected units, copied: [num_heads, count * unit_size, head_dim], at least one head per KV
    head."""
    units, unit_size = _by_kv_head(shape, selection), selection.unit_size
    granule = gcd(unit_size, reader.page_size)
    granules = units.unsqueeze(-1) * (unit_size // granule) + torch.arange(unit_size // granule, device=units.device)
    return reader.gather(granules.flatten(1), granule)


def attend_selection(
    shape: LayerShape, segment: Segment, selection: Selection, chosen: tuple[Tensor, Tensor]
) -> tuple[Part, Tensor]:
    """Attention over selected tokens, the same for every query of the segment, some of which may not be stored.

    ``chosen`` are their keys and values (``gather``). Returns the part, and visible tokens per query, a scalar mean
    over heads.
    """
    units, unit_size = _by_kv_head(shape, selection), selection.unit_size
    keys, values = (tensor.unsqueeze(0) for tensor in chosen)
    positions = (units.unsqueeze(-1) * unit_size + torch.arange(unit_size, device=units.device)).flatten(1)
    stored = (units >= 0).repeat_interleave(unit_size, 1) & (positions < segment.stop)  # [num_heads, num_tokens]
    if selection.log_weight is None and bool(stored.all()):
        part = attention(segment.queries, keys, values, shape.scale, softcap=shape.softcap)
    else:
        weight = selection.log_weight
        if weight is not None:
            weight = weight.expand(units.shape[0], -1).repeat_interleave(unit_size, 1).unsqueeze(1)
        part = attention_reference(
            segment.queries, keys, values, shape.scale,
            mask=stored.unsqueeze(1), softcap=shape.softcap, log_weight=weight,
        )  # fmt: skip
    return part, stored.sum(1).double().mean()


def _by_kv_head(shape: LayerShape, selection: Selection) -> Tensor:
    """Units of each KV head or query head."""
    units = selection.units
    return units.expand(shape.num_kv_heads, -1) if units.shape[0] == 1 else units


def _past_and_own(shape: LayerShape, segment: Segment, keys: Tensor, values: Tensor) -> Part:
    """Attention over given keys, of which the last ones are the segment's own: those causally, the others in full."""
    num_queries = segment.num_queries
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
