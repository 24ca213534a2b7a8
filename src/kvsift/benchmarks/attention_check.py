"""Whether what is timed is right: outputs against float32, selections against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvsift.benchmarks.attention_point import Buffers, Point
from kvsift.benchmarks.attention_variants import Attend, Sifted
from kvsift.kernels.attention import attention_reference
from kvsift.kernels.score_pages import score_pages_reference
from kvsift.kernels.top_pages import visible_pages_reference


def distance(output: Tensor, exact: Tensor) -> float:
    """Relative to the length of ``exact``."""
    return float((output.float() - exact).norm() / exact.norm())


def exact_dense(point: Point, buffers: Buffers) -> Tensor:
    """Attention over everything in float32, one KV head of a sequence at a time; [batch, num_query_heads, head_dim]."""
    rows = []
    for row in range(point.batch):
        queries = buffers.queries[row].float().unflatten(0, (point.num_kv_heads, -1))
        keys, values = buffers.dense_keys[row], buffers.dense_values[row]
        heads = [
            _attend(queries[head], keys[head, None], values[head, None], point.scale)
            for head in range(point.num_kv_heads)
        ]
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def exact_listed(point: Point, buffers: Buffers, pages: Tensor, counts: Tensor) -> Tensor:
    """Attention over listed pages in float32; pages [batch, num_kv_heads, capacity] -> [batch, num_query_heads,
    head_dim]."""
    outputs = []
    heads = torch.arange(point.num_kv_heads, device=pages.device)[:, None]
    for row in range(point.batch):
        listed = torch.arange(point.capacity, device=pages.device) < counts[row, :, None]  # [num_kv_heads, capacity]
        physical = buffers.kv.table[row].long()[pages[row].long().masked_fill(~listed, 0)]
        keys, values = (pool[heads, physical].flatten(1, 2) for pool in buffers.kv[:2])
        mask = listed.repeat_interleave(point.page_size, 1)
        outputs.append(_attend(buffers.queries[row].float(), keys, values, point.scale, mask[None, :, None]))
    return torch.stack(outputs)


def check_dense(exact: Tensor, attend: Attend) -> dict[str, Any]:
    """Distance of an output from attention over everything in float32."""
    return {"error": distance(attend(0), exact)}


def check_sifted(point: Point, sets: Sequence[Buffers], attend: Sifted) -> dict[str, Any]:
    """Distance of an output from float32 over the pages it chose itself; share of the reference's pages among them, and
    how far below the reference's last the score of another is, relative to it."""
    attend.pages.fill_(-1)
    output, buffers = attend(0), sets[0]
    scores = score_pages_reference(
        buffers.queries, buffers.summaries[attend.kind], buffers.kv.table, attend.spans, kind=attend.kind,
        scale=point.scale, shared=True,
    )  # fmt: skip
    expected = _seen(point, *visible_pages_reference(scores, attend.spans, point.capacity))
    seen = _seen(point, attend.pages, attend.counts)
    return {
        "launches": 1 if attend.single_launch else 3,
        "error": distance(output, exact_listed(point, buffers, attend.pages, attend.counts)),
        "same_pages": float((seen & expected).sum() / expected.sum()),
        "score_gap": _score_gap(scores, attend.spans, seen, expected),
    }


def _score_gap(scores: Tensor, spans: Tensor, seen: Tensor, expected: Tensor) -> float:
    """The largest of all lists; all sequences have the same spans."""
    first, stop = spans[0, :2].tolist()
    if first == stop:
        return 0.0
    scores, seen, expected = scores[..., : stop - first], seen[..., first:stop], expected[..., first:stop]
    last = scores.masked_fill(~expected, torch.inf).amin(-1)  # [batch, num_kv_heads]
    lowest = scores.masked_fill(~seen, torch.inf).amin(-1)
    gaps = ((last - lowest) / last.abs()).nan_to_num(nan=0.0)  # of lists without candidates: inf - inf
    return float(gaps.clamp_min(0.0).max())


def _seen(point: Point, pages: Tensor, counts: Tensor) -> Tensor:
    """bool [batch, num_kv_heads, max_pages + 1]; what is not listed goes to the last column, which is cleared."""
    listed = torch.arange(pages.shape[2], device=pages.device) < counts[..., None]
    seen = torch.zeros(*pages.shape[:2], point.max_pages + 1, dtype=torch.bool, device=pages.device)
    seen.scatter_(2, pages.long().masked_fill(~listed, point.max_pages), True)
    seen[..., -1] = False
    return seen


def _attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """queries [num_query_heads, head_dim], keys and values [num_heads, num_keys, head_dim] -> as queries."""
    part = attention_reference(queries[None, :, None], keys[None], values[None], scale, mask=mask)
    return part.output[0, :, 0]
