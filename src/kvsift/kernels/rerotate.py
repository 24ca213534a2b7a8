"""Queries rotated to other positions: RoPE is a rotation, so it can be undone and repeated."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.errors import InvalidTensor
from kvsift.types import Rope


def rerotate(queries: Tensor, positions: Tensor, targets: Tensor, rope: Rope) -> Tensor:
    """Return ``queries`` as they are if their tokens are at ``targets``.

    Args:
        queries: [num_heads, t, d], after RoPE at ``positions``; or keys.
        positions, targets: int64 [t], any device.
        rope: the rotation of the model; numbers of a head beyond its rotary_dim do not change.

    Returns:
        [num_heads, t, d] in the dtype of ``queries``, computed in float32.

    Raises:
        InputError: if the numbers of positions, targets and queries differ, or a head is smaller than rotary_dim.
    """
    rotary_dim = 2 * len(rope.inv_freq)
    if positions.shape != targets.shape or positions.shape != queries.shape[1:2]:
        raise InvalidTensor(
            f"{queries.shape[1]} queries, {tuple(positions.shape)} positions and {tuple(targets.shape)} targets: give "
            "one position and one target per query."
        )
    if rotary_dim > queries.shape[2]:
        raise InvalidTensor(f"the rotary embedding rotates {rotary_dim} numbers, and heads have {queries.shape[2]}.")
    distance = (targets - positions).to(queries.device, torch.float64)
    # in float64 and within one turn: in float32 a long distance times a frequency of 1 has too few digits
    angles = distance[:, None] * rope.inv_freq.to(queries.device, torch.float64)
    angles = torch.remainder(angles, 2 * torch.pi).float()  # [t, rotary_dim / 2]
    cos, sin = angles.cos(), angles.sin()
    rotary = queries[..., :rotary_dim].float()
    pairs = rotary.unflatten(-1, (-1, 2) if rope.interleaved else (2, -1))
    first, second = pairs.unbind(-1 if rope.interleaved else -2)
    rotated = torch.stack(
        (first * cos - second * sin, second * cos + first * sin), -1 if rope.interleaved else -2
    ).flatten(-2)
    return torch.cat((rotated.to(queries.dtype), queries[..., rotary_dim:]), -1)
