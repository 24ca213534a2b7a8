"""Graphs from queries of the prompt: what is asked of them, and when there are too few."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift import native
from kvsift.indexes.samples import QuerySamples
from kvsift.kernels.rerotate import rerotate
from kvsift.native.shapes import ROW_DTYPES
from kvsift.types import Rope

LEAST_SAMPLES = 64
DECODE_POSITIONS = 512  # a graph is meant for so many tokens from now on; more would spread the samples thinner


def why_no_graph(keys: Tensor, samples: QuerySamples | None) -> str:
    """What stands against a graph over keys [num_kv_heads, n, head_dim]; empty if nothing does."""
    if not native.available():
        return f"a scan: {native.why_missing()}"
    if keys.dtype not in ROW_DTYPES:
        return f"a scan: graphs are of bfloat16 or float32 keys, and these are {keys.dtype}"
    if samples is None or len(samples.positions) < LEAST_SAMPLES:
        return f"a scan: a graph is built from {LEAST_SAMPLES} queries of the prompt or more, and there are fewer"
    return ""


def lists_for(k: int) -> int:
    """Nearest keys per sampled query that a graph is built from when k will be asked for (``GraphIndex.build``)."""
    return min(max(100, 2 * k), 1000)


def turned(samples: QuerySamples, length: int, rope: Rope | None) -> Tensor:
    """Queries as they would be at ``length`` and after, spread over the positions that a graph is meant for; as they
    stood without ``rope``. [num_query_heads, t, head_dim]"""
    if rope is None:
        return samples.queries
    count = len(samples.positions)
    targets = length + torch.arange(count) * DECODE_POSITIONS // max(count, 1)
    return rerotate(samples.queries, samples.positions, targets, rope)
