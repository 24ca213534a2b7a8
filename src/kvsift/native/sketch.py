"""Sketches (``kernels.sketch``): rows of pages; tokens by estimated weights, and an estimate of attention over the
others."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.errors import InvalidTensor, InvalidValue, NotFinite
from kvsift.native.loader import AVAILABLE, core, num_threads
from kvsift.native.shapes import (
    LARGEST_HEAD_DIM,
    NOT_FINITE,
    ROW_DTYPES,
    HeadRows,
    PooledRows,
    address_of,
    check_finite,
    check_queries,
    check_runs,
    check_valid,
    is_row_major,
    no_tensor,
)
from kvsift.native.sketch_format import LARGEST_PAGE, STRIP, SketchLayout


def sketches_fit(queries: Tensor, rows: HeadRows, layout: SketchLayout) -> bool:
    """Whether the compiled core is available and reads these: queries [num_query_heads, head_dim] of one token, rows
    uint8 [num_kv_heads, num_pages, width]."""
    pool = rows.pool if isinstance(rows, PooledRows) else rows
    if not (AVAILABLE and queries.is_cpu and pool.is_cpu and pool.shape[0]):
        return False
    return layout.is_read_by_core and is_row_major(pool)


def takes_tokens(keys: Tensor, values: Tensor) -> bool:
    """Whether the compiled core takes keys and values [num_kv_heads, num_pages, page_size, head_dim], and is there."""
    alike = keys.shape == values.shape and keys.dtype == values.dtype and keys.dtype in ROW_DTYPES
    host = keys.is_cpu and values.is_cpu and keys.shape[3] <= LARGEST_HEAD_DIM
    return AVAILABLE and alike and host and keys[0].is_contiguous() and values[0].is_contiguous()


def sketch_rows(layout: SketchLayout, keys: Tensor, values: Tensor, valid: Tensor | None) -> Tensor:
    """uint8 [num_kv_heads, num_pages, width], as ``kernels.sketch.sketch_rows`` up to rounding."""
    if not takes_tokens(keys, values) or keys.shape[2:] != (layout.page_size, layout.head_dim):
        raise InvalidTensor(
            f"keys are {list(keys.shape)} {keys.dtype} on {keys.device} and values {list(values.shape)} {values.dtype}"
            f"; both must be bfloat16 or float32 [num_kv_heads, num_pages, {layout.page_size}, {layout.head_dim}] on "
            "the CPU, the pages of a head contiguous."
        )
    if valid is not None:
        check_valid(valid, keys)
    rows = torch.empty(*keys.shape[:2], layout.width, dtype=torch.uint8)
    valid, form = None if valid is None else valid.contiguous(), core.SketchFormat(*layout.numbers)
    core.sketch_rows(
        form, keys.dtype == torch.bfloat16, keys.data_ptr(), keys.stride(0), values.data_ptr(),
        values.stride(0), len(keys), 0 if valid is None else valid.data_ptr(), keys.shape[1],
        num_threads(None), rows.data_ptr(),
    )  # fmt: skip
    return rows


def choose_sketched(
    queries: Tensor, rows: HeadRows, layout: SketchLayout, scale: float, first: int, count: int, k: int,
    num_selections: int, past_lse: Tensor, *, threads: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The k candidates with the most votes, as ``kernels.sketch.votes``, and attention over the others, both estimated.

    Args:
        queries: [num_query_heads, head_dim] of one token.
        rows: uint8 [num_kv_heads, num_pages, layout.width] of the pages of the candidates, a tensor or ``PooledRows``.
        layout: layout of a row; the page size is a multiple of 16, at most 1024, and head_dim at most 256.
        scale: logit = scale * q.k.
        first: tokens of the first page before the first candidate.
        count: candidates, which end in the last page.
        k: candidates of each selection.
        num_selections: num_kv_heads or num_query_heads; the query heads of a selection add their votes.
        past_lse: float32 [num_query_heads], log-sum-exp of the exact logits of what is visible anyway. A head's vote is
            weight / exp(past_lse); -inf, where nothing is visible: the weight. Where votes are too large for float32,
            all those of the head are divided by the same number.
        threads: torch's number by default; the result does not depend on it.

    Returns:
        ids: int64 [num_selections, min(k, count)], candidates from 0 on, ascending; ties go to the lower id.
        output: float32 [num_query_heads, head_dim], attention over what is not chosen, by pages and their mean values;
            0 if there is nothing.
        lse: float32 [num_query_heads], its log-sum-exp; -inf if there is nothing.
    """
    _check(queries, rows, layout, first, count, k, num_selections)
    _check_past(past_lse, len(queries))
    q, past = queries.float().contiguous(), past_lse.contiguous()
    ids = torch.empty(num_selections, min(k, count), dtype=torch.int64)
    output, lse = torch.empty_like(q), q.new_empty(q.shape[0])
    core.choose_sketched(
        _sketches(rows, layout), q.data_ptr(), q.shape[0], scale, *address_of(rows), first, count, ids.shape[1],
        num_selections, past.data_ptr(), num_threads(threads), ids.data_ptr(), output.data_ptr(), lse.data_ptr(),
    )  # fmt: skip
    return ids, output, lse


def _sketches(rows: HeadRows, layout: SketchLayout) -> object:
    """The core's form of layout and slots."""
    form = core.SketchFormat(*layout.numbers)
    if isinstance(rows, PooledRows):
        return check_runs(rows, lambda *runs: core.Sketches(form, *rows.shape[:2], *runs))
    return core.Sketches(form, *rows.shape[:2])


def _check(
    queries: Tensor, rows: HeadRows, layout: SketchLayout, first: int, count: int, k: int, num_selections: int
) -> None:
    pool = rows.pool if isinstance(rows, PooledRows) else rows
    if not isinstance(pool, Tensor):
        raise no_tensor("rows", pool)
    if not layout.is_read_by_core:
        raise InvalidValue(
            f"{layout} cannot be read by the compiled core: bits must be 1 or 2, page_size a multiple of {STRIP} up to "
            f"{LARGEST_PAGE}, head_dim at most {LARGEST_HEAD_DIM}. Estimate in torch: kernels/sketch.py."
        )
    if pool.dim() != 3 or pool.shape[0] == 0 or pool.shape[2] != layout.width:
        raise InvalidTensor(
            f"rows have shape {list(pool.shape)}; they must be [num_kv_heads, num_pages, {layout.width}]."
        )
    if pool.device.type != "cpu" or pool.dtype != torch.uint8 or (pool.numel() and not is_row_major(pool)):
        raise InvalidTensor(
            f"rows are {pool.dtype} on {pool.device}, strides {pool.stride()}; they must be uint8 on the CPU, each row "
            "right after the one before."
        )
    check_queries(queries, rows.shape[0], layout.head_dim)
    check_finite(queries)
    if not 0 <= first < layout.page_size or count < 1 or -(-(first + count) // layout.page_size) != rows.shape[1]:
        raise InvalidValue(
            f"candidates {first} to {first + count - 1} are not in {rows.shape[1]} pages of {layout.page_size} tokens: "
            "they must begin in the first page and end in the last."
        )
    if k < 0:
        raise InvalidValue(f"k={k} must not be negative.")
    if num_selections not in (rows.shape[0], queries.shape[0]):
        raise InvalidValue(
            f"num_selections={num_selections} must be {rows.shape[0]}, one per KV head, or {len(queries)}, one per "
            "query head."
        )


def _check_past(past_lse: Tensor, num_query_heads: int) -> None:
    if not isinstance(past_lse, Tensor):
        raise no_tensor("past_lse", past_lse)
    if past_lse.shape != (num_query_heads,) or past_lse.dtype != torch.float32 or not past_lse.is_cpu:
        raise InvalidTensor(
            f"past_lse is {list(past_lse.shape)} {past_lse.dtype} on {past_lse.device}; it must be float32 "
            f"[{num_query_heads}] on the CPU."
        )
    if bool(past_lse.isnan().any()):
        raise NotFinite(NOT_FINITE)
