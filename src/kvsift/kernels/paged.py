"""The cache as decode kernels read it: pools of pages, a table that orders them, and lengths on the device.

It need not be kvsift's: a cache in blocks [num_blocks, block_size, num_kv_heads, head_dim], as vLLM keeps it, is
``pool.permute(2, 0, 1, 3)``.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.kernels.coded_pages import read_pages
from kvsift.native.shapes import SCALE_BYTES


class SpaceShape(NamedTuple):
    """A tensor of a launch's workspace."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    lasts: bool = True  # whether launches read what those before have left, so that only launches alike may share it


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
    """Return tensors of these shapes. What lasts is zero at first, and the whole is small, so all is."""
    return [torch.zeros(each.shape, dtype=each.dtype, device=device) for each in shapes]


def shared_spaces(by_size: dict[int, tuple[SpaceShape, ...]], device: torch.device) -> dict[int, list[Tensor]]:
    """Return tensors for launches of several sizes, of which one runs at a time: they share memory, the largest taking
    all of it. What lasts is shared only by those whose rows lie alike."""
    wholes: dict[tuple[Any, ...], SpaceShape] = {}
    keys: dict[int, list[tuple[Any, ...]]] = {}
    for size, shapes in by_size.items():
        rows_alike = tuple(each.shape[1:] for each in shapes if each.lasts)
        keys[size] = [(place, rows_alike if each.lasts else None) for place, each in enumerate(shapes)]
        for key, each in zip(keys[size], shapes):
            if key not in wholes or prod(each.shape) > prod(wholes[key].shape):
                wholes[key] = each
    memory = dict(zip(wholes, new_space(tuple(wholes.values()), device)))
    return {
        size: [memory[key].flatten()[: prod(each.shape)].view(each.shape) for key, each in zip(keys[size], shapes)]
        for size, shapes in by_size.items()
    }
