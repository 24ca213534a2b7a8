"""Budgets of the heads of a layer by AdaKV's rule (https://arxiv.org/abs/2407.11550).

Each head keeps its own best units, a fifth of the mean; the rest goes to the largest shares of attention of all heads
together. A head with dispersed attention gets a large budget.

Deviations from the paper: heads that share a selection are one head; a head's fifth is set aside before the others are
compared, where the paper mixes its part of all units with the mean; and every query selects anew. The choice is final
for methods that drop tokens (``methods.common.dropping``), as in the paper.
"""

from __future__ import annotations

import torch
from torch import Tensor

SAFEGUARD = 0.2  # share of the mean that every head keeps


def head_counts(shares: Tensor, k: int, own: int = 0) -> Tensor:
    """Return how many units each head selects; k in the mean, or all if there are fewer. Ties go to the lower head.

    Args:
        shares: float32 [num_heads, count], comparable between heads; -inf where a head has no unit.
        k: units per head if all heads selected equally many.
        own: units that each head keeps of its best before shares are compared; the fifth is of the others.

    Returns:
        int64 [num_heads].
    """
    num_heads, own = shares.shape[0], min(own, k)
    ordered = shares.sort(dim=-1, descending=True).values
    exists = ordered > -torch.inf
    ordered[:, : own + int(SAFEGUARD * (k - own))] = torch.inf
    order = ordered.masked_fill(~exists, -torch.inf).flatten().sort(descending=True, stable=True).indices
    taken = torch.zeros_like(order).index_fill_(0, order[: num_heads * k], 1)
    return (taken.unflatten(0, (num_heads, -1)) * exists).sum(1)
