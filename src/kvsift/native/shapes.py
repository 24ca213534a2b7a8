"""Tensors that the compiled core reads, checked: it gets addresses and trusts the shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.errors import InvalidTensor, NotFinite
from kvsift.native.loader import AVAILABLE, core

LARGEST_HEAD_DIM = 256
ROW_DTYPES = (torch.bfloat16, torch.float32)
ROW_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # the core's RowType
SCALE_BYTES = 4  # of a coded row (``coded_rows``), behind its codes
NOT_FINITE = "queries or keys hold NaN or infinity; no key can be ranked by them. Check the layer that made them."


class PooledRows(NamedTuple):
    """Rows of one sequence in a pool of several; the compiled core reads them like a tensor [num_kv_heads, n, width].

    The runs are in the order of the rows; they may hold more than ``length``, as the last page of a sequence does.
    """

    pool: Tensor  # [num_kv_heads, num_slots, width]
    runs: Tensor  # int64 [num_runs, 2] on the CPU: first slot and number of slots
    length: int
    start: int = 0  # rows of the runs before these

    @property
    def shape(self) -> tuple[int, int, int]:
        """[num_kv_heads, length, width]."""
        return self.pool.shape[0], self.length, self.pool.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.pool.dtype

    @property
    def device(self) -> torch.device:
        return self.pool.device

    def gather(self) -> Tensor:
        """A copy in logical order, [num_kv_heads, length, width]."""
        slots = [torch.arange(first, first + count) for first, count in self.runs.tolist()]
        return self.pool[:, torch.cat(slots)[self.start : self.start + self.length]] if slots else self.pool[:, :0]


HeadRows = Tensor | PooledRows  # [num_kv_heads, length, width], anywhere on the host; int8: coded keys or values


def row_width(rows: HeadRows) -> int:
    """Numbers of a row."""
    return rows.shape[2] - (SCALE_BYTES if rows.dtype == torch.int8 else 0)


def pool_of(rows: HeadRows) -> Tensor:
    """The tensor that holds the rows."""
    return rows.pool if isinstance(rows, PooledRows) else rows


def is_row_major(rows: Tensor) -> bool:
    """Whether each row of [num_kv_heads, n, width] follows the one before it in memory."""
    return rows.stride(2) == 1 and (rows.shape[1] <= 1 or rows.stride(1) == rows.shape[2])


def supports(queries: Tensor, rows: HeadRows) -> bool:
    """Whether the compiled core is available and reads these: queries [num_query_heads, head_dim] of one token, or
    [num_query_heads, num_tokens, head_dim]; rows [num_kv_heads, n, width], keys or page summaries."""
    pool = rows.pool if isinstance(rows, PooledRows) else rows
    head_dim, dtype = queries.shape[-1], pool.dtype
    return (
        AVAILABLE
        and queries.is_cpu
        and pool.is_cpu
        and queries.dtype in ROW_DTYPES
        and dtype in (queries.dtype, torch.int8)
        and head_dim % 8 == 0
        and head_dim <= LARGEST_HEAD_DIM
        and pool.shape[0] > 0
        and is_row_major(pool)
    )


def no_tensor(name: str, given: object) -> InvalidTensor:
    """The error of what is no tensor. Callers ask ``isinstance`` themselves: steps bound their calls."""
    return InvalidTensor(f"{name}: {type(given).__name__} was given; it must be a torch.Tensor.")


def check_rows(
    name: str, rows: HeadRows, *, largest: int = LARGEST_HEAD_DIM, multiple: int = 8, coded: bool = False
) -> None:
    """Raise InputError unless the core can read rows [num_kv_heads, n, width]; ``coded``: coded ones too. ``shape_of``
    checks their runs."""
    pool = pool_of(rows)
    if not isinstance(pool, Tensor):
        raise no_tensor(name, pool)
    width, rows = row_width(rows), pool
    if rows.dim() != 3 or rows.shape[0] == 0:
        raise InvalidTensor(f"{name} have shape {list(rows.shape)}; they must be [num_kv_heads, n, head_dim].")
    if rows.device.type != "cpu" or rows.dtype not in (*ROW_DTYPES, *([torch.int8] if coded else [])):
        raise InvalidTensor(f"{name} are {rows.dtype} on {rows.device}; they must be bfloat16 or float32 on the CPU.")
    if width % multiple or not 0 < width <= largest:
        raise InvalidTensor(f"{name} are {width} wide; that must be a multiple of {multiple}, at most {largest}.")
    if rows.numel() and not is_row_major(rows):
        raise InvalidTensor(
            f"{name} have strides {rows.stride()}; each row must follow the one before: use contiguous()."
        )


def check_queries(queries: Tensor, num_kv_heads: int, head_dim: int) -> None:
    """Raise InputError unless queries are [num_query_heads, head_dim] for these KV heads."""
    if not isinstance(queries, Tensor):
        raise no_tensor("queries", queries)
    if queries.dim() != 2 or queries.shape[1] != head_dim or queries.shape[0] == 0 or queries.shape[0] % num_kv_heads:
        raise InvalidTensor(
            f"queries have shape {list(queries.shape)}; they must be [num_query_heads, {head_dim}] of one token, "
            f"num_query_heads a multiple of the {num_kv_heads} KV heads."
        )
    if queries.device.type != "cpu" or not queries.dtype.is_floating_point:
        raise InvalidTensor(f"queries are {queries.dtype} on {queries.device}; they must be floating point on the CPU.")


def check_finite(queries: Tensor) -> None:
    """Raise InputError if a query holds NaN or infinity, which rank nothing."""
    if not math.isfinite(float(queries.sum())) and not bool(queries.isfinite().all()):
        raise NotFinite(NOT_FINITE)


def check_attended(queries: Tensor, keys: HeadRows, values: HeadRows, several: bool = False) -> None:
    """Raise InputError unless the core attends these: ``check_pair``, and ``check_queries`` of the token in queries
    [num_query_heads, head_dim]; ``several``: or of each of those in [num_query_heads, num_tokens, head_dim]."""
    if not (
        isinstance(queries, Tensor)
        and _lie_alike(keys, values)
        and supports(queries, keys)
        and (queries.dim() == 2 or (several and queries.dim() == 3 and queries.shape[1] > 0))
        and queries.shape[-1] == keys.shape[2] - (SCALE_BYTES if keys.dtype == torch.int8 else 0)
        and queries.shape[0] > 0
        and queries.shape[0] % keys.shape[0] == 0
    ):  # something is wrong, or allowed and rare, such as queries of another dtype
        if not isinstance(queries, Tensor):
            raise no_tensor("queries", queries)
        check_pair(keys, values)
        token = queries[:, 0] if several and queries.dim() == 3 and queries.shape[1] else queries
        check_queries(token, keys.shape[0], row_width(keys))


def _lie_alike(keys: HeadRows, values: HeadRows) -> bool:
    """Whether values have the shape, dtype, strides and slots of keys in host memory."""
    if isinstance(keys, PooledRows) and isinstance(values, PooledRows):
        if keys.runs is not values.runs or keys[2:] != values[2:]:
            return False
        keys, values = keys.pool, values.pool
    if not (isinstance(keys, Tensor) and isinstance(values, Tensor)):
        return False
    alike = keys.shape == values.shape and keys.dtype == values.dtype and keys.stride() == values.stride()
    return alike and values.is_cpu


def check_valid(valid: Tensor, keys: Tensor) -> None:
    """Raise InputError unless valid says of each token of keys [num_heads, num_pages, page_size, head_dim] whether it
    is there."""
    if valid.shape != keys.shape[1:3] or valid.dtype != torch.bool or not valid.is_cpu:
        raise InvalidTensor(
            f"valid is {list(valid.shape)} {valid.dtype} on {valid.device}; it must be bool {list(keys.shape[1:3])} on "
            "the CPU."
        )


def check_pair(keys: HeadRows, values: HeadRows) -> None:
    """Raise InputError unless there is one value for each key, of the same width and dtype, at the same slots."""
    check_rows("keys", keys, coded=True)
    check_rows("values", values, coded=True)
    if (keys.shape, pool_of(keys).shape, keys.dtype) != (values.shape, pool_of(values).shape, values.dtype):
        keys, values = pool_of(keys), pool_of(values)
        raise InvalidTensor(
            f"keys are {list(keys.shape)} {keys.dtype} and values {list(values.shape)} {values.dtype}; "
            "they must have the same shape and dtype."
        )
    (key_runs, first_key), (value_runs, first_value) = (
        (rows.runs, rows.start) if isinstance(rows, PooledRows) else (None, 0) for rows in (keys, values)
    )
    if key_runs is not value_runs or first_key != first_value:
        raise InvalidTensor("keys and values are not at the same slots; give both the same tensor of runs, or none.")


def shape_of(queries: Tensor, rows: HeadRows) -> Any:
    """The core's Shape for queries [num_query_heads, _] and rows [num_kv_heads, n, width]; raises InputError for runs
    that are not in the pool or hold too few rows."""
    num_kv_heads, length, width = rows.shape
    width -= SCALE_BYTES if rows.dtype == torch.int8 else 0
    if not isinstance(rows, PooledRows):
        return core.Shape(queries.shape[0], num_kv_heads, width, length)
    return check_runs(rows, lambda *runs: core.Shape(queries.shape[0], num_kv_heads, width, length, *runs))


def check_runs(rows: PooledRows, make: Callable[[int, int, int, int], Any]) -> Any:
    """What the core makes of the runs (address, number, slots of the pool, first row); raises InputError for runs that
    are not in the pool or hold too few rows."""
    runs, num_slots = rows.runs, rows.pool.shape[1]
    is_list = runs.dim() == 2 and runs.shape[1] == 2 and runs.dtype == torch.int64
    if not is_list or not runs.is_cpu or not runs.is_contiguous():
        raise InvalidTensor(
            f"runs are {list(runs.shape)} {runs.dtype} on {runs.device}; they must be int64 [num_runs, 2] on the CPU, "
            "first slots and numbers of slots, contiguous."
        )
    try:
        return make(runs.data_ptr(), len(runs), num_slots, rows.start)
    except ValueError as error:
        raise InvalidTensor(f"runs of a pool of {num_slots} slots: {error}") from None


def address_of(rows: HeadRows) -> tuple[int, int]:
    """Address of the rows' pool and stride of its heads."""
    pool = rows.pool if isinstance(rows, PooledRows) else rows
    return pool.data_ptr(), pool.stride(0)
