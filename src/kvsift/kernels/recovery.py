"""Softmax mass on listed tokens: attention over the lists and over everything, of which only the denominators count.

Both launches leave those in their workspaces (``kernels.split_attention``), so that nothing as long as the context is
made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.kernels.page_attention import (
    SplitSpace,
    listed_tokens,
    masked_part,
    page_attention_triton,
    split_count,
)
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.triton_shim import runs_on_triton


class RecoverySpace(NamedTuple):
    """Workspaces of both launches."""

    listed: SplitSpace
    every: SplitSpace
    out: Tensor  # [batch, num_query_heads, head_dim], which is not read

    @classmethod
    def make(cls, kv: PagedKV, queries: Tensor, units: Tensor, unit_size: int) -> RecoverySpace:
        def new(heads: int, capacity: int | None) -> SplitSpace:
            rows, group = kv.batch * heads, queries.shape[1] // heads
            splits = split_count(kv, capacity, rows, unit_size)
            return SplitSpace.make(rows, splits, group, kv.head_dim, kv.keys.device)

        return cls(new(*units.shape[1:]), new(kv.num_kv_heads, None), queries.new_empty(queries.shape))


def recovery(
    queries: Tensor, kv: PagedKV, units: Tensor, counts: Tensor, *, scale: float, softcap: float | None,
    unit_size: int, space: RecoverySpace | None = None,
) -> Tensor:  # fmt: skip
    """Return the share of exact attention that falls on lists, float32 [batch, num_query_heads].

    Args:
        queries: [batch, num_query_heads, head_dim].
        kv: the cache.
        units, counts, scale, softcap, unit_size: as in ``page_attention``.
        space: kept between launches; made here by default.
    """
    run = recovery_triton if runs_on_triton(queries) else recovery_reference
    return run(queries, kv, units, counts, scale=scale, softcap=softcap, unit_size=unit_size, space=space)


def recovery_reference(
    queries: Tensor, kv: PagedKV, units: Tensor, counts: Tensor, *, scale: float, softcap: float | None,
    unit_size: int, space: RecoverySpace | None = None,
) -> Tensor:  # fmt: skip
    shares = []
    for row, length in enumerate(kv.lengths.tolist()):
        masks = listed_tokens(units[row], counts[row], length, unit_size), torch.ones(kv.num_kv_heads, length).bool()
        listed, every = (
            masked_part(queries[row], kv, row, mask.to(queries.device), scale, softcap).lse[0, :, 0] for mask in masks
        )
        shares.append((listed - every).exp())
    return torch.stack(shares)


def recovery_triton(
    queries: Tensor, kv: PagedKV, units: Tensor, counts: Tensor, *, scale: float, softcap: float | None,
    unit_size: int, space: RecoverySpace | None = None,
) -> Tensor:  # fmt: skip
    if space is None:
        space = RecoverySpace.make(kv, queries, units, unit_size)
    how: dict[str, Any] = {"scale": scale, "softcap": softcap, "out": space.out}
    page_attention_triton(queries, kv, units, counts, space=space.listed, unit_size=unit_size, **how)
    page_attention_triton(queries, kv, None, None, space=space.every, **how)
    group, dim = queries.shape[1] // units.shape[1], kv.head_dim
    listed = _log2_sums(space.listed, group, dim)
    every = _log2_sums(space.every, queries.shape[1] // kv.num_kv_heads, dim)
    return (listed.view(queries.shape[:2]) - every.view(queries.shape[:2])).exp2()


def _log2_sums(space: SplitSpace, group: int, dim: int) -> Tensor:
    """Logarithms to base 2 of the denominators, [rows, group]."""
    tops, sums = space.parts[:, :, group * dim : group * (dim + 2)].unflatten(2, (2, group)).unbind(2)
    top = tops.amax(1, keepdim=True)
    return top[:, 0] + ((tops - top).exp2() * sums).sum(1).log2()
