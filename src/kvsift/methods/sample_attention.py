"""SampleAttention: tokens that a few evenly spaced queries of the chunk attend to (https://arxiv.org/abs/2406.15486).

The default follows the tables of QuoKA: a fixed number of queries, and the best tokens within a budget. The paper takes
5 % of the queries and, per query head, as few tokens as reach 95 % of their attention: ``compat="paper"``.

Deviation from the paper: the local window is the budget's, in tokens; the paper's is 8 % of the context. Every
sampled query sees all candidates, so sums need no correction for causality.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvsift.methods.base import Phase
from kvsift.methods.checks import knob
from kvsift.methods.common.softmax_share import ShareMethod
from kvsift.types import KVReader, LayerShape

PAPER_SHARE, PAPER_MASS = 0.05, 0.95


@dataclass(frozen=True)
class SampleAttention(ShareMethod):
    """Tokens by their exact share of the attention of sampled queries.

    Attributes:
        queries: sampled of each chunk, evenly spaced, the last one among them.
        compat: "paper": 5 % of the queries, a selection per query head, budget mass=0.95 unless another is given.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill",)
    source: ClassVar[str] = "arXiv 2406.15486"

    queries: int = knob(16, 1)
    compat: Literal["paper"] | None = knob(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compat is not None:
            self._imply(heads="query", queries=ceil(PAPER_SHARE * self.chunk))

    @property
    def budget_defaults(self) -> dict[str, Any]:
        return {"mass": PAPER_MASS} if self.compat else {}

    def stand_ins(self, state: Any, shape: LayerShape, queries: Tensor, start: int, reader: KVReader) -> Tensor:
        return queries[:, sampled(queries.shape[1], self.queries).to(queries.device)]


def sampled(num_queries: int, count: int) -> Tensor:
    """Return ``count`` evenly spaced indices, the last one included; all indices if there are no more."""
    if num_queries <= count:
        return torch.arange(num_queries)
    return (torch.arange(1, count + 1) * num_queries) // count - 1
