"""Head norms and rotary embedding of a whole chunk, in place in the output of the QKV projection."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.rms_norm import rms_norm_reference, weighted
from kvsift.kernels.rotary_append import rotate
from kvsift.kernels.triton_shim import jit, power_of_two, runs_on_triton, tl
from kvsift.native.loader import AVAILABLE
from kvsift.native.product import MAX_ROWS
from kvsift.native.product import rotate as rotate_native
from kvsift.native.shapes import ROW_DTYPES


def rotate_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_query_heads: int, num_kv_heads: int, *, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, norm_eps: float = 1e-6, norm_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalise and rotate queries and keys of consecutive tokens.

    Every step is rounded to the dtype of ``qkv`` where transformers rounds it.

    Args:
        qkv: [tokens, (num_query_heads + 2 * num_kv_heads) * head_dim], contiguous, query heads first, then keys, then
            values; overwritten.
        cos, sin: [tokens, rotary_dim], of each token's position; both halves hold the same angles. Number i of a head
            is rotated with number i + rotary_dim / 2; on a GPU, rotary_dim is head_dim.
        num_query_heads, num_kv_heads: heads of the layer.
        q_norm, k_norm: [head_dim], weights of an RMS norm of every head before the rotation (Qwen3).
        norm_eps: epsilon of these norms.
        norm_offset: added to their weights (``rms_norm``); on the CPU only.

    Returns:
        Views of ``qkv``: queries [num_query_heads, tokens, head_dim], keys and values [num_kv_heads, tokens, head_dim].
    """
    heads = qkv.unflatten(1, (num_query_heads + 2 * num_kv_heads, -1))
    arguments = num_query_heads, num_kv_heads, q_norm, k_norm, norm_eps
    if AVAILABLE and qkv.is_cpu and qkv.shape[0] <= MAX_ROWS and heads.dtype in ROW_DTYPES:
        cos, sin = cos.to(heads.dtype).contiguous(), sin.to(heads.dtype).contiguous()
        rotate_native(heads, cos, sin, *arguments, norm_offset)
    elif runs_on_triton(qkv):
        assert not norm_offset
        assert cos.shape[1] == heads.shape[2]
        _rotate_triton(heads, cos, sin, *arguments)
    else:
        _rotate_reference(heads, cos, sin, *arguments, norm_offset)
    queries, keys, values = heads.transpose(0, 1).split_with_sizes([num_query_heads, num_kv_heads, num_kv_heads])
    return queries, keys, values


def _rotate_reference(
    heads: Tensor, cos: Tensor, sin: Tensor, num_query_heads: int, num_kv_heads: int, q_norm: Tensor | None,
    k_norm: Tensor | None, eps: float, offset: float = 0.0,
) -> None:  # fmt: skip
    queries, keys = heads[:, :num_query_heads], heads[:, num_query_heads : num_query_heads + num_kv_heads]
    for part, norm in ((queries, q_norm), (keys, k_norm)):
        part.copy_(rotate(part if norm is None else rms_norm_reference(part, norm, eps, offset), cos, sin))


def _rotate_triton(
    heads: Tensor, cos: Tensor, sin: Tensor, num_query_heads: int, num_kv_heads: int, q_norm: Tensor | None,
    k_norm: Tensor | None, eps: float,
) -> None:  # fmt: skip
    num_tokens, num_heads, head_dim = heads.shape
    half = power_of_two(head_dim // 2)
    with torch.cuda.device_of(heads):
        _rotate_kernel[(num_tokens,)](
            heads, cos, sin, q_norm, k_norm, eps, cos.stride(0), sin.stride(0), num_heads * head_dim,
            H=num_query_heads, KVH=num_kv_heads, HP=power_of_two(num_query_heads), KVHP=power_of_two(num_kv_heads),
            D=head_dim, HALF=half, num_warps=4,
        )  # fmt: skip


@jit
def _rotate_kernel(
    heads_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps, cos_row, sin_row, token_stride, H: tl.constexpr,
    KVH: tl.constexpr, HP: tl.constexpr, KVHP: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads_ptr += token * token_stride
    dtype: tl.constexpr = heads_ptr.dtype.element_ty
    c = tl.arange(0, HALF)
    cos = tl.load(cos_ptr + token * cos_row + c, mask=c < D // 2, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(sin_ptr + token * sin_row + c, mask=c < D // 2, other=0.0).to(dtype).to(tl.float32)
    _rotate_some(heads_ptr, cos, sin, q_norm_ptr, eps, H, HP, D, HALF)
    _rotate_some(heads_ptr + H * D, cos, sin, k_norm_ptr, eps, KVH, KVHP, D, HALF)


@jit
def _rotate_some(
    heads_ptr, cos, sin, norm_ptr, eps, H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr
):
    """Rotate H heads [H, D] of one token, both halves at a time."""
    h, c = tl.arange(0, HP), tl.arange(0, HALF)
    mask = (h < H)[:, None] & (c < D // 2)[None, :]
    at = heads_ptr + h[:, None] * D + c[None, :]
    first, second = tl.load(at, mask=mask, other=0.0), tl.load(at + D // 2, mask=mask, other=0.0)
    dtype: tl.constexpr = first.dtype
    if norm_ptr is not None:
        a, b = first.to(tl.float32), second.to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        low = tl.load(norm_ptr + c, mask=c < D // 2, other=0.0)[None, :]
        high = tl.load(norm_ptr + D // 2 + c, mask=c < D // 2, other=0.0)[None, :]
        first, second = weighted(a * scale, low, 0, dtype), weighted(b * scale, high, 0, dtype)
    a, b, cos, sin = first.to(tl.float32), second.to(tl.float32), cos[None, :], sin[None, :]
    # products are rounded before their sum, as torch rounds them, unless the compiler contracts them
    turned = (a * cos).to(dtype).to(tl.float32) - (b * sin).to(dtype).to(tl.float32)
    across = (b * cos).to(dtype).to(tl.float32) + (a * sin).to(dtype).to(tl.float32)
    tl.store(at, turned.to(dtype), mask=mask)
    tl.store(at + D // 2, across.to(dtype), mask=mask)
