"""PQCache: tokens by logits from product-quantised keys (https://arxiv.org/abs/2407.12820).

A key is split into m sub-vectors, each coded by the nearest of 2^b centroids. The products of a query's sub-vectors
with the centroids are m tables, and the logit of a token is approximately

    scale * sum over i of table_i[code_i];

the softmax over the candidates, summed over the query heads of a KV head, ranks its tokens.

By default a tenth of the context is visible, as for the paper's Llama.

Deviation from the paper:
- centroids are fitted to the first ``settled`` candidates, and again when the context has grown by a seventh or more;
  in the paper they are those of the prompt. In between, tokens that leave the window get present centroids;
- the number of k-means iterations is a knob; the paper iterates as long as the prefill of the prompt takes;
- a code takes a byte;
- half of the paper's budget, a tenth of the context, is the window. Here the window is the budget's, 64 tokens.
Centring the keys first would change nothing: k-means follows a shift of all points, and a shift of all keys adds the
same to all logits of a query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsift.methods.checks import knob
from kvsift.methods.common.token_rows import SettledRows
from kvsift.methods.scoring import ScoringMethod, top_units
from kvsift.methods.traits import Traits
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection


@dataclass(frozen=True)
class PQCache(ScoringMethod):
    """Tokens by their share of attention over product-quantised keys.

    Attributes:
        parts: sub-vectors of a key (m of the paper).
        bits: bits of a code: 2^bits centroids for each sub-vector and KV head.
        iterations: number of iterations of k-means.
        seed: draws the tokens that centroids start at.
    """

    source: ClassVar[str] = "arXiv 2407.12820"
    traits: ClassVar[Traits] = Traits(estimates_mass=True, compares_heads=True)

    parts: int = knob(2, 1)
    bits: int = knob(6, 1, 8)
    iterations: int = knob(10, 0)
    seed: int = knob(0, 0)

    @property
    def budget_defaults(self) -> dict[str, Any]:
        return {"sinks": 32, "ratio": 0.1}

    def new_state(self, shape: LayerShape) -> ProductCodes:
        return ProductCodes(self)

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        return self.parts * shape.num_kv_heads

    def prepare(self, state: Any, shape: LayerShape, candidates: Candidates, reader: KVReader, limit: Limit) -> None:
        if candidates.count > 0:
            state.read(reader, candidates)

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        codes = state.read(reader, candidates).long()  # [num_kv_heads, count, parts]
        q = cut(queries.float(), self.parts).unflatten(0, (shape.num_kv_heads, -1))
        tables = q @ state.centroids.float().mT.unsqueeze(1)  # [num_kv_heads, group_size, parts, num_queries, 2^bits]
        index = codes.mT[:, None, :, None, :].expand(*tables.shape[:-1], -1)
        return tables.gather(-1, index).sum(2).flatten(0, 1) * shape.scale

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        if limit.always_lse is not None:  # the limit depends on shares
            return super().select(state, shape, queries, start, candidates, limit, reader)
        logits = shape.capped(self.score(state, shape, queries, start, candidates, reader))
        shares = logits.softmax(-1).sum(1).unflatten(0, (self.num_selections(shape), -1)).sum(1)
        return Selection(top_units(shares, limit.units) + candidates.first, 1, full=True)


class ProductCodes(SettledRows):
    """Centroids and codes of the keys of one sequence in one layer, uint8 [num_kv_heads, count, parts].

    Args:
        method: its knobs.
    """

    def __init__(self, method: PQCache) -> None:
        super().__init__()
        self._method = method
        self.centroids = torch.empty(0)  # float64 [num_kv_heads, parts, 2^bits, part_dim]

    def settle(self, keys: Tensor) -> None:
        method = self._method
        self.centroids = fit_centroids(cut(keys, method.parts), 1 << method.bits, method.iterations, method.seed)

    def rows_of(self, keys: Tensor) -> Tensor:
        return nearest_centroids(cut(keys, self._method.parts), self.centroids).mT.to(torch.uint8)


def cut(vectors: Tensor, parts: int) -> Tensor:
    """Split vectors [num_heads, n, head_dim] into sub-vectors [num_heads, parts, n, part_dim], the last one padded with
    zeros."""
    missing = -vectors.shape[-1] % parts
    return pad(vectors, (0, missing)).unflatten(-1, (parts, -1)).transpose(1, 2)


def fit_centroids(points: Tensor, count: int, iterations: int, seed: int) -> Tensor:
    """Fit centroids to points [.., n, dim] by k-means, for each leading index: float64 [.., min(count, n), dim].

    They start at points drawn by ``seed`` and move to the mean of their nearest points, ``iterations`` times; one
    without points stays. float64, so that no tie depends on the memory layout of the points.
    """
    points = points.double()
    drawn = torch.randperm(points.shape[-2], generator=torch.Generator().manual_seed(seed))[:count]
    centroids = points[..., drawn.to(points.device), :]
    for _ in range(iterations):
        assigned = nearest_centroids(points, centroids)  # [.., n]
        sums = torch.zeros_like(centroids).scatter_add_(-2, assigned.unsqueeze(-1).expand_as(points), points)
        sizes = torch.zeros_like(centroids[..., 0]).scatter_add_(-1, assigned, torch.ones_like(points[..., 0]))
        centroids = torch.where(sizes.unsqueeze(-1) > 0, sums / sizes.clamp_min(1).unsqueeze(-1), centroids)
    return centroids


def nearest_centroids(points: Tensor, centroids: Tensor) -> Tensor:
    """Return the nearest centroid of each point, ties to the first: [.., n, dim], [.., count, dim] -> int64 [.., n]."""
    # |x - c|^2 without |x|^2, which is the same for all centroids
    distances = centroids.double().square().sum(-1).unsqueeze(-2) - 2 * points.double() @ centroids.double().mT
    return distances.argmin(-1)
