"""How the heads of a layer divide what they may select in all: AdaKV's rule (https://arxiv.org/abs/2407.11550).

Each head keeps its own best units, a fifth of the mean; the rest goes to the largest shares of attention of all heads
together. What a head gets is thus large where its attention is spread out.

Deviation from the paper: heads that share a selection are one head, and what was chosen is chosen anew for every query
instead of kept for good.
"""

from __future__ import annotations

import torch
from torch import Tensor

SAFEGUARD = 0.2  # of the mean, which every head may select


def head_counts(shares: Tensor, k: int) -> Tensor:
    """How many units each head selects; k in the mean. Ties go to the lower head.

    shares float32 [num_heads, count], count at least k, comparable between heads -> int64 [num_heads].
    """
    num_heads, least = shares.shape[0], int(SAFEGUARD * k)
    others = shares.sort(dim=-1, descending=True).values[:, least:].flatten()
    order = others.sort(descending=True, stable=True).indices[: num_heads * (k - least)]
    taken = torch.zeros_like(others, dtype=torch.int64).index_fill_(0, order, 1)
    return least + taken.unflatten(0, (num_heads, -1)).sum(1)
