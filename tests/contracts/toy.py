"""A method of one's own, complete: what a package that adds a method would write, state included.

RememberedMeans ranks pages by the logit of their mean key. Where the catalogued methods read page summaries from the
store, this one remembers what it saw, so that the contracts meet a method with memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvsift.methods.base import Phase
from kvsift.methods.scoring import ScoringMethod
from kvsift.types import Candidates, KVReader, LayerShape


@dataclass
class KeySums:
    """Sums of the first n keys for every n: any run of tokens has its mean in one subtraction, and a roll-back is a
    cut. float64, so that the difference of two long sums is still the sum of the keys between."""

    sums: Tensor  # float64 [num_kv_heads, num_tokens + 1, head_dim]

    def fork(self) -> KeySums:
        return KeySums(self.sums)  # never written in place

    def crop(self, length: int) -> None:
        self.sums = self.sums[:, : length + 1]


@dataclass(frozen=True)
class RememberedMeans(ScoringMethod):
    """score(page) = scale * q . mean(keys of the page)."""

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")

    page_size: int = 4

    @property
    def unit_size(self) -> int:
        return self.page_size

    def new_state(self, shape: LayerShape) -> KeySums:
        return KeySums(torch.zeros(shape.num_kv_heads, 1, shape.head_dim, dtype=torch.float64))

    def observe(
        self, state: KeySums, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        assert start == state.sums.shape[1] - 1, "tokens are seen once and in order"
        state.sums = torch.cat([state.sums, state.sums[:, -1:] + keys.double().cumsum(1)], 1)

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        edges = torch.arange(candidates.first, candidates.stop + 1) * self.page_size
        edges = edges.clamp_max(reader.length)  # the last page may be the one being filled
        sums = state.sums[:, edges].diff(dim=1)  # [num_kv_heads, count, head_dim]
        mean = (sums / edges.diff()[:, None]).float()
        q = queries.float().unflatten(0, (shape.num_kv_heads, -1)).flatten(1, 2)  # [num_kv_heads, group*queries, dim]
        return (q @ mean.mT * shape.scale).reshape(shape.num_query_heads, queries.shape[1], -1)
