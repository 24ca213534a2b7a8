"""Scores of keys by a few probe queries per segment: norms, products and the best probe in one pass over the keys.

The keys are read once for all segments of a chunk; tensor cores do 2 * head_dim operations per key and probe.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsift.kernels.triton_shim import jit_for_any, power_of_two, runs_on_triton, tl, triton

TINY = 1e-6  # least norm of a key in a cosine
TOKENS, LEAST_PROBES, MOST_PROBES, WARPS = 128, 16, 64, 8  # of a tile; tensor cores take at least 16 rows


def probe_scores(
    probes: Tensor, keys: Tensor, table: Tensor, tokens: slice, *, cosine: bool, mean: bool = False
) -> Tensor:
    """Score each key against the probe queries of each segment.

    Args:
        probes: [num_segments, num_lists, num_probes, head_dim]; num_lists is num_kv_heads or a multiple of it, whose
            consecutive lists read the same KV head.
        keys: [num_kv_heads, num_pages, page_size, head_dim], any strides, the last one 1; in the dtype of the probes,
            or float8_e4m3fn.
        table: int32 [max_pages], physical page of each logical page.
        tokens: positions of the keys to score.
        cosine: divide by the norm of the key.
        mean: over the probes, instead of the largest.

    Returns:
        float32 [num_segments, num_lists, tokens.stop - tokens.start].
    """
    run = probe_scores_triton if runs_on_triton(probes) else probe_scores_reference
    return run(probes, keys, table, tokens, cosine=cosine, mean=mean)


def probe_scores_reference(
    probes: Tensor, keys: Tensor, table: Tensor, tokens: slice, *, cosine: bool, mean: bool = False
) -> Tensor:
    position = torch.arange(tokens.start, tokens.stop, device=keys.device)
    keys = keys[:, table[position // keys.shape[2]], position % keys.shape[2]].float()
    keys = keys.repeat_interleave(probes.shape[1] // len(keys), 0)
    products = probes.float() @ keys.mT
    best = products.mean(2) if mean else products.amax(2)
    return best / keys.norm(dim=-1).clamp_min(TINY) if cosine else best


def probe_scores_triton(
    probes: Tensor, keys: Tensor, table: Tensor, tokens: slice, *, cosine: bool, mean: bool = False
) -> Tensor:
    num_segments, num_lists, num_probes, head_dim = probes.shape
    # the ends of a prompt have segments of any length, for which nothing must be compiled
    padded = power_of_two(max(num_probes, LEAST_PROBES) if num_segments == 1 else num_probes)
    per_product = max(1, min(power_of_two(num_segments), MOST_PROBES // padded))  # segments
    per_product = max(per_product, LEAST_PROBES // padded)
    probes = (pad(probes, (0, 0, 0, padded - num_probes)) if padded > num_probes else probes).contiguous()
    num_keys = tokens.stop - tokens.start
    scores = probes.new_empty(num_segments, num_lists, num_keys, dtype=torch.float32)
    with torch.cuda.device_of(probes):
        _probe_kernel[triton.cdiv(num_keys, TOKENS), num_lists](
            probes, keys, table, scores, *keys.stride()[:3], tokens.start, num_keys, num_segments,
            num_probes, SEGMENTS=per_product, PADDED=padded, LISTS_PER_KV=num_lists // keys.shape[0],
            D=head_dim, DP=power_of_two(head_dim), PAGE=keys.shape[2], TOKENS=TOKENS, COSINE=cosine, MEAN=mean,
            SMALLEST=TINY, num_warps=WARPS,
        )  # fmt: skip
    return scores


@jit_for_any("start", "num_keys", "num_segments", "num_probes")
def _probe_kernel(
    probes_ptr, keys_ptr, table_ptr, scores_ptr, key_head, key_page, key_token, start, num_keys, num_segments,
    num_probes, SEGMENTS: tl.constexpr, PADDED: tl.constexpr, LISTS_PER_KV: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, COSINE: tl.constexpr, MEAN: tl.constexpr,
    SMALLEST: tl.constexpr,
):  # fmt: skip
    row, num_lists = tl.program_id(1), tl.num_programs(1)
    d, m = tl.arange(0, DP), tl.arange(0, SEGMENTS * PADDED)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < num_keys
    page = tl.load(table_ptr + (start + token) // PAGE, mask=inside, other=0).to(tl.int64)
    where = (row // LISTS_PER_KV).to(tl.int64) * key_head + page * key_page + (start + token) % PAGE * key_token
    k = tl.load(keys_ptr + where[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
    factor = tl.full((TOKENS,), 1.0, tl.float32)
    if COSINE:
        wide = k.to(tl.float32)
        factor = 1.0 / tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), SMALLEST)
    for segment in range(0, num_segments, SEGMENTS):
        s = segment + m // PADDED
        offset = (s * num_lists + row).to(tl.int64) * (PADDED * D) + m % PADDED * D
        mask = (s < num_segments)[:, None] & (d < D)[None, :]
        q = tl.load(probes_ptr + offset[:, None] + d[None, :], mask=mask, other=0.0)
        products = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if not MEAN:
            products = tl.where((m % PADDED < num_probes)[:, None], products, float("-inf"))
        products = tl.reshape(products, (SEGMENTS, PADDED, TOKENS))
        best = tl.sum(products, 1) / num_probes if MEAN else tl.max(products, 1)  # rows of padding are 0
        stored = segment + tl.arange(0, SEGMENTS)
        place = (stored * num_lists + row).to(tl.int64) * num_keys
        tl.store(
            scores_ptr + place[:, None] + token[None, :], best * factor[None, :],
            mask=(stored < num_segments)[:, None] & inside[None, :],
        )  # fmt: skip
