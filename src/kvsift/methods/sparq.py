"""SparQ in prefill: tokens by logits over the channels that the chunk's queries use most (https://arxiv.org/abs/2312.04985).

The channels of a KV head are those with the largest |q|, summed over queries and heads of the group; a head whose
kept channels hold a share f of its |q| has a softmax as sharp as sqrt(f) says: logit = scale * q.k / sqrt(f).

Deviation from the paper: a single query's criterion applied to a chunk, as in QuoKA's tables. The paper's decode, which
also puts the mean value in place of what was left out, is not here: it needs a running mean of the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvsift.methods import knobs
from kvsift.methods.base import Phase, top_units
from kvsift.methods.shares import ShareMethod
from kvsift.types import KVReader, LayerShape


@dataclass(frozen=True)
class SparQ(ShareMethod):
    """Tokens by their share of attention over a few channels.

    Attributes:
        channels: kept of each KV head (r of the paper).
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill",)
    source: ClassVar[str] = "arXiv 2312.04985"

    channels: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        knobs.whole("channels", self.channels, 1)

    def stand_ins(self, state: Any, shape: LayerShape, queries: Tensor, start: int, reader: KVReader) -> Tensor:
        size = queries.float().abs().unflatten(0, (shape.num_kv_heads, -1))  # [kv heads, group, queries, head_dim]
        chosen = top_units(size.sum((1, 2)), self.channels)
        mask = torch.zeros_like(size[:, 0, 0]).scatter_(1, chosen, 1.0)[:, None, None]
        share = (size * mask).sum(-1, keepdim=True) / size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)
        kept = queries.float().unflatten(0, (shape.num_kv_heads, -1)) * mask
        return (kept / share.clamp_min(1e-6).sqrt()).flatten(0, 1)
