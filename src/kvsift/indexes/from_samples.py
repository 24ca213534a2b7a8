"""Parameters of graphs that are built from queries of the prompt, and reasons against such a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift import native
from kvsift.indexes.samples import QuerySamples
from kvsift.kernels.rerotate import rerotate
from kvsift.native.shapes import ROW_DTYPES
from kvsift.types import Rope

LEAST_SAMPLES = 64
DECODE_POSITIONS = 512  # next tokens for which a graph is built; more would spread the samples thinner


def why_no_graph(keys: Tensor, samples: QuerySamples | None) -> str:
    """Return the reason against a graph over keys [num_kv_heads, n, head_dim]; empty if there is none."""
    if not native.available():
        return f"a scan: {native.why_missing()}"
    if keys.dtype not in ROW_DTYPES:
        return f"a scan: graphs are of bfloat16 or float32 keys, and these are {keys.dtype}"
    if samples is None or len(samples.positions) < LEAST_SAMPLES:
        return f"a scan: a graph is built from {LEAST_SAMPLES} queries of the prompt or more, and there are fewer"
    return ""


def lists_for(k: int) -> int:
    """Return how many nearest keys per sampled query a graph for searches of k keys is built from."""
    return min(max(100, 2 * k), 1000)


def rotated(samples: QuerySamples, length: int, rope: Rope | None) -> Tensor:
    """Rotate queries to ``length`` and later, spread over the positions that a graph is built for; unchanged without
    ``rope``. [num_query_heads, t, head_dim]"""
    if rope is None:
        return samples.queries
    count = len(samples.positions)
    targets = length + torch.arange(count) * DECODE_POSITIONS // max(count, 1)
    return rerotate(samples.queries, samples.positions, targets, rope)
