"""Extremes of pages per channel, by the compiled core."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.native.loader import AVAILABLE, core
from kvsift.native.shapes import ROW_DTYPES

MAX_PAGES = 4  # for more, torch's loops are as fast


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
    valid = None if valid is None else valid.contiguous()
    core.page_extremes(
        keys.dtype == torch.bfloat16, keys.data_ptr(), keys.stride(0), len(keys),
        0 if valid is None else valid.data_ptr(), *keys.shape[1:], rows.data_ptr(),
    )  # fmt: skip
    return rows
