"""Queries of a prompt, as indexes are built from them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class QuerySamples(NamedTuple):
    """Queries of a prompt, of one layer."""

    queries: Tensor  # [num_query_heads, t, d], after RoPE
    positions: Tensor  # int64 [t], ascending
