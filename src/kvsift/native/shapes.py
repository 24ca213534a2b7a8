"""What the compiled core takes, checked: it gets addresses and trusts the shapes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.native.loader import core

LARGEST_HEAD_DIM = 256
ROW_DTYPES = (torch.bfloat16, torch.float32)


def check_rows(name: str, rows: Tensor, *, largest: int = LARGEST_HEAD_DIM, multiple: int = 8) -> None:
    """Raise InputError unless rows [num_kv_heads, n, width] lie in memory as the core reads them."""
    if rows.dim() != 3 or rows.shape[0] == 0:
        raise InputError(f"{name} have shape {list(rows.shape)}; they must be [num_kv_heads, n, head_dim].")
    if rows.device.type != "cpu" or rows.dtype not in ROW_DTYPES:
        raise InputError(f"{name} are {rows.dtype} on {rows.device}; they must be bfloat16 or float32 on the CPU.")
    width = rows.shape[2]
    if width % multiple or not 0 < width <= largest:
        raise InputError(f"{name} are {width} wide; that must be a multiple of {multiple}, at most {largest}.")
    if rows.numel() and (rows.stride(2) != 1 or (rows.shape[1] > 1 and rows.stride(1) != width)):
        raise InputError(f"{name} have strides {rows.stride()}; rows must lie one behind the other: use contiguous().")


def check_queries(queries: Tensor, num_kv_heads: int, head_dim: int) -> None:
    """Raise InputError unless queries are [num_query_heads, head_dim] for these KV heads."""
    if queries.dim() != 2 or queries.shape[1] != head_dim or queries.shape[0] == 0 or queries.shape[0] % num_kv_heads:
        raise InputError(
            f"queries have shape {list(queries.shape)}; they must be [num_query_heads, {head_dim}] of one token, "
            f"num_query_heads a multiple of the {num_kv_heads} KV heads."
        )
    if queries.device.type != "cpu" or not queries.dtype.is_floating_point:
        raise InputError(f"queries are {queries.dtype} on {queries.device}; they must be floating point on the CPU.")


def check_finite(queries: Tensor) -> None:
    """Raise InputError if a query holds NaN or infinity: nothing can be ranked by it."""
    if not math.isfinite(float(queries.float().abs().sum())) and not bool(queries.isfinite().all()):
        raise InputError("queries hold NaN or infinity; no key can be ranked by them. Look at what computed them.")


def check_pair(keys: Tensor, values: Tensor) -> None:
    """Raise InputError unless there is one value for each key, of the same width and dtype."""
    check_rows("keys", keys)
    check_rows("values", values)
    if keys.shape != values.shape or keys.dtype != values.dtype:
        raise InputError(
            f"keys are {list(keys.shape)} {keys.dtype} and values {list(values.shape)} {values.dtype}; "
            "they must have the same shape and dtype."
        )


def shape_of(queries: Tensor, rows: Tensor) -> Any:
    """The core's Shape for queries [num_query_heads, _] and rows [num_kv_heads, n, width]."""
    return core().Shape(queries.shape[0], rows.shape[0], rows.shape[2], rows.shape[1])
