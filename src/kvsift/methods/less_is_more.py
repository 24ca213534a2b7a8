"""LessIsMore: one set of tokens for all heads, chosen in one layer and reused above (https://arxiv.org/abs/2508.07101).

The first sparse layer and a correction layer rank all tokens exactly, head by head, and merge the rankings: everyone's
first choice, then everyone's second, until the budget is full. The layers above reuse the set.

Deviation from the paper: the layers that choose attend what they chose, where the paper's attend everything (name them
in ``dense_layers`` and the next one chooses); the share of recent tokens is the budget's window. In prefill a chunk
chooses by the mean share of its queries, as in QuoKA's tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvsift.methods import knobs
from kvsift.methods.base import Phase, top_units
from kvsift.methods.chunked import ChunkedMethod, seen_by_all
from kvsift.methods.shares import mean_shares
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection


@dataclass(frozen=True)
class LessIsMore(ChunkedMethod):
    """The tokens that all heads together rank highest, for all layers up to the correction and for all above.

    Attributes:
        correction: true index of the layer that chooses anew; the paper's lie between 9 and 20.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    source: ClassVar[str] = "arXiv 2508.07101"

    correction: int = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        knobs.whole("correction", self.correction, 0)

    def select(
        self, state: object, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        units = None if shape.layer == self.correction else reader.from_below()
        if units is None:
            keys = reader.keys(0, seen_by_all(start, queries.shape[1]))
            shares = mean_shares(shape, queries, keys)[:, candidates.tokens]
            units = merged_ranking(shares, limit.units) + candidates.first
            reader.pass_up(units)
        return Selection(units.to(queries.device), 1, full=True)


def merged_ranking(scores: Tensor, k: int) -> Tensor:
    """The first k of everyone's first choice, everyone's second and so on, each token once; ascending.

    scores float32 [num_heads, count] -> int64 [1, k].
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    num_heads, count = scores.shape
    head, place = (torch.arange(number, device=scores.device) for number in (num_heads, count))
    rank = torch.empty_like(order).scatter_(1, order, place.expand_as(order))
    turn = rank * num_heads + head.unsqueeze(1)
    return top_units(-turn.amin(0, keepdim=True).double(), k)  # exact, unlike float32 beyond 2^24 turns
