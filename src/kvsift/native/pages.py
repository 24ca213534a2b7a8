"""Pages by their extremes per channel: the extremes, the scores, and the best pages (Quest, arXiv 2406.10774)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.errors import InvalidValue
from kvsift.native.loader import AVAILABLE, core, num_threads
from kvsift.native.shapes import (
    LARGEST_HEAD_DIM,
    ROW_DTYPES,
    ROW_TYPES,
    HeadRows,
    address_of,
    check_finite,
    check_queries,
    check_rows,
    check_valid,
    shape_of,
)

MAX_PAGES = 4  # whose extremes are found here; for more, torch's loops are as fast


def page_scores(queries: Tensor, rows: HeadRows, scale: float, *, threads: int | None = None) -> Tensor:
    """An upper bound of each page's scaled logits, float32 [num_query_heads, num_pages].

    queries [num_query_heads, head_dim]; rows [num_kv_heads, num_pages, 2 * head_dim], the maxima of a page, then its
    minima (kind "minmax" of kernels/page_summary.py), a tensor or ``PooledRows``.
    """
    _check(queries, rows)
    q = queries.float().contiguous()
    scores = q.new_empty(q.shape[0], rows.shape[1])
    core.page_scores(
        shape_of(q, rows), q.data_ptr(), *address_of(rows), ROW_TYPES[rows.dtype], scale,
        num_threads(threads), scores.data_ptr(),
    )  # fmt: skip
    return scores


def choose_pages(
    queries: Tensor, rows: HeadRows, scale: float, k: int, num_selections: int, *, threads: int | None = None
) -> Tensor:
    """The k pages of the largest scores for each selection, int64 [num_selections, min(k, num_pages)], ascending.

    The score of a page for a selection is the largest of the query heads that share it; ties go to the lower page.
    Shapes as in ``page_scores``; num_selections divides num_query_heads.
    """
    _check(queries, rows)
    if k < 0:
        raise InvalidValue(f"k={k} must not be negative.")
    if num_selections < 1 or queries.shape[0] % num_selections:
        raise InvalidValue(f"num_selections={num_selections} must divide the {queries.shape[0]} query heads.")
    q = queries.float().contiguous()
    chosen = torch.empty(num_selections, min(k, rows.shape[1]), dtype=torch.int64)
    if chosen.numel() == 0:
        return chosen
    core.choose_pages(
        shape_of(q, rows), q.data_ptr(), *address_of(rows), ROW_TYPES[rows.dtype], scale,
        chosen.shape[1], num_selections, num_threads(threads), chosen.data_ptr(),
    )  # fmt: skip
    return chosen


def _check(queries: Tensor, rows: HeadRows) -> None:
    check_rows("rows", rows, largest=2 * LARGEST_HEAD_DIM, multiple=16)
    check_queries(queries, rows.shape[0], rows.shape[2] // 2)
    check_finite(queries)


def takes_pages(keys: Tensor) -> bool:
    """Whether the compiled core is available and takes keys [num_kv_heads, num_pages, page_size, head_dim]."""
    few = keys.shape[1] <= MAX_PAGES and keys.is_cpu and keys.dtype in ROW_DTYPES
    return AVAILABLE and few and keys[0].is_contiguous()


def page_extremes(keys: Tensor, valid: Tensor | None) -> Tensor:
    """[num_kv_heads, num_pages, 2 * head_dim]: the largest numbers of a page's tokens, then the smallest.

    keys [num_kv_heads, num_pages, page_size, head_dim]; valid bool [num_pages, page_size], at least one token per page;
    None: all tokens are valid.
    """
    rows = keys.new_empty(*keys.shape[:2], 2 * keys.shape[3])
    if valid is not None:
        check_valid(valid, keys)
    valid = None if valid is None else valid.contiguous()
    core.page_extremes(
        keys.dtype == torch.bfloat16, keys.data_ptr(), keys.stride(0), len(keys),
        0 if valid is None else valid.data_ptr(), *keys.shape[1:], rows.data_ptr(),
    )  # fmt: skip
    return rows
