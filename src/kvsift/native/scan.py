"""Exact search that scores every key once for all queries of a group."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvsift.errors import InvalidTensor, InvalidValue
from kvsift.native.codes import Codes
from kvsift.native.loader import core, num_threads
from kvsift.native.shapes import (
    ROW_TYPES,
    HeadRows,
    address_of,
    check_finite,
    check_queries,
    check_rows,
    row_width,
    shape_of,
)


def scan(queries: Tensor, keys: HeadRows, k: int, *, threads: int | None = None) -> tuple[Tensor, Tensor]:
    """The k keys of the largest q.k of each query head -> (ids int64, scores float32), both [num_query_heads, k].

    queries [num_query_heads, head_dim]; keys [num_kv_heads, n, head_dim], a tensor or ``PooledRows``. Best first, ties
    to the lower id; if n < k the last places hold id -1 and score -inf. Scores are not scaled. The score of a key that
    holds NaN is -inf.
    """
    q, ids, scores = _prepared(queries, keys, k)
    if k > 0:
        core.scan(
            shape_of(q, keys), q.data_ptr(), *address_of(keys), ROW_TYPES[keys.dtype], k,
            num_threads(threads), ids.data_ptr(), scores.data_ptr(),
        )  # fmt: skip
    return ids, scores


def all_scores(queries: Tensor, keys: HeadRows, *, threads: int | None = None) -> Tensor:
    """The scores q.k of all keys, float32 [num_query_heads, n]; arguments as for ``scan``, of any numbers."""
    check_rows("keys", keys, coded=True)
    check_queries(queries, keys.shape[0], row_width(keys))
    q = queries.float().contiguous()
    scores = q.new_empty(q.shape[0], keys.shape[1])
    core.all_scores(
        shape_of(q, keys), q.data_ptr(), *address_of(keys), ROW_TYPES[keys.dtype], num_threads(threads),
        scores.data_ptr(),
    )  # fmt: skip
    return scores


def scan_codes(
    queries: Tensor, codes: Codes, keys: HeadRows, k: int, overfetch: float = 1.5, *, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Search as ``scan``, but score only the best ``overfetch`` * k keys by their 8-bit codes.

    Scores are exact; a key whose code ranks below the candidates is missed. codes hold all the keys.
    """
    q, ids, scores = _prepared(queries, keys, k)
    if codes.length != keys.shape[1] or codes.scale.shape != (keys.shape[0], keys.shape[2]):
        raise InvalidTensor(
            f"codes hold {codes.length} keys of {list(codes.scale.shape)} channels, keys are {list(keys.shape)}; "
            "call codes.extend(keys) after keys were added, codes.crop(length) after they were removed."
        )
    if not overfetch >= 1:
        raise InvalidValue(f"overfetch={overfetch} must be at least 1.")
    if k > 0:
        core.scan_codes(
            shape_of(q, keys), q.data_ptr(), *address_of(keys), ROW_TYPES[keys.dtype],
            codes.blocks.data_ptr(), codes.blocks.stride(0), codes.scale.data_ptr(), k, math.ceil(overfetch * k),
            num_threads(threads), ids.data_ptr(), scores.data_ptr(),
        )  # fmt: skip
    return ids, scores


def _prepared(queries: Tensor, keys: HeadRows, k: int) -> tuple[Tensor, Tensor, Tensor]:
    check_rows("keys", keys)
    check_queries(queries, keys.shape[0], keys.shape[2])
    check_finite(queries)
    if k < 0:
        raise InvalidValue(f"k={k} must not be negative.")
    q = queries.float().contiguous()
    return q, torch.empty(q.shape[0], k, dtype=torch.int64), q.new_empty(q.shape[0], k)
