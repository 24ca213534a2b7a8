"""The cache as decode kernels read it: pools of pages, a table that orders them, and lengths on the device.

It need not be kvsift's: a cache in blocks [num_blocks, block_size, num_kv_heads, head_dim], as vLLM keeps it, is
``pool.permute(2, 0, 1, 3)``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SpaceShape = tuple[tuple[int, ...], torch.dtype]


class PagedKV(NamedTuple):
    """Keys and values of one layer for a batch of sequences."""

    keys: Tensor  # [num_kv_heads, num_pages, page_size, head_dim]; any strides, the last one 1
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

    def read_in_launches_of(self, dtype: torch.dtype) -> bool:
        """Whether single launches read this cache for queries of a dtype."""
        return self.keys.dtype in (dtype, torch.float8_e4m3fn)

    def row(self, row: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one sequence in logical order, [num_kv_heads, length, head_dim]; for references."""
        length = int(self.lengths[row])
        pages = self.table[row, : -(-length // self.page_size)].long()
        keys, values = (pool[:, pages].flatten(1, 2)[:, :length] for pool in (self.keys, self.values))
        return keys, values


def new_space(shapes: tuple[SpaceShape, ...], device: torch.device) -> list[Tensor]:
    """Return tensors of these shapes. Flags must be zero, and the whole is small, so all are."""
    return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes]
