"""LessIsMore: one set of tokens for all heads, chosen in one layer and reused above (https://arxiv.org/abs/2508.07101).

The first sparse layer and a correction layer see everything. They rank all tokens exactly, head by head, and merge the
rankings: everyone's first choice, then everyone's second, until the budget is full, but for a fraction of it that goes
to the most recent tokens. The layers above attend that set.

Deviation from the paper: recent tokens are the budget's window and, where a fraction of the budget is more, those next
to it. In prefill a chunk chooses by the mean share of its queries. ``full_choice=false`` lets layers that choose attend
what they chose.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from kvsift.methods import knobs
from kvsift.methods.base import Phase
from kvsift.methods.chunked import ChunkedMethod, seen_by_all
from kvsift.methods.shares import mean_shares
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection


@dataclass(frozen=True)
class LessIsMore(ChunkedMethod):
    """The tokens that all heads together rank highest, for all layers up to the correction and for all above.

    Attributes:
        correction: true index of the layer that chooses anew; the paper's lie between 9 and 20.
        recent_fraction: of the budget, sinks left out, for the most recent tokens.
        full_choice: layers that choose see everything.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    source: ClassVar[str] = "arXiv 2508.07101"

    correction: int = 12
    recent_fraction: float = 0.25
    full_choice: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        knobs.whole("correction", self.correction, 0)
        knobs.share("recent_fraction", self.recent_fraction)
        knobs.flag("full_choice", self.full_choice)

    def select(
        self, state: object, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        ranked = None if shape.layer == self.correction else reader.from_below()
        if ranked is not None:  # a layer may have fewer than the one that chose
            return Selection(ranked[:, : limit.units].sort(-1).values.to(queries.device), 1, full=True)
        keys = reader.keys(0, seen_by_all(start, queries.shape[1]))
        shares = mean_shares(shape, queries, keys)[:, candidates.tokens]
        recent = self._recent(start, candidates, limit)
        ranked = self.ranking(shape, shares[:, : candidates.count - recent], limit.units - recent)
        newest = torch.arange(candidates.count - recent, candidates.count, device=ranked.device)
        ranked = torch.cat([newest.flip(0).expand(len(ranked), -1), ranked], 1) + candidates.first
        reader.pass_up(ranked)
        return Selection(ranked.sort(-1).values, 1, full=True, for_above=self.full_choice)

    def ranking(self, shape: LayerShape, shares: Tensor, k: int) -> Tensor:
        """The k best tokens of each list, best first: float32 [num_query_heads, count] -> int64 [num_lists, k]."""
        return merged_ranking(shares, k)

    def _recent(self, start: int, candidates: Candidates, limit: Limit) -> int:
        """How many of the newest candidates are chosen for being new."""
        window = start + 1 - candidates.stop
        return min(max(ceil(self.recent_fraction * (limit.units + window)) - window, 0), limit.units)


def merged_ranking(scores: Tensor, k: int) -> Tensor:
    """The first k of everyone's first choice, everyone's second and so on, each token once.

    scores float32 [num_heads, count] -> int64 [1, k], in that order.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    num_heads, count = scores.shape
    head, place = (torch.arange(number, device=scores.device) for number in (num_heads, count))
    rank = torch.empty_like(order).scatter_(1, order, place.expand_as(order))
    turn = rank * num_heads + head.unsqueeze(1)
    return turn.amin(0, keepdim=True).argsort(-1)[:, :k]  # no two tokens have their turn at once
