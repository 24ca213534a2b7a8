"""LessIsMore: one set of tokens for all heads, chosen in one layer and reused above (https://arxiv.org/abs/2508.07101).

The first sparse layer and a correction layer attend everything. They rank all tokens exactly, head by head, and merge
the rankings: the first token of every head, then the second of every head, until the budget is full, except for a
fraction of it that goes to the most recent tokens. The layers above attend that set.

Deviation from the paper: recent tokens are the budget's window and, where a fraction of the budget is more, those next
to it. In prefill a chunk selects by the mean share of its queries. With ``full_choice=false`` the selecting layers
attend their selection alone. The paper searches the correction layer of each model; ``correction=auto`` takes the same
relative depth, and ``anchors=FILE`` names any number of layers that select, found by calibration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvsift.errors import Conflict, InvalidValue
from kvsift.methods.base import ChunkedMethod, Phase, seen_by_all
from kvsift.methods.checks import knob
from kvsift.methods.common.anchors import AnchoredMethod, Reuse, from_anchor
from kvsift.methods.common.softmax_share import mean_shares
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection

FIRST, DEPTH = 2, 32  # the first sparse layer of the papers, and the layers of the models their defaults are for


@dataclass(frozen=True)
class LessIsMore(AnchoredMethod, ChunkedMethod):
    """The tokens that all heads together rank highest, for the layers up to the correction and for those above.

    Attributes:
        correction: true index of the layer that selects anew; "auto": the published one of a model of 32 layers, in
            proportion; "none": no layer does.
        recent_fraction: share of the budget, without sinks, for the most recent tokens.
        full_choice: layers that select attend everything.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    source: ClassVar[str] = "arXiv 2508.07101"
    published: ClassVar[int] = 12  # the correction layer of 32

    correction: int | Literal["auto", "none"] = knob("auto", 0, also=("auto", "none"))
    recent_fraction: float = knob(0.25, is_share=True)
    full_choice: bool = knob(True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchors is not None and self.correction != "auto":
            raise Conflict(
                f"anchors={self.anchors!r} says which layers select, and so does correction={self.correction!r}. Leave "
                "one of them out."
            )

    def select(
        self, state: Reuse | None, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        ranked = self._reused_ranking(state, shape, reader)
        if ranked is not None:  # a layer may have a smaller limit than the one that selected
            return Selection(ranked[:, : limit.units].sort(-1).values.to(queries.device), 1, full=True)
        keys = reader.keys(0, seen_by_all(start, queries.shape[1]))
        shares = mean_shares(shape, queries, keys)[:, candidates.tokens]
        recent = self._recent(start, candidates, limit)
        ranked = self.ranking(shape, shares[:, : candidates.count - recent], limit.units - recent)
        newest = torch.arange(candidates.count - recent, candidates.count, device=ranked.device)
        ranked = torch.cat([newest.flip(0).expand(len(ranked), -1), ranked], 1) + candidates.first
        reader.pass_up(ranked, keep=self.anchors is not None)
        return Selection(ranked.sort(-1).values, 1, full=True, for_above=self.full_choice)

    def _reused_ranking(self, reuse: Reuse | None, shape: LayerShape, reader: KVReader) -> Tensor | None:
        """The ranking that this layer takes from one below; None: it ranks tokens itself."""
        if self.anchors is not None:
            return from_anchor(reuse, reader)
        return None if shape.layer == self.corrects_at(shape.peers) else reader.from_below()

    def corrects_at(self, layers: Sequence[int]) -> int | None:
        """The attention layer that selects anew; None if none does, or the layers are unknown."""
        if isinstance(self.correction, int):
            return self.correction
        if self.correction == "none" or not layers:
            return None
        share = (self.published - FIRST) / (DEPTH - FIRST)  # of the layers above the first sparse one
        depth = FIRST + round(share * (layers[-1] + 1 - FIRST))
        return next((layer for layer in layers if layer >= depth), layers[-1])

    def check_layers(self, layers: Sequence[int]) -> None:
        AnchoredMethod.check_layers(self, layers)
        if isinstance(self.correction, int) and self.correction not in layers:
            all_layers = len(layers) == layers[-1] + 1
            possible = f"0 to {layers[-1]}" if all_layers else ", ".join(map(str, layers))
            raise InvalidValue(
                f"correction={self.correction} is no layer that kvsift attends in this model; those are {possible}. "
                "Give one of them, correction=auto or correction=none."
            )

    def ranking(self, shape: LayerShape, shares: Tensor, k: int) -> Tensor:
        """Rank the k best tokens of each list, best first: float32 [num_query_heads, count] -> int64 [num_lists, k]."""
        return merged_ranking(shares, k)

    def _recent(self, start: int, candidates: Candidates, limit: Limit) -> int:
        """Number of newest candidates that are selected without ranking."""
        window = start + 1 - candidates.stop
        return min(max(ceil(self.recent_fraction * (limit.units + window)) - window, 0), limit.units)


def merged_ranking(scores: Tensor, k: int) -> Tensor:
    """Merge the rankings of all heads: the first token of every head, then the second, up to k, each token once.

    scores float32 [num_heads, count] -> int64 [1, k], in that order.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    num_heads, count = scores.shape
    head, position = (torch.arange(number, device=scores.device) for number in (num_heads, count))
    rank = torch.empty_like(order).scatter_(1, order, position.expand_as(order))
    turn = rank * num_heads + head.unsqueeze(1)
    return turn.amin(0, keepdim=True).argsort(-1)[:, :k]  # turns are unique
