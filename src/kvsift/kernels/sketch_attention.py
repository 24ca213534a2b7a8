"""One decode step of the method ``sketch``: weigh, vote, choose tokens, estimate the others, attend, merge.

The specification is ``methods.sketch``. On a GPU it is a single launch where that runs (``kernels.sketch_launch``),
else a product and six launches, none of which waits for the host:
what sinks and window weigh (``kernels.sketch_twins``); weights and votes of all candidates; the best tokens
(``kernels.top_pages``); listed candidates hidden; the estimate of the others, as records of split attention; and
attention over the lists, which merges these (``kernels.page_attention``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvsift.kernels import sketch_twins as twins
from kvsift.kernels.merge import merge_reference, with_sink_logit
from kvsift.kernels.page_attention import (
    SplitSpace,
    listed_tokens,
    logit_factors,
    masked_part,
    page_attention_triton,
    processor_count,
    split_count,
    tile_tokens,
)
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.sketch import ERROR, SketchLayout, estimated_rest, log_weights, random_rotation, unpack, votes
from kvsift.kernels.sketch_launch import SketchSpace, single_launch_runs, sketch_attention_cuda
from kvsift.kernels.split_attention import ESTIMATED_WHOLE
from kvsift.kernels.top_pages import visible_pages_reference, visible_pages_triton
from kvsift.kernels.triton_shim import power_of_two, runs_on_triton, triton
from kvsift.types import Part

TILE_BYTES = 16 << 10  # of estimated keys at most: shared memory holds them more than once
WEIGHED, HIDDEN, REST = 512, 1024, 1024  # candidates of a program: weighed, looked up to hide, and least estimated


def sketch_attention(
    queries: Tensor, kv: PagedKV, rows: Tensor, spans: Tensor, tokens: Tensor, counts: Tensor, *, bits: int, rest: bool,
    scale: float, softcap: float | None = None, sink_logit: Tensor | None = None, visible: Tensor | None = None,
    estimated: Tensor | None = None, dense_below: Tensor | None = None, out: Tensor | None = None,
    space: SketchSpace | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """Return attention of one query per sequence over its sinks, its best tokens and its window, and an estimate of
    the others.

    Args:
        queries: [batch, num_query_heads, head_dim].
        kv: the cache, the queries' own tokens included.
        rows: uint8 [num_kv_heads, num_pages, width], sketches by physical page, contiguous.
        spans: int32 [batch, 4]: first candidate token, the token behind the last, tokens to choose, tokens held.
        tokens: int32 [batch, num_kv_heads, capacity], written: the visible tokens, ascending.
        counts: int32 [batch, num_kv_heads], written.
        bits: bits per channel of the sketches.
        rest: estimate what is not visible; false: leave it out.
        scale, softcap, sink_logit, visible: as in ``page_attention``.
        estimated: int64 [batch], to which the estimated shares of all query heads' attention are added, each a number
            of 0 to ``ESTIMATED_WHOLE``.
        dense_below: int32 [batch]; sequences shorter than this are not attended.
        out: written where a sequence is attended; a new one by default.
        space: workspace of the single launch, kept between launches; made here by default.
        early: as in ``sifted_attention``.

    Returns:
        [batch, num_query_heads, head_dim] in the dtype of ``queries``.
    """
    if single_launch_runs(queries, kv, tokens.shape[2]):
        return sketch_attention_cuda(
            queries, kv, rows, spans, tokens, counts, bits=bits, rest=rest, scale=scale, softcap=softcap,
            sink_logit=sink_logit, visible=visible, estimated=estimated, dense_below=dense_below, out=out, space=space,
            early=early,
        )  # fmt: skip
    run = sketch_attention_triton if runs_on_triton(queries) else sketch_attention_reference
    return run(
        queries, kv, rows, spans, tokens, counts, bits=bits, rest=rest, scale=scale, softcap=softcap,
        sink_logit=sink_logit, visible=visible, estimated=estimated, dense_below=dense_below, out=out,
    )  # fmt: skip


def sketch_attention_reference(
    queries: Tensor, kv: PagedKV, rows: Tensor, spans: Tensor, tokens: Tensor, counts: Tensor, *, bits: int, rest: bool,
    scale: float, softcap: float | None = None, sink_logit: Tensor | None = None, visible: Tensor | None = None,
    estimated: Tensor | None = None, dense_below: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    output = torch.zeros_like(queries) if out is None else out
    for row, (first, stop, chosen, held) in enumerate(spans.tolist()):
        own = slice(row, row + 1)
        weights, value_means = candidates_reference(
            queries[row], kv, rows, row, (first, stop), bits=bits, scale=scale, softcap=softcap
        )
        past = past_reference(queries[row], kv, row, (first, stop, held), scale=scale, softcap=softcap)
        by_list = votes(weights.unsqueeze(1), past, kv.num_kv_heads)
        visible_pages_reference(by_list[None], spans[own], tokens.shape[2], out=(tokens[own], counts[own]))
        if dense_below is not None and bool(kv.lengths[row] < dense_below[row]):
            continue
        if visible is not None:
            visible[row] += counts[row].sum()
        others = (weights, value_means) if rest and chosen < stop - first else None
        lists = tokens[row], counts[row]
        part, share = answer_reference(queries[row], kv, row, lists, first, others, scale=scale, softcap=softcap)
        if estimated is not None:
            estimated[row] += int(ESTIMATED_WHOLE * share)
        part = part if sink_logit is None else with_sink_logit(part, sink_logit)
        output[row] = part.output[0, :, 0]
    return output


def past_reference(
    queries: Tensor, kv: PagedKV, row: int, span: tuple[int, int, int], *, scale: float, softcap: float | None
) -> Tensor:
    """Log-sum-exp over the sinks and the window of one sequence, [num_query_heads, 1]; ``span``: first candidate, the
    token behind the last, tokens held."""
    first, stop, held = span
    at = torch.arange(int(kv.lengths[row]), device=queries.device)
    visible = ((at < first) | (at >= stop) & (at < held)).expand(kv.num_kv_heads, -1)
    return masked_part(queries, kv, row, visible, scale, softcap).lse[0]


def candidates_reference(
    queries: Tensor, kv: PagedKV, rows: Tensor, row: int, span: tuple[int, int], *, bits: int, scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Logarithms of the weights of one sequence's candidates, float32 [num_query_heads, count], and the mean values of
    their pages; queries [num_query_heads, head_dim]."""
    (first, stop), layout = span, SketchLayout(bits, kv.head_dim, kv.page_size)
    unpacked = unpack(rows[:, kv.table[row, first // kv.page_size : -(-stop // kv.page_size)].long()], layout)
    weights = log_weights(queries[:, None].float() * scale, unpacked, bits, softcap)[:, 0]
    skipped = first % kv.page_size
    return weights[:, skipped : skipped + stop - first], unpacked.value_means


def answer_reference(
    queries: Tensor, kv: PagedKV, row: int, lists: tuple[Tensor, Tensor], first: int,
    others: tuple[Tensor, Tensor] | None, *, scale: float, softcap: float | None,
) -> tuple[Part, float]:  # fmt: skip
    """Attention of one sequence's query over its lists [num_kv_heads, capacity] with their counts, merged with the
    estimate of the candidates, from token ``first`` on, that are not in them (``candidates_reference``; None: no
    estimate); and the sum of the estimate's shares of all query heads."""
    tokens, counts = lists
    mask = listed_tokens(tokens, counts, int(kv.lengths[row]), 1)
    part = masked_part(queries, kv, row, mask, scale, softcap)
    if others is None:
        return part, 0.0
    weights, value_means = others
    count = weights.shape[1]
    there = torch.arange(tokens.shape[1], device=tokens.device) < counts.unsqueeze(1)
    places = tokens.long() - first
    places = places.masked_fill(~there | (places < 0) | (places >= count), count)
    estimate = estimated_rest(weights, places, value_means, kv.page_size, first % kv.page_size)
    lse, part = part.lse, merge_reference(part, Part(estimate.output.to(part.output), estimate.lse))
    return part, float((1 - (lse - part.lse).exp()).sum().double())


def sketch_attention_triton(
    queries: Tensor, kv: PagedKV, rows: Tensor, spans: Tensor, tokens: Tensor, counts: Tensor, *, bits: int, rest: bool,
    scale: float, softcap: float | None = None, sink_logit: Tensor | None = None, visible: Tensor | None = None,
    estimated: Tensor | None = None, dense_below: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    batch, num_query_heads, head_dim = queries.shape
    heads, max_tokens, capacity = kv.num_kv_heads, kv.table.shape[1] * kv.page_size, tokens.shape[2]
    num_lists, group = batch * heads, num_query_heads // heads
    rotated = (queries.float() * scale) @ random_rotation(head_dim, queries.device)
    weights = _weigh(queries, rotated, kv, rows, spans, (tokens, counts), bits=bits, scale=scale, softcap=softcap)
    estimates = min(-(-max_tokens // REST), max(1, 2 * processor_count(queries) // num_lists)) if rest else 0
    splits = split_count(kv, capacity, num_lists, 1)
    space = SplitSpace.make(num_lists, splits + estimates, group, head_dim, queries.device)
    if rest:
        twins.hide_kernel[triton.cdiv(capacity, HIDDEN), num_lists](
            tokens, counts, spans, weights, heads, capacity, max_tokens, G=group, BLOCK=HIDDEN, num_warps=4
        )
        layout = SketchLayout(bits, head_dim, kv.page_size)
        twins.rest_kernel[estimates, heads, batch](
            weights, rows.view(torch.float16), rows.view(torch.int8), kv.table, spans, space.parts, *rows.stride()[:2],
            kv.table.shape[1], splits + estimates, **_constants(layout, group), MEAN=layout.value_mean,
            SCALES=layout.scales + 2, RECORD=space.parts.shape[2], num_warps=4,
        )  # fmt: skip
        estimated = spans.new_zeros(batch, dtype=torch.int64) if estimated is None else estimated
    return page_attention_triton(
        queries, kv, tokens, counts, scale=scale, softcap=softcap, sink_logit=sink_logit, space=space, visible=visible,
        dense_below=dense_below, out=out, unit_size=1, estimates=estimates, estimated=estimated,
    )  # fmt: skip


def _weigh(
    queries: Tensor, rotated: Tensor, kv: PagedKV, rows: Tensor, spans: Tensor, lists: tuple[Tensor, Tensor], *,
    bits: int, scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Write the lists; return the weights of candidates (``kernels.sketch_twins``).

    rotated float32 [batch, num_query_heads, head_dim], scaled.
    """
    (batch, num_query_heads, head_dim), heads, max_pages = rotated.shape, kv.num_kv_heads, kv.table.shape[1]
    max_tokens, layout = max_pages * kv.page_size, SketchLayout(bits, head_dim, kv.page_size)
    constants = _constants(layout, num_query_heads // heads) | {"CAPPED": softcap is not None}
    past = rotated.new_empty(batch, num_query_heads)
    weights = rotated.new_empty(batch, num_query_heads, max_tokens)
    scores = rotated.new_empty(batch, heads, max_tokens)
    exact, factor = (rotated, 1.0) if kv.coded else (queries.contiguous(), scale)
    twins.past_kernel[heads, batch](
        exact, kv.keys, kv.table, spans, past, *kv.keys.stride()[:3], max_pages, *logit_factors(factor, softcap),
        **constants | {"TILE": max(16, tile_tokens(kv))}, num_warps=4,
    )  # fmt: skip
    twins.weights_kernel[triton.cdiv(max_tokens, WEIGHED), heads, batch](
        rotated, rows.view(torch.int32), rows.view(torch.float16), rows.view(torch.int8), kv.table, spans, past,
        weights, scores, *rows.stride()[:2], max_pages, logit_factors(1.0, softcap)[1], ERROR[bits], **constants,
        BITS=bits, WORDS=layout.words, FACTORS=layout.factors, MEAN=layout.key_mean, SCALES=layout.scales,
        BLOCK=WEIGHED, num_warps=4,
    )  # fmt: skip
    visible_pages_triton(scores, spans, lists[0].shape[2], out=lists)
    return weights


def _constants(layout: SketchLayout, group: int) -> dict[str, Any]:
    channels = 32 * power_of_two(layout.words)
    tile = max(16, min(128, TILE_BYTES // (4 * channels)))
    return {
        "G": group, "GP": max(16, power_of_two(group)), "D": layout.head_dim, "DP": channels, "PAGE": layout.page_size,
        "TILE": tile,
    }  # fmt: skip
