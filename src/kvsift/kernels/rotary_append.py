"""Head norms, rotation, append and summaries in one launch: from the QKV projection to queries and a longer cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvsift.kernels.append import append_reference, load_page, pool_arguments, store_token, summarise_without_twins
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.rms_norm import rms_norm_reference, weighted
from kvsift.kernels.triton_shim import jit, runs_on_triton, tl


def qkv_rotary_append(
    qkv: Tensor, angles: Tensor, lengths: Tensor, kv: PagedKV, summaries: Mapping[str, Tensor], *, num_query_heads: int,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, norm_eps: float = 1e-6, norm_offset: float = 0.0,
    gated: bool = False, v_norm: bool = False, values_are_keys: bool = False, query_scales: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Normalise and rotate the heads of one token per row, append its key and value, return its queries.

    Every step is rounded to the dtype of ``qkv`` where transformers rounds it.

    Args:
        qkv: [rows, (num_query_heads + 2 * num_kv_heads) * head_dim], query heads first, then keys, then values.
            If ``gated``, a gate of as many numbers follows each query head (Qwen3-Next), which is left alone.
        angles: [positions, 2, rotary_dim], cosines and sines, with the same angles in both halves. The first
            rotary_dim numbers of a head are rotated, number i with number i + rotary_dim / 2. Angles may be columns
            of a wider table.
        lengths: int32 [rows], whose angles each row takes.
        kv: pools to write to; ``lengths`` count the new token.
        summaries: kind -> [num_kv_heads, num_pages, width], contiguous.
        num_query_heads: number of query heads of the layer.
        q_norm, k_norm: [head_dim], weights of an RMS norm of every head before the rotation (Qwen3).
        norm_eps: epsilon of these norms.
        norm_offset: added to their weights, see ``rms_norm``.
        v_norm: values are normalised, too, without a weight (Gemma 4).
        values_are_keys: values are the keys before their norm, and ``qkv`` ends with these.
        query_scales: [positions], factors of queries behind their rotation (Ministral 3).
        pdl: programmatic dependent launch: may start while the kernel before still runs, and lets the one behind it
            start beside both (Hopper and later).

    Returns:
        Queries [rows, num_query_heads, head_dim].
    """
    options = {
        "num_query_heads": num_query_heads, "q_norm": q_norm, "k_norm": k_norm, "norm_eps": norm_eps,
        "norm_offset": norm_offset, "gated": gated, "v_norm": v_norm, "values_are_keys": values_are_keys,
        "query_scales": query_scales,
    }  # fmt: skip
    if runs_on_triton(qkv):
        return qkv_rotary_append_triton(qkv, angles, lengths, kv, summaries, pdl=pdl, **options)  # type: ignore[arg-type]
    return qkv_rotary_append_reference(qkv, angles, lengths, kv, summaries, **options)  # type: ignore[arg-type]


def qkv_rotary_append_reference(
    qkv: Tensor, angles: Tensor, lengths: Tensor, kv: PagedKV, summaries: Mapping[str, Tensor], *, num_query_heads: int,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, norm_eps: float = 1e-6, norm_offset: float = 0.0,
    gated: bool = False, v_norm: bool = False, values_are_keys: bool = False, query_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    heads = qkv.unflatten(1, (-1, kv.head_dim))
    step = 2 if gated else 1
    queries, rest = heads.tensor_split([step * num_query_heads], 1)
    keys, values = rest[:, : kv.num_kv_heads], rest[:, -kv.num_kv_heads :]
    queries, (cos, sin) = queries[:, ::step], angles[lengths.long()].unbind(1)
    if q_norm is not None:
        queries = rms_norm_reference(queries, q_norm, norm_eps, norm_offset)
    if k_norm is not None:
        keys = rms_norm_reference(keys, k_norm, norm_eps, norm_offset)
    if v_norm:
        values = rms_norm_reference(values, None, norm_eps)
    append_reference(kv, rotate(keys, cos, sin), values, summaries)
    queries = rotate(queries, cos, sin)
    return queries if query_scales is None else queries * query_scales[lengths.long()].view(-1, 1, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x [rows, num_heads, head_dim]; cos and sin are [rows, rotary_dim]."""
    cos, sin = (angle.to(x.dtype).unsqueeze(1) for angle in (cos, sin))
    rotary, rest = x.tensor_split([cos.shape[-1]], -1)
    first, second = rotary.chunk(2, -1)
    return torch.cat([rotary * cos + torch.cat([-second, first], -1) * sin, rest], -1)


def qkv_rotary_append_triton(
    qkv: Tensor, angles: Tensor, lengths: Tensor, kv: PagedKV, summaries: Mapping[str, Tensor], *, num_query_heads: int,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, norm_eps: float = 1e-6, norm_offset: float = 0.0,
    gated: bool = False, v_norm: bool = False, values_are_keys: bool = False, query_scales: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    rows = qkv.shape[0]
    assert angles.stride(2) == 1
    assert qkv.stride(1) == 1
    queries = qkv.new_empty(rows, num_query_heads, kv.head_dim)
    _rotary_append_kernel[rows, num_query_heads + kv.num_kv_heads](
        qkv, angles, query_scales, lengths, queries, q_norm, k_norm, norm_eps, qkv.stride(0), *angles.stride()[:2],
        0 if query_scales is None else query_scales.stride(0),
        **pool_arguments(kv, summaries), H=num_query_heads, KVH=kv.num_kv_heads, ROTARY=angles.shape[2],
        OFFSET=norm_offset, GATED=gated, V_NORM=v_norm, VALUES=0 if values_are_keys else kv.num_kv_heads, PDL=pdl,
        num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    summarise_without_twins(kv, summaries)
    return queries


@jit
def _rotary_append_kernel(
    qkv_ptr, angles_ptr, scales_ptr, rows_ptr, queries_ptr, q_norm_ptr, k_norm_ptr, eps, qkv_row, angles_row,
    angles_sin, scales_row, keys_ptr, values_ptr, table_ptr, lengths_ptr, k_head, k_page, k_slot, v_head, v_page,
    v_slot, table_row, num_pages, summaries, writers, WIDTHS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, H: tl.constexpr, KVH: tl.constexpr, ROTARY: tl.constexpr, OFFSET: tl.constexpr,
    GATED: tl.constexpr, V_NORM: tl.constexpr, VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per query head, and one per KV head for its key, its value and their page."""
    if PDL:  # attention reads early what is older than the product before this kernel
        tl.extra.cuda.gdc_launch_dependents()
    row, head, d = tl.program_id(0), tl.program_id(1), tl.arange(0, DP)
    page, slot, keys = tl.zeros((), tl.int64), tl.zeros((), tl.int32), tl.zeros((PAGE, DP), tl.float32)
    # angles and the keys of the page are older than the kernel before, which may still be running
    length = tl.load(rows_ptr + row).to(tl.int64)
    angles_ptr += length * angles_row
    cos = tl.load(angles_ptr + d, mask=d < ROTARY, other=1.0)
    sin = tl.load(angles_ptr + angles_sin + d, mask=d < ROTARY, other=0.0)
    if head >= H:
        page, slot, keys = load_page(
            row, head - H, keys_ptr, table_ptr, lengths_ptr, k_head, k_page, k_slot, table_row, SIZE, PAGE, D, DP
        )
    if PDL:
        tl.extra.cuda.gdc_wait()
    qkv = qkv_ptr + row * qkv_row
    STEP: tl.constexpr = 2 if GATED else 1  # heads from a query to the next one
    if head < H:
        query = rotated_head(qkv + head * STEP * D, cos, sin, q_norm_ptr, eps, D, DP, ROTARY, OFFSET)
        if scales_ptr is not None:
            query = (query.to(tl.float32) * tl.load(scales_ptr + length * scales_row).to(tl.float32)).to(query.dtype)
        tl.store(queries_ptr + (row * H + head) * D + d, query, mask=d < D)
    else:
        qkv += (STEP - 1) * H * D
        key = rotated_head(qkv + head * D, cos, sin, k_norm_ptr, eps, D, DP, ROTARY, OFFSET)
        value = tl.load(qkv + (head + VALUES) * D + d, mask=d < D, other=0.0)  # that many heads behind the key
        if V_NORM:
            wide = value.to(tl.float32)
            value = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)).to(value.dtype)
        store_token(
            key, value, page, slot, keys, head - H, keys_ptr, values_ptr, k_head, k_page, k_slot, v_head, v_page,
            v_slot, num_pages, summaries, writers, WIDTHS, SIZE, PAGE, D, DP,
        )  # fmt: skip


@jit
def rotated_head(
    head_ptr, cos, sin, norm_ptr, eps, D: tl.constexpr, DP: tl.constexpr, ROTARY: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """One head [DP], normalised if it has a norm, its first ROTARY numbers rotated by cos and sin [DP]."""
    d = tl.arange(0, DP)
    rotary = d < ROTARY
    partner = tl.where(d < ROTARY // 2, d + ROTARY // 2, d - ROTARY // 2)
    x = tl.load(head_ptr + d, mask=d < D, other=0.0)
    y = tl.load(head_ptr + partner, mask=rotary, other=0.0)
    dtype: tl.constexpr = x.dtype
    if norm_ptr is not None:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
        x = weighted(wide * scale, tl.load(norm_ptr + d, mask=d < D, other=0.0), OFFSET, dtype)
        y = weighted(y.to(tl.float32) * scale, tl.load(norm_ptr + partner, mask=rotary, other=0.0), OFFSET, dtype)
    cos, sin = cos.to(dtype).to(tl.float32), sin.to(dtype).to(tl.float32)
    y = tl.where(d < ROTARY // 2, -y.to(tl.float32), y.to(tl.float32))
    # both products are rounded before the sum, as torch rounds them
    straight, across = (x.to(tl.float32) * cos).to(dtype), (y * sin).to(dtype)
    return (straight.to(tl.float32) + across.to(tl.float32)).to(dtype)
