"""Values in 8 bits per number, each token's of a head with a scale of its own, so that no token spoils another's.

value[j] is about scale * code[j], with scale = max |value| / 127. A packed row is the codes of a token and behind them
the four bytes of its scale: whatever copies, forks or frees a row carries its scale along.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_CODE = 127
SCALE_BYTES = 4


def packed_width(head_dim: int) -> int:
    """Bytes of a packed row."""
    return head_dim + SCALE_BYTES


def pack_values(values: Tensor) -> Tensor:
    """[..., head_dim] -> int8 [..., head_dim + 4]."""
    values = values.float()
    scale = values.abs().amax(-1, keepdim=True) / LARGEST_CODE
    codes = (values / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    return torch.cat([codes, scale.view(torch.int8)], -1)


def unpack_values(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 [..., head_dim + 4] -> [..., head_dim] in ``dtype``."""
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (rows[..., :-SCALE_BYTES].float() * scale).to(dtype)
