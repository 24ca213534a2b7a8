"""Oracles: selection by exact logits. An upper bound for every method at the same budget, never faster than dense.

OracleTokens selects the tokens with the largest logits; OraclePages the pages whose best token has the largest logit,
as a perfect page summary would.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import pad

from kvsift.methods.base import Phase
from kvsift.methods.pages import PagedMethod
from kvsift.methods.scoring import ScoringMethod
from kvsift.types import Candidates, KVReader, LayerShape


@dataclass(frozen=True)
class OracleTokens(ScoringMethod):
    """The tokens with the largest exact logits."""

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        return exact_logits(shape, queries, reader.keys(candidates.tokens.start, candidates.tokens.stop))


@dataclass(frozen=True)
class OraclePages(PagedMethod):
    """The pages that hold the largest exact logits."""

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        stop = min(candidates.tokens.stop, reader.length)
        logits = exact_logits(shape, queries, reader.keys(candidates.tokens.start, stop))
        missing = candidates.count * self.page_size - logits.shape[-1]  # window=0: the incomplete page is a candidate
        return pad(logits, (0, missing), value=-inf).unflatten(-1, (candidates.count, self.page_size)).amax(-1)


def exact_logits(shape: LayerShape, queries: Tensor, keys: Tensor) -> Tensor:
    """Return scale * q.k in float32, before soft-capping (which keeps the order).

    queries [num_query_heads, num_queries, head_dim], keys [num_kv_heads, num_keys, head_dim] -> [num_query_heads,
    num_queries, num_keys].
    """
    q = queries.float().unflatten(0, (shape.num_kv_heads, -1)).flatten(1, 2)  # [num_kv_heads, group*queries, head_dim]
    logits = (q @ keys.float().mT) * shape.scale
    return logits.reshape(shape.num_query_heads, queries.shape[1], -1)
