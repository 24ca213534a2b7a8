"""Methods whose units are pages, and those that rank pages by a packed summary."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import Any, ClassVar

from torch import Tensor

from kvsift import native
from kvsift.errors import InputError, unknown
from kvsift.kernels.page_summary import SUMMARIES, page_scores
from kvsift.methods.base import ScoringMethod, top_units
from kvsift.methods.blocks import BLOCK_PAGES, BlockRows, pages_in, whole_blocks
from kvsift.native.takes import takes
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection


@dataclass(frozen=True)
class PagedMethod(ScoringMethod):
    """Units are pages.

    Attributes:
        page_size: tokens per page.
    """

    granularity: ClassVar[str] = "page"

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
        score_by: kind of page summary: "minmax", "minmax_fp8", "mean_std", "centroid_radius" or "log_mass".
        prefilter: rank blocks of pages first, and score only the pages of the best ones: as many blocks as hold
            ``prefilter`` times the pages to select, rounded up. 0 scores every page. Blocks that are candidates in
            part, at either end, are always scored and do not count.
        block_pages: pages per block.
    """

    score_by: str = "minmax"
    prefilter: float = 0
    block_pages: int = BLOCK_PAGES

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.score_by, str) or self.score_by not in SUMMARIES:
            raise unknown("score_by", str(self.score_by), SUMMARIES)
        self._check_prefilter()

    def _check_prefilter(self) -> None:
        factor, pages = self.prefilter, self.block_pages
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not (factor == 0 or 1 <= factor < inf):
            raise InputError(
                f"prefilter={factor!r} must be 0 (score every page), or 1 or more: blocks are kept for so many times "
                "the pages to select. 8 is a good start."
            )
        if factor and SUMMARIES[self.score_by].merge is None:
            able = " and ".join(kind for kind, of in SUMMARIES.items() if of.merge is not None)
            raise InputError(
                f"prefilter={factor} needs summaries that merge into those of larger blocks: {able}. Leave out "
                f"score_by={self.score_by}, or prefilter."
            )
        if isinstance(pages, bool) or not isinstance(pages, int) or pages < 2:
            raise InputError(f"block_pages={pages!r} must be a whole number, 2 or more.")
        if pages != BLOCK_PAGES and not factor:
            raise InputError(f"block_pages={pages} means nothing without prefilter; add for instance prefilter=8.")

    @property
    def summaries(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.score_by,)

    @property
    def estimates_mass(self) -> bool:  # type: ignore[override]
        return self.prefilter == 0

    @property
    def compares_heads(self) -> bool:  # type: ignore[override]
        return self.prefilter == 0

    @property
    def no_mass(self) -> str:  # type: ignore[override]
        return f"with prefilter={self.prefilter} leaves pages unscored, whose share of attention nobody knows"

    def new_state(self, shape: LayerShape) -> BlockRows | None:
        return BlockRows(self.score_by, self.page_size, self.block_pages) if self.prefilter else None

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        pages = super().state_bytes_per_token(shape)
        return pages * (1 + 1 / self.block_pages) if self.prefilter else pages

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        rows = reader.summary(self.score_by, candidates.units)  # [num_kv_heads, count, width]
        return self._scores(shape, queries, rows)

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        whole = whole_blocks(candidates, self.block_pages)
        keep = ceil(self.prefilter * limit.units / self.block_pages)
        if not self.prefilter or keep >= len(whole):
            plain = limit.mass is None and not limit.adaptive
            if self.score_by == "minmax" and plain and queries.shape[1] == 1:
                pages = self._best_pages(shape, queries, reader.summary(self.score_by, candidates.units), limit.units)
                return Selection(pages + candidates.first, candidates.unit_size, full=True)
            return super().select(state, shape, queries, start, candidates, limit, reader)
        blocks = top_units(self._best(shape, queries, state.read(whole, reader)), keep) + whole.start
        pages = pages_in(blocks, candidates, self.block_pages)  # [num_heads, num_pages]
        places = top_units(self._best(shape, queries, reader.summary(self.score_by, pages)), limit.units)
        return Selection(pages.gather(1, places), candidates.unit_size)

    def _best_pages(self, shape: LayerShape, queries: Tensor, rows: Tensor, k: int) -> Tensor:
        """The k best of the pages that ``rows`` [num_kv_heads, count, width] describe, for one query per head."""
        if takes(queries[:, 0], rows):
            return native.choose_pages(queries[:, 0], rows, shape.scale, k, self.num_selections(shape))
        return top_units(self._best(shape, queries, rows), k)

    def _best(self, shape: LayerShape, queries: Tensor, rows: Tensor) -> Tensor:
        """Largest score of each row among the queries that share a selection, [heads that select, count]."""
        scores = self._scores(shape, queries, rows).amax(1)  # [num_query_heads, count]
        return scores.unflatten(0, (self.num_selections(shape), -1)).amax(1)

    def _scores(self, shape: LayerShape, queries: Tensor, rows: Tensor) -> Tensor:
        """Score of each row for each query, [num_query_heads, num_queries, count]; the query heads are dealt out to
        the heads of ``rows`` [num_heads, count, width]."""
        features = SUMMARIES[self.score_by].features(queries.float() * shape.scale)
        grouped = features.unflatten(0, (rows.shape[0], -1)).flatten(1, 2)  # [num_heads, queries of a head, width]
        return page_scores(grouped, rows).reshape(shape.num_query_heads, queries.shape[1], -1)
