"""Methods whose units are pages, and those that rank pages by a packed summary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvsift.errors import InputError, unknown
from kvsift.kernels.page_summary import SUMMARIES, page_scores
from kvsift.methods.base import ScoringMethod
from kvsift.types import Candidates, KVReader, LayerShape


@dataclass(frozen=True)
class PagedMethod(ScoringMethod):
    """Units are pages.

    Attributes:
        page_size: tokens per page.
    """

    page_size: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.page_size, bool) or not isinstance(self.page_size, int) or self.page_size < 1:
            raise InputError(f"page_size={self.page_size!r} must be a whole number, 1 or more; 16 is the paper's.")

    @property
    def unit_size(self) -> int:
        return self.page_size


@dataclass(frozen=True)
class SummaryMethod(PagedMethod):
    """Pages by the score of their summary: one matrix product per step, whatever the kind.

    Attributes:
        score_by: kind of summary, a key of ``kernels.page_summary.SUMMARIES``.
    """

    score_by: str = "minmax"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.score_by, str) or self.score_by not in SUMMARIES:
            raise unknown("score_by", str(self.score_by), SUMMARIES)

    @property
    def summaries(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.score_by,)

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        features = SUMMARIES[self.score_by].features(queries.float() * shape.scale)
        grouped = features.unflatten(0, (shape.num_kv_heads, -1)).flatten(1, 2)  # [num_kv_heads, group*queries, width]
        rows = reader.summary(self.score_by, candidates.units)  # [num_kv_heads, count, width]
        return page_scores(grouped, rows).reshape(shape.num_query_heads, queries.shape[1], -1)
