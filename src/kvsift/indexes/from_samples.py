"""Graphs that are built from queries of the prompt: the lists of nearest keys, parameters, and reasons against."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift import native
from kvsift.errors import InvalidTensor
from kvsift.indexes.knn import knn
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
GOLDEN = 0.6180339887498949  # any number of its multiples, modulo 1, is evenly spread


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


def sample_lists(
    keys: Tensor, samples: QuerySamples, per_head: int, k: int, *, rope: Rope | None = None,
    decode_positions: int | None = DECODE_POSITIONS, first_position: int = 0, window: int = 512,
) -> Tensor:  # fmt: skip
    """Find the k keys with the largest inner products for some of the sampled queries.

    With ``rope`` the queries are rotated to ``decode_positions`` positions after the end of the prompt, evenly spread
    because one position would fit no other, and all keys are searched. Without it they are unchanged, and the keys
    before the window of each query are searched.

    Args:
        keys: [num_kv_heads, n, d] of consecutive positions, on any device.
        samples: queries of num_query_heads heads; if they are on a GPU, keys are copied there one head at a time.
        per_head: queries to use per query head, evenly spread, different ones for each head of a group. All if there
            are fewer.
        k: ids per query.
        rope: rotary embedding of the model, if known.
        decode_positions: expected number of generated tokens; None: the distance of later queries is not known.
        first_position: position of the first key.
        window: most recent positions that queries see without the index.

    Returns:
        int32 [num_query_heads, min(per_head, t), k], best first, -1 at the end.

    Raises:
        InputError: without samples.
    """
    num_query_heads, t, _ = samples.queries.shape
    if not t or samples.positions.shape != (t,):
        raise InvalidTensor(
            f"{t} sampled queries with {tuple(samples.positions.shape)} positions: give at least one each."
        )
    count, device = min(per_head, t), samples.queries.device if samples.queries.is_cuda else keys.device
    steps = torch.arange(count)
    group_size = max(1, num_query_heads // keys.shape[0])
    stop = max(first_position + keys.shape[1], int(samples.positions[-1]) + 1)
    lists = torch.empty(num_query_heads, count, k, dtype=torch.int32, device=keys.device)
    kv_head = -1  # whose keys were copied last
    for head in range(num_query_heads):
        chosen = (steps * group_size + head % group_size) * t // (count * group_size)
        queries = samples.queries[head : head + 1, chosen.to(samples.queries.device)].to(device)
        positions = samples.positions.cpu()[chosen]
        if head // group_size != kv_head:
            kv_head = head // group_size
            head_keys = keys[kv_head : kv_head + 1].to(device)
        causal_stop = None
        if rope is None:
            causal_stop = (positions + 1 - window - first_position).clamp(min=0)
        else:
            shares = (steps * GOLDEN + head / num_query_heads).frac()
            queries = rerotate(queries, positions, stop + distances(shares, decode_positions), rope)
        lists[head] = knn(queries, head_keys, k, causal_stop)[0]
    return lists
