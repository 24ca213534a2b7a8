"""Rows of sketches, by the compiled core."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.native.loader import available, core, num_threads
from kvsift.native.shapes import LARGEST_HEAD_DIM, ROW_DTYPES
from kvsift.native.sketch_format import SketchLayout


def takes_tokens(keys: Tensor, values: Tensor) -> bool:
    """Whether the compiled core takes keys and values [num_kv_heads, num_pages, page_size, head_dim], and is there."""
    alike = keys.shape == values.shape and keys.dtype == values.dtype and keys.dtype in ROW_DTYPES
    host = keys.device.type == "cpu" and values.device.type == "cpu" and keys.shape[3] <= LARGEST_HEAD_DIM
    return alike and host and all(tensor[0].is_contiguous() for tensor in (keys, values)) and available()


def sketch_rows(layout: SketchLayout, keys: Tensor, values: Tensor, valid: Tensor | None) -> Tensor:
    """uint8 [num_kv_heads, num_pages, width], as ``kernels.sketch.sketch_rows`` up to rounding."""
    rows = torch.empty(*keys.shape[:2], layout.width, dtype=torch.uint8)
    valid = None if valid is None else valid.contiguous()
    core().sketch_rows(
        layout.native(core()), keys.dtype == torch.bfloat16, keys.data_ptr(), keys.stride(0), values.data_ptr(),
        values.stride(0), len(keys), 0 if valid is None else valid.data_ptr(), keys.shape[1],
        num_threads(None), rows.data_ptr(),
    )  # fmt: skip
    return rows
