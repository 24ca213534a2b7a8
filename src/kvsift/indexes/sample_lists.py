"""Which keys sampled prefill queries want: what query-aware indexes are built from."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.indexes.knn import knn
from kvsift.indexes.samples import QuerySamples
from kvsift.kernels.rerotate import rerotate
from kvsift.types import Rope

GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly however many there are


def sample_lists(
    keys: Tensor, samples: QuerySamples, per_head: int, k: int, *, rope: Rope | None = None,
    decode_positions: int = 512, first_position: int = 0, window: int = 512,
) -> Tensor:  # fmt: skip
    """The k keys with the largest inner products for some of the sampled queries.

    With ``rope`` the queries are turned to where decoding will ask from, and look at all keys: spread over
    ``decode_positions`` positions from the end of the prompt on. All at one position would serve that position only.
    Without it they stay where they are and look at the keys before their own window, as decode queries do.

    Args:
        keys: [num_kv_heads, n, d] of consecutive positions, on any device.
        samples: queries of num_query_heads heads; where they are on a GPU, keys are brought there a head at a time.
        per_head: queries to use per query head, evenly spread; each head of a group takes others. All if there are
            fewer.
        k: ids per query.
        rope: the model's rotary embedding, if known.
        decode_positions: expected number of generated tokens.
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
    found = torch.empty(num_query_heads, count, k, dtype=torch.int32, device=keys.device)
    there = -1  # the KV head that was brought last
    for head in range(num_query_heads):
        chosen = (steps * group_size + head % group_size) * t // (count * group_size)
        queries = samples.queries[head : head + 1, chosen.to(samples.queries.device)].to(device)
        positions = samples.positions.cpu()[chosen]
        if head // group_size != there:
            there = head // group_size
            of_head = keys[there : there + 1].to(device)
        causal_stop = None
        if rope is None:
            causal_stop = (positions + 1 - window - first_position).clamp(min=0)
        else:
            spread = (steps * GOLDEN + head / num_query_heads).frac() * decode_positions
            queries = rerotate(queries, positions, stop + spread.long(), rope)
        found[head] = knn(queries, of_head, k, causal_stop)[0]
    return found
