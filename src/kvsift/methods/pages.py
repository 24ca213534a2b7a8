"""Methods that rank pages by a packed summary: one matrix product per step, whatever the kind of summary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from kvsift.errors import InputError, unknown
from kvsift.kernels.page_summary import SUMMARIES, page_scores
from kvsift.methods.base import ScoringMethod
from kvsift.types import Candidates, KVReader, LayerShape

PageScore = Literal["minmax", "mean_std", "centroid_radius", "log_mass"]


@dataclass(frozen=True)
class PageMethod(ScoringMethod):
    """Pages by the score of their summary.

    Attributes:
        page_size: tokens per page.
        score_by: kind of summary, a key of ``kernels.page_summary.SUMMARIES``.
    """

    page_size: int = 16
    score_by: str = "minmax"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_page_size(self.page_size)
        if not isinstance(self.score_by, str) or self.score_by not in SUMMARIES:
            raise unknown("score_by", str(self.score_by), SUMMARIES)

    @property
    def unit_size(self) -> int:
        return self.page_size

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


def check_page_size(page_size: object) -> None:
    """Refuse anything that cannot be a page size."""
    if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
        raise InputError(f"page_size={page_size!r} must be a whole number, 1 or more; 16 is the paper's.")
