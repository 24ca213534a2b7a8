"""Nearest keys of sampled prefill queries, from which query-aware indexes are built."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.indexes.from_samples import distances
from kvsift.indexes.knn import knn
from kvsift.indexes.samples import QuerySamples
from kvsift.kernels.rerotate import rerotate
from kvsift.types import Rope

GOLDEN = 0.6180339887498949  # any number of its multiples, modulo 1, is evenly spread


def sample_lists(
    keys: Tensor, samples: QuerySamples, per_head: int, k: int, *, rope: Rope | None = None,
    decode_positions: int | None = 512, first_position: int = 0, window: int = 512,
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
        raise InputError(
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
