"""Exact nearest keys of many queries: products in blocks, then the best of each row, by the core if available."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift import native
from kvsift.errors import InvalidTensor

BLOCK_BYTES = 32 << 20  # of scores at a time, which fit the last-level cache of the processors measured
DEVICE_BLOCK_BYTES = 256 << 20  # on a GPU, which is faster with larger blocks
STRIP = 64  # neighbouring keys that are ranked by their best key


def knn(queries: Tensor, keys: Tensor, k: int, causal_stop: Tensor | None = None) -> Tensor:
    """Return the ids of the keys with the largest inner products.

    Products have the precision of ``keys``: bf16 keys give scores rounded to bf16. Equal scores are ordered by id.

    Args:
        queries: [num_query_heads, t, d]; query head h reads KV head h // group_size.
        keys: [num_kv_heads, n, d], same device as the queries.
        k: ids per query.
        causal_stop: int64 [t]: query i sees ids below causal_stop[i]; all of them by default.

    Returns:
        int32 [num_query_heads, t, k], best first, -1 at the end where a query sees fewer than k keys.

    Raises:
        InputError: if the heads do not divide, the head sizes differ, or k < 1.
    """
    num_query_heads, t, d = queries.shape
    num_kv_heads, n, key_dim = keys.shape
    if d != key_dim or not num_kv_heads or num_query_heads % num_kv_heads or k < 1:
        raise InvalidTensor(
            f"queries {tuple(queries.shape)}, keys {tuple(keys.shape)}, k = {k}: heads must have one size, query heads "
            "must be a multiple of KV heads, and k at least 1."
        )
    ids = torch.full((num_query_heads, t, k), -1, dtype=torch.int32, device=keys.device)
    if not n:
        return ids
    rows = max(1, (DEVICE_BLOCK_BYTES if keys.is_cuda else BLOCK_BYTES) // (n * keys.element_size()))
    for head in range(num_query_heads):
        transposed = keys[head * num_kv_heads // num_query_heads].T
        for start in range(0, t, rows):
            block = slice(start, min(start + rows, t))
            scores = queries[head, block].to(keys.dtype) @ transposed
            stops = None if causal_stop is None else causal_stop[block].to(keys.device)
            best = _top(scores, min(k, n), stops)
            ids[head, block, : best.shape[1]] = best
    return ids


def _top(scores: Tensor, k: int, stops: Tensor | None) -> Tensor:
    """int32 [rows, k] of scores [rows, n], -1 where the score is -inf; row i ends at stops[i]."""
    if scores.device.type != "cpu" or scores.dtype not in (torch.bfloat16, torch.float32) or not native.available():
        if stops is not None:
            scores.masked_fill_(torch.arange(scores.shape[1], device=scores.device) >= stops[:, None], -torch.inf)
        return _top_by_torch(scores, k)
    best = torch.empty(scores.shape[0], k, dtype=torch.int32)
    stops = None if stops is None else stops.to(torch.int64).contiguous()
    native.core.top_rows(
        scores.data_ptr(), scores.dtype == torch.bfloat16, *scores.shape, 0 if stops is None else stops.data_ptr(), k,
        native.num_threads(None), best.data_ptr(),
    )  # fmt: skip
    return best


def _top_by_torch(scores: Tensor, k: int) -> Tensor:
    """As ``_top`` for whole rows, in two steps: the k best keys are in the k best strips."""
    rows, n = scores.shape
    if n > 4 * k * STRIP:
        num_strips = n // STRIP
        strips = _top_ordered(scores[:, : num_strips * STRIP].view(rows, num_strips, STRIP).amax(2), k)[1]
        ids = (strips[:, :, None] * STRIP + torch.arange(STRIP, device=scores.device)).flatten(1)
        rest = torch.arange(num_strips * STRIP, n, device=scores.device).expand(rows, -1)
        ids = torch.cat((ids, rest), 1).sort(1).values
        values, order = _top_ordered(scores.gather(1, ids), k)
        best = ids.gather(1, order)
    else:
        values, best = _top_ordered(scores, k)
    return best.masked_fill(values == -torch.inf, -1).int()


def _top_ordered(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values [rows, k] and columns of the k largest, largest first, ties to the lower column."""
    # one integer holds both: the bits of a float, made to order as integers do, above the column counted from the end
    bits = (scores.float() + 0.0).view(torch.int32).long()  # + 0.0: -0.0 equals 0.0
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    n = scores.shape[1]
    order = (bits << 32) | (n - 1 - torch.arange(n, device=scores.device))
    best = order.topk(k, 1).values
    columns = n - 1 - (best & 0xFFFFFFFF)
    return scores.gather(1, columns), columns
