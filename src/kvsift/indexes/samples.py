"""Sampled queries of a prompt, from which indexes are built."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class QuerySamples(NamedTuple):
    """Sampled queries of a prompt in one layer."""

    queries: Tensor  # [num_query_heads, t, d], after RoPE
    positions: Tensor  # int64 [t], ascending
