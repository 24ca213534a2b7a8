"""Correctness of what is timed: outputs against float32, selections against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvsift.kernels.attention import attention_reference
from kvsift.kernels.score_pages import score_pages_reference
from kvsift.kernels.sketch import SKETCHES
from kvsift.kernels.sketch_attention import sketch_attention_reference
from kvsift.kernels.top_pages import visible_pages_reference
from kvsift_lab.bench.attention_point import AttentionPoint, Buffers
from kvsift_lab.bench.attention_variants import Attend, SketchLaunch, SparseLaunch


def distance(output: Tensor, exact: Tensor) -> float:
    """Return the norm of the error, relative to the norm of ``exact``."""
    return float((output.float() - exact).norm() / exact.norm())


def exact_dense(point: AttentionPoint, buffers: Buffers) -> Tensor:
    """Return dense attention in float32, [batch, num_query_heads, head_dim]."""
    shape, device = (point.batch, point.num_kv_heads), buffers.queries.device
    pages = torch.arange(point.max_pages, device=device).expand(*shape, -1)
    return exact_listed(point, buffers, pages, torch.full(shape, point.max_pages, device=device))


def exact_listed(point: AttentionPoint, buffers: Buffers, pages: Tensor, counts: Tensor) -> Tensor:
    """Return attention over listed pages in float32, one KV head at a time; pages [batch, num_kv_heads, capacity] ->
    [batch, num_query_heads, head_dim]."""
    outputs = []
    for row, head in product(range(point.batch), range(point.num_kv_heads)):
        physical = buffers.kv.table[row].long()[pages[row, head, : counts[row, head]].long()]
        keys, values = (pool[head, physical].flatten(0, 1)[None, None] for pool in buffers.kv[:2])
        queries = buffers.queries[row].float().unflatten(0, (point.num_kv_heads, -1))[head]
        outputs.append(attention_reference(queries[None, :, None], keys, values, point.scale).output[0, :, 0])
    return torch.cat(outputs).unflatten(0, (point.batch, -1))


def check_dense(exact: Tensor, attend: Attend) -> dict[str, Any]:
    """Return the distance of an output from dense attention in float32."""
    return {"error": distance(attend(0), exact)}


def check_sparse(point: AttentionPoint, sets: Sequence[Buffers], attend: SparseLaunch) -> dict[str, Any]:
    """Return the distance of an output from float32 over its own pages, the share of the reference's pages among them,
    and how far below the reference's last score the others are, relative to it."""
    attend.pages.fill_(-1)
    output, buffers = attend(0), sets[0]
    scores = score_pages_reference(
        buffers.queries, buffers.summaries[attend.kind], buffers.kv.table, attend.spans, kind=attend.kind,
        scale=point.scale, shared=True,
    )  # fmt: skip
    expected = _visible(point, *visible_pages_reference(scores, attend.spans, point.capacity))
    visible = _visible(point, attend.pages, attend.counts)
    return {
        "launches": 1 if attend.single_launch else 3,
        "error": distance(output, exact_listed(point, buffers, attend.pages, attend.counts)),
        "same_pages": float((visible & expected).sum() / expected.sum()),
        "score_gap": _score_gap(scores, attend.spans, visible, expected),
    }


def check_sketch(point: AttentionPoint, sets: Sequence[Buffers], attend: SketchLaunch) -> dict[str, Any]:
    """Return the distance of an output from the reference's, and the share of the reference's tokens it attends."""
    attend.tokens.fill_(-1)
    output, buffers = attend(0), sets[0]
    tokens, counts = torch.full_like(attend.tokens, -1), torch.zeros_like(attend.counts)
    queries, outputs = buffers.queries.unflatten(1, (point.num_kv_heads, -1)), []
    for head in range(point.num_kv_heads):  # one at a time: unpacked codes are large
        own = slice(head, head + 1)
        kv = buffers.kv._replace(keys=buffers.kv.keys[own], values=buffers.kv.values[own])
        lists = tokens[:, own], counts[:, own]
        outputs.append(
            sketch_attention_reference(
                queries[:, head].float(), kv, buffers.summaries[attend.kind][own], attend.spans, *lists,
                bits=SKETCHES[attend.kind], rest=True, scale=point.scale,
            )
        )  # fmt: skip
    same = sum(
        int(torch.isin(found[:count], listed[:count]).sum())
        for found, listed, count in zip(attend.tokens.flatten(0, 1), tokens.flatten(0, 1), counts.flatten().tolist())
    )
    return {
        "launches": 1 if attend.single_launch else 7,
        "error": distance(output, torch.stack(outputs, 1).flatten(1, 2)),
        "same_tokens": same / int(counts.sum()),
    }


def _score_gap(scores: Tensor, spans: Tensor, visible: Tensor, expected: Tensor) -> float:
    """Return the largest gap of all lists; all sequences have the same spans."""
    first, stop = spans[0, :2].tolist()
    if first == stop:
        return 0.0
    scores, visible, expected = scores[..., : stop - first], visible[..., first:stop], expected[..., first:stop]
    last = scores.masked_fill(~expected, torch.inf).amin(-1)  # [batch, num_kv_heads]
    lowest = scores.masked_fill(~visible, torch.inf).amin(-1)
    gaps = ((last - lowest) / last.abs()).nan_to_num(nan=0.0)  # inf - inf in lists without candidates
    return float(gaps.clamp_min(0.0).max())


def _visible(point: AttentionPoint, pages: Tensor, counts: Tensor) -> Tensor:
    """Return bool [batch, num_kv_heads, max_pages + 1]; unlisted entries go to the last column, which is cleared."""
    listed = torch.arange(pages.shape[2], device=pages.device) < counts[..., None]
    visible = torch.zeros(*pages.shape[:2], point.max_pages + 1, dtype=torch.bool, device=pages.device)
    visible.scatter_(2, pages.long().masked_fill(~listed, point.max_pages), True)
    visible[..., -1] = False
    return visible
