"""PageMean: rank pages by the logit of their mean key.

score(page) = scale * q . mean(keys of the page)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvsift.methods.base import Phase
from kvsift.methods.oracle import exact_logits
from kvsift.methods.pages import PagedMethod
from kvsift.types import Candidates, KVReader, LayerShape


@dataclass(frozen=True)
class PageMean(PagedMethod):
    """Pages by the logit of their mean key, in prefill and decode."""

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    summaries: ClassVar[tuple[str, ...]] = ("mean_std",)  # kept by the store; a row is [mean | std]

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        mean = reader.summary("mean_std", candidates.units)[..., : shape.head_dim]  # [num_kv_heads, count, head_dim]
        return exact_logits(shape, queries, mean)  # [num_query_heads, num_queries, count]
