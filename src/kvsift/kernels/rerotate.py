"""Queries turned to other positions: RoPE is a rotation, so it can be undone and done again."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.types import Rope


def rerotate(queries: Tensor, positions: Tensor, targets: Tensor, rope: Rope) -> Tensor:
    """What ``queries`` would be, had their tokens stood at ``targets``.

    Args:
        queries: [num_heads, t, d], after RoPE at ``positions``; keys may be turned as well.
        positions, targets: int64 [t], any device.
        rope: how the model rotates; numbers of a head beyond its rotary_dim stay as they are.

    Returns:
        [num_heads, t, d] in the dtype of ``queries``, computed in float32.

    Raises:
        InputError: if the numbers of positions, targets and queries differ, or a head is smaller than rotary_dim.
    """
    rotary_dim = 2 * len(rope.inv_freq)
    if positions.shape != targets.shape or positions.shape != queries.shape[1:2]:
        raise InputError(
            f"{queries.shape[1]} queries, {tuple(positions.shape)} positions and {tuple(targets.shape)} targets: give "
            "one position and one target per query."
        )
    if rotary_dim > queries.shape[2]:
        raise InputError(f"the rotary embedding turns {rotary_dim} numbers, and heads here have {queries.shape[2]}.")
    distance = (targets - positions).to(queries.device, torch.float64)
    # in float64 and within one turn: the distance times a frequency of 1 has no digits to spare in float32
    angles = distance[:, None] * rope.inv_freq.to(queries.device, torch.float64)
    angles = torch.remainder(angles, 2 * torch.pi).float()  # [t, rotary_dim / 2]
    cos, sin = angles.cos(), angles.sin()
    turning = queries[..., :rotary_dim].float()
    pairs = turning.unflatten(-1, (-1, 2) if rope.interleaved else (2, -1))
    first, second = pairs.unbind(-1 if rope.interleaved else -2)
    turned = torch.stack(
        (first * cos - second * sin, second * cos + first * sin), -1 if rope.interleaved else -2
    ).flatten(-2)
    return torch.cat((turned.to(queries.dtype), queries[..., rotary_dim:]), -1)
