"""How the heads of a layer divide what they may select in all: AdaKV's rule (https://arxiv.org/abs/2407.11550).

Each head keeps its own best units, a fifth of the mean; the rest goes to the largest shares of attention of all heads
together. What a head gets is thus large where its attention is spread out.

Deviations from the paper: heads that share a selection are one head; a head's fifth is set aside before the others are
compared, where the paper mixes what it wins among all with the mean; and what is chosen is chosen anew for every query.
Methods that drop (``methods.dropping``) keep it for good, as the paper does.
"""

from __future__ import annotations

import torch
from torch import Tensor

SAFEGUARD = 0.2  # of the mean, which every head may select


def head_counts(shares: Tensor, k: int, own: int = 0) -> Tensor:
    """How many units each head selects; k in the mean, or all if there are fewer. Ties go to the lower head.

    Args:
        shares: float32 [num_heads, count], comparable between heads; -inf where a head has no unit.
        k: units that a head would select if all selected alike.
        own: so many of those are each head's best, whatever the others have; only beyond them are shares compared, and
            only of the others is a fifth safe.

    Returns:
        int64 [num_heads].
    """
    num_heads, own = shares.shape[0], min(own, k)
    ordered = shares.sort(dim=-1, descending=True).values
    there = ordered > -torch.inf
    ordered[:, : own + int(SAFEGUARD * (k - own))] = torch.inf
    order = ordered.masked_fill(~there, -torch.inf).flatten().sort(descending=True, stable=True).indices
    taken = torch.zeros_like(order).index_fill_(0, order[: num_heads * k], 1)
    return (taken.unflatten(0, (num_heads, -1)) * there).sum(1)
