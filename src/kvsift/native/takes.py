"""Whether the compiled core is here and takes some queries and rows."""

from __future__ import annotations

from torch import Tensor

from kvsift.native.loader import available
from kvsift.native.shapes import LARGEST_HEAD_DIM, ROW_DTYPES


def takes(queries: Tensor, rows: Tensor) -> bool:
    """queries [num_query_heads, head_dim] of one token; rows [num_kv_heads, n, width], keys or what describes pages."""
    if queries.device.type != "cpu" or rows.device.type != "cpu" or queries.dtype != rows.dtype:
        return False
    head_dim, width = queries.shape[1], rows.shape[2]
    if rows.dtype not in ROW_DTYPES or head_dim % 8 or head_dim > LARGEST_HEAD_DIM or not rows.shape[0]:
        return False
    lies_well = rows.stride(2) == 1 and (rows.shape[1] <= 1 or rows.stride(1) == width)
    return lies_well and available()
