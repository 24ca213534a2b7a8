"""Attention over dense keys of one batch, with the log-sum-exp that a merge needs.

``attention`` takes the fastest exact path (the compiled core for one query on a CPU; torch's fused kernels, which
return the log-sum-exp through private operators); ``attention_reference`` is the specification, in float32, and the
path for what the fused kernels do not support: soft-capping, masks, weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvsift import native
from kvsift.errors import InvalidTensor
from kvsift.kernels.merge import merge_all
from kvsift.native.shapes import supports
from kvsift.types import Part

# Scores of one tile of queries in the reference: 2^25 floats are 128 MiB, whatever the context length.
MAX_TILE_SCORES = 1 << 25
CUDNN_SCORES = 1 << 26  # of a head, from which on cuDNN's kernel pays on Hopper, where its first call is slow
BLOCK_QUERIES, BLOCK_KEYS = 1024, (32768, 8192)  # of calls whose shapes come again


def attention(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool = False, softcap: float | None = None
) -> Part:
    """Exact attention of every query over all keys, or over its past when ``causal``.

    Args:
        queries: [batch, num_query_heads, num_queries, head_dim].
        keys, values: [batch, num_kv_heads, num_keys, head_dim]; query head h reads KV head h // group_size.
        scale: factor of q.k.
        causal: query i sees keys 0 to i; needs as many keys as queries.
        softcap: logit = softcap * tanh(logit / softcap), applied after the scale.

    Returns:
        The part; output in the dtype of ``queries``.

    Raises:
        InputError: if there is not one value for each key, or ``causal`` not one key for each query.
    """
    if keys.shape[:3] != values.shape[:3] or (causal and queries.shape[2] != keys.shape[2]):
        raise InvalidTensor(
            f"queries have shape {list(queries.shape)}, keys {list(keys.shape)} and values {list(values.shape)}; there "
            f"must be one value for each key{', and one key for each query' if causal else ''}."
        )
    if keys.shape[2] == 0:
        return nothing(queries)
    if keys.shape[0] == queries.shape[0] == 1 == queries.shape[2] and supports(queries[0], keys[0]):
        output, lse = native.attend_dense(queries[0], keys[0], values[0], scale, softcap)
        return Part(output.unsqueeze(0), lse.unsqueeze(0))
    if softcap is None and fused_runs(queries, keys, causal):
        if not causal and _takes_blocks(queries):
            return _in_blocks(queries, keys, values, scale)
        return _fused(queries, keys, values, scale, causal)
    mask = None
    if causal:
        mask = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool, device=keys.device).tril()
    return attention_reference(queries, keys, values, scale, mask=mask, softcap=softcap)


def attention_reference(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, *, mask: Tensor | None = None,
    softcap: float | None = None, log_weight: Tensor | None = None,
) -> Part:  # fmt: skip
    """Attention in float32, a tile of queries at a time.

    Args:
        queries: [batch, num_query_heads, num_queries, head_dim].
        keys, values: [batch, num_heads, num_keys, head_dim], num_heads the KV heads or the query heads.
        mask: bool, broadcastable to [batch, num_heads, 1 or num_queries, num_keys]; True is visible.
        softcap: as in ``attention``.
        log_weight: float32 broadcastable as ``mask``; added to the logits.

    Returns:
        The part. A query without visible keys has output 0 and lse -inf; NaN in hidden values has no effect.
    """
    batch, num_query_heads, num_queries = queries.shape[:3]
    num_heads, num_keys = keys.shape[1], keys.shape[2]
    q = queries.unflatten(1, (num_heads, -1))  # [batch, num_heads, group_size, num_queries, head_dim]
    # NaN * 0 is NaN: keys and values hidden from all queries are set to zero, not only weighted with zero
    hidden = None if mask is None else ~_broadcast(mask, num_keys).any(2, keepdim=True).mT  # [.., num_keys, 1]
    k = _blank(keys.float(), hidden).unsqueeze(2)
    v = _blank(values.float(), hidden).unsqueeze(2)
    tile = max(1, MAX_TILE_SCORES // max(1, batch * num_query_heads * num_keys))
    outputs, lses = [], []
    for start in range(0, num_queries, tile):
        rows = slice(start, start + tile)
        logits = (q[:, :, :, rows].float() @ k.mT) * scale  # [batch, num_heads, group_size, tile, num_keys]
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if log_weight is not None:
            logits = logits + _rows(_broadcast(log_weight, num_keys), rows).unsqueeze(2)
        if mask is not None:
            logits = logits.masked_fill(~_rows(_broadcast(mask, num_keys), rows).unsqueeze(2), -torch.inf)
        lse = logits.logsumexp(-1)
        weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
        outputs.append((weights @ v).flatten(1, 2))
        lses.append(lse.flatten(1, 2))
    output = torch.cat(outputs, 2) if outputs else queries.float()
    lse = torch.cat(lses, 2) if lses else queries.new_zeros(batch, num_query_heads, 0, dtype=torch.float32)
    return Part(output.to(queries.dtype), lse)


def nothing(queries: Tensor) -> Part:
    """Return the part of queries without visible keys: output 0, lse -inf."""
    return Part(torch.zeros_like(queries), queries.new_full(queries.shape[:3], -torch.inf, dtype=torch.float32))


def _broadcast(tensor: Tensor, num_keys: int) -> Tensor:
    return tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape)).expand(*(-1,) * 3, num_keys)


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    return tensor if tensor.shape[2] == 1 else tensor[:, :, rows]


def _blank(tensor: Tensor, hidden: Tensor | None) -> Tensor:
    return tensor if hidden is None else tensor.masked_fill(hidden, 0.0)


def fused_runs(queries: Tensor, keys: Tensor, causal: bool) -> bool:
    if queries.shape[0] != keys.shape[0] or (causal and queries.shape[2] != keys.shape[2]):
        return False
    if queries.is_cuda:
        return (
            queries.dtype in (torch.float16, torch.bfloat16) and queries.shape[3] % 8 == 0 and queries.shape[3] <= 256
        )
    return queries.device.type == "cpu" and queries.dtype in (torch.float32, torch.bfloat16, torch.float16)


def _has_cudnn(queries: Tensor) -> bool:
    """Whether cuDNN's kernel runs and may be the faster one. On an H200 it takes 6.0 ms for 2048 queries on 128K keys,
    and FlashAttention 2 11.5 ms; with few queries it splits the keys too little."""
    num_queries, head_dim = queries.shape[2:]
    if not queries.is_cuda or queries.dtype == torch.float32 or num_queries < 256 or head_dim not in (64, 128):
        return False
    return torch.cuda.get_device_capability(queries.device) == (9, 0) and torch.backends.cudnn.is_available()


def _takes_blocks(queries: Tensor) -> bool:
    """Whether queries come in a number that many chunks have. The first call of cuDNN with a shape costs 45 ms, so the
    keys before such chunks, which grow from one to the next, are cut into blocks of few sizes."""
    return queries.shape[2] % BLOCK_QUERIES == 0 and _has_cudnn(queries)


def _in_blocks(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Part:
    def parts() -> Iterator[Part]:
        start = 0
        for size, attend in ((BLOCK_KEYS[0], _cudnn), (BLOCK_KEYS[1], _cudnn), (keys.shape[2], _fused)):
            while start < keys.shape[2] and (start + size <= keys.shape[2] or attend is _fused):
                block = slice(start, start + size)
                yield attend(queries, keys[:, :, block], values[:, :, block], scale, False)
                start += size

    return merge_all(parts())


def _cudnn(queries: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Part:
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, True, 0.0, causal, False, scale=scale
    )[:2]
    return Part(out, lse.squeeze(-1))


def _fused(queries: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Part:
    if _has_cudnn(queries) and queries.shape[0] * queries.shape[2] * keys.shape[2] >= CUDNN_SCORES:
        return _cudnn(queries, keys, values, scale, causal)
    if queries.is_cuda:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            queries, keys, values, 0.0, causal, False, scale=scale
        )[:2]
        return Part(out, lse[..., : queries.shape[2]])  # some builds pad the rows of lse
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if causal:
        return Part(*op(queries, keys, values, 0.0, True, scale=scale))
    # The query heads of a KV head become rows of one head: K and V are read once per group, not once per query head
    # (8x faster at one query, measured on AVX-512).
    num_kv_heads = keys.shape[1]
    rows = queries.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)  # [batch, num_kv_heads, group*queries, head_dim]
    output, lse = op(rows, keys, values, 0.0, False, scale=scale)
    shape = queries.shape[:3]
    return Part(output.reshape(*shape, -1), lse.reshape(shape))
