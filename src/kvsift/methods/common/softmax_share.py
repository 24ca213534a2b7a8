"""Methods that rank tokens by their mean share of attention, estimated with surrogate queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvsift.methods.base import ChunkedMethod, seen_by_all
from kvsift.methods.oracle import exact_logits
from kvsift.methods.scoring import ScoringMethod, chosen_units, units_per_head
from kvsift.methods.traits import Traits
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection

MAX_SCORES = 1 << 25  # logits in memory at once: 128 MiB


@dataclass(frozen=True)
class ShareMethod(ScoringMethod, ChunkedMethod):
    """Tokens by the softmax of estimated logits over what came before, averaged over the queries of the segment and the
    heads that share a selection."""

    traits: ClassVar[Traits] = Traits(estimates_mass=True, compares_heads=True)

    def stand_ins(self, state: Any, shape: LayerShape, queries: Tensor, start: int, reader: KVReader) -> Tensor:
        """Surrogate queries, whose exact logits are the estimate: [num_query_heads, any number, head_dim]."""
        return queries

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        shares = self.shares(state, shape, queries, start, reader)
        shares = shares.unflatten(0, (self.num_selections(shape), -1)).mean(1)[:, candidates.tokens]
        return chosen_units(shares, units_per_head(shares, 1 - shares.sum(-1), limit), limit, candidates)

    def shares(self, state: Any, shape: LayerShape, queries: Tensor, start: int, reader: KVReader) -> Tensor:
        """Estimated share of every token that all queries see, float32 [num_query_heads, num_tokens]."""
        keys = reader.keys(0, seen_by_all(start, queries.shape[1]))
        return mean_shares(shape, self.stand_ins(state, shape, queries, start, reader), keys)


def mean_shares(shape: LayerShape, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the mean over queries of the softmax of their logits, float32 [num_query_heads, num_keys].

    queries [num_query_heads, num_queries, head_dim]; keys [num_kv_heads, num_keys, head_dim].
    """
    tile = max(1, MAX_SCORES // (shape.num_query_heads * keys.shape[1]))
    total = torch.zeros(shape.num_query_heads, keys.shape[1], dtype=torch.float32, device=keys.device)
    for part in queries.split(tile, 1):
        total += shape.capped(exact_logits(shape, part, keys)).softmax(-1).sum(1)
    return total / queries.shape[1]
