"""The cache as decode kernels read it: pools of pages, a table that orders them, and lengths on the device.

It need not be kvsift's: a cache in blocks [num_blocks, block_size, num_kv_heads, head_dim], as vLLM keeps it, is
``pool.permute(2, 0, 1, 3)``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvsift.kernels.coded_pages import read_pages
from kvsift.native.shapes import SCALE_BYTES

SpaceShape = tuple[tuple[int, ...], torch.dtype]


class PagedKV(NamedTuple):
    """Keys and values of one layer for a batch of sequences."""

    # any strides, the last one 1; in int8, codes with their scales behind each page (``kernels.coded_pages``)
    keys: Tensor  # [num_kv_heads, num_pages, page_size, head_dim]
    values: Tensor  # the same
    table: Tensor  # int32 [batch, max_pages], physical page of each logical page
    lengths: Tensor  # int32 [batch], tokens cached; the last one is the query's own

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[0]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]

    @property
    def batch(self) -> int:
        return self.table.shape[0]

    @property
    def coded(self) -> bool:
        """Whether keys and values are in 8 bits with scales."""
        return self.keys.dtype == torch.int8

    @property
    def vector_bytes(self) -> int:
        """Bytes of a key or value."""
        return self.head_dim * self.keys.element_size() + (SCALE_BYTES if self.coded else 0)

    def read_in_launches_of(self, dtype: torch.dtype) -> bool:
        """Whether single launches read this cache for queries of a dtype."""
        return self.keys.dtype in (dtype, torch.float8_e4m3fn, torch.int8)

    def row(self, row: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one sequence in logical order, [num_kv_heads, length, head_dim]; for references."""
        length = int(self.lengths[row])
        pages = self.table[row, : -(-length // self.page_size)].long()
        keys, values = read_pages(self.keys, pages, turned=True), read_pages(self.values, pages)
        return keys.flatten(1, 2)[:, :length], values.flatten(1, 2)[:, :length]


def new_space(shapes: tuple[SpaceShape, ...], device: torch.device) -> list[Tensor]:
    """Return tensors of these shapes. Flags must be zero, and the whole is small, so all are."""
    return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes]
