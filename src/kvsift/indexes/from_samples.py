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
# of a block of a prompt, which is asked from near and from far. Graphs of 16K tokens, from a query in four, found 0.95
# to 1.00 of 100 keys in the layers of the embedded model 16K tokens later; for 512 positions 0.90 to 0.99, for evenly
# spread distances up to 32,768 0.67 to 0.97 (2026-11-25)
FAR_POSITIONS = 65536


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


def distances(shares: Tensor, positions: int | None) -> Tensor:
    """Distances to which queries are rotated, int64, for shares from 0 to 1: evenly spread below ``positions``. None:
    any up to ``FAR_POSITIONS``, from each power of two to the next equally many."""
    return (shares * positions if positions is not None else float(FAR_POSITIONS) ** shares).long()


def rotated(
    samples: QuerySamples, length: int, rope: Rope | None, positions: int | None = DECODE_POSITIONS
) -> Tensor:  # fmt: skip
    """Rotate queries to ``length`` and later, to ``distances`` in order; unchanged without ``rope``.
    [num_query_heads, t, head_dim]"""
    if rope is None:
        return samples.queries
    count = len(samples.positions)
    targets = length + distances(torch.arange(count, dtype=torch.float64) / max(count, 1), positions)
    return rerotate(samples.queries, samples.positions, targets, rope)
