"""Methods whose units are pages, ranked by a packed summary or by a score of their own."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

from torch import Tensor

from kvsift import native
from kvsift.errors import Conflict, InvalidMethod, UnusedOption, unknown
from kvsift.kernels.page_summary import SUMMARIES, SummaryKind, page_scores
from kvsift.methods import checks
from kvsift.methods.checks import knob
from kvsift.methods.common.blocks import BLOCK_PAGES, BlockRows, pages_in, whole_blocks
from kvsift.methods.scoring import RANKS, ScoringMethod, own_ranking, top_units
from kvsift.methods.traits import Traits
from kvsift.native.shapes import PooledRows, supports
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Objections, Selection

RANKS_PAGES = RANKS._replace(granularity="page")


@dataclass(frozen=True)
class PagedMethod(ScoringMethod):
    """Units are pages, ranked by ``features`` times the rows of the one summary that the method keeps.

    Decode steps of such a method can be captured (``layer.paged_decode``), unless it overrides ``score`` or ``select``.

    Attributes:
        page_size: tokens per page.
    """

    not_captured: ClassVar[Objections] = (
        (lambda rule: own_ranking(rule.method, PagedMethod, SummaryMethod),
         "{it.name} has its own {found}; the kernels rank pages by features of the query"),
        (lambda rule: not 64 <= rule.method.ranking.width(64) <= 128,
         "rows of {it.method.summaries[0]} do not hold one or two numbers per channel; the kernels score those"),
    )  # fmt: skip

    page_size: int = knob(16, 1)

    @property
    def traits(self) -> Traits:
        return super().traits._replace(granularity="page")

    @property
    def unit_size(self) -> int:
        return self.page_size

    @property
    def ranking(self) -> SummaryKind:
        """The kind of summary that ranks pages, with the method's features."""
        kind = SUMMARIES[self.summaries[0]]
        if type(self).features is PagedMethod.features:
            return kind
        return kind._replace(features=self.features, features_twin=None, cuda_features=None)

    def features(self, queries: Tensor) -> Tensor:
        """Query features, the factors of a summary row: by default those of the kind of summary.

        ``queries`` are scaled, float32 [.., head_dim] -> float32 [.., width of a row].
        """
        return SUMMARIES[self.summaries[0]].features(queries)

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        if len(self.summaries) != 1:
            return super().score(state, shape, queries, start, candidates, reader)
        rows = reader.summary(self.summaries[0], candidates.units)  # [num_kv_heads, count, width]
        return self._scores(shape, queries, rows)

    def _scores(self, shape: LayerShape, queries: Tensor, rows: Tensor) -> Tensor:
        """Score of each row for each query, [num_query_heads, num_queries, count]; ``rows`` [num_heads, count, width]
        of a head serve as many consecutive query heads."""
        features = self.features(queries.float() * shape.scale)
        if features.shape[-1] != rows.shape[-1]:
            raise InvalidMethod(
                f"features of {type(self).__name__} returned {features.shape[-1]} numbers for each query; a row of its "
                f"summary has {rows.shape[-1]}, and it must return as many."
            )
        grouped = features.unflatten(0, (rows.shape[0], -1)).flatten(1, 2)  # [num_heads, queries of a head, width]
        return page_scores(grouped, rows).reshape(shape.num_query_heads, queries.shape[1], -1)


@dataclass(frozen=True)
class SummaryMethod(PagedMethod):
    """Pages by the score of a summary of any kind: one matrix product per step.

    Attributes:
        score_by: kind of page summary: "minmax", "minmax_fp8", "mean_std", "centroid_radius" or "log_mass".
        prefilter: rank blocks of pages first, and score only the pages of the best ones: as many blocks as hold
            ``prefilter`` times the pages to select, rounded up. 0 scores every page. Blocks that are candidates in
            part, at either end, are always scored and do not count.
        block_pages: pages per block.
    """

    not_captured = (
        *PagedMethod.not_captured,
        (lambda rule: rule.method.prefilter,
         "prefilter={found} ranks blocks first; the kernels score every page"),
    )  # fmt: skip

    score_by: str = "minmax"
    prefilter: float = 0
    block_pages: int = knob(BLOCK_PAGES, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.score_by, str) or self.score_by not in SUMMARIES:
            raise unknown("score_by", str(self.score_by), SUMMARIES)
        self._check_prefilter()

    def _check_prefilter(self) -> None:
        factor, pages = self.prefilter, self.block_pages
        checks.prefilter(factor, "page")
        if factor and type(self).score is not PagedMethod.score:
            raise Conflict(
                f"prefilter={factor} ranks pages by their summaries, and {type(self).__name__} has its own score. "
                f"Leave out prefilter, or define features instead of score."
            )
        if factor and SUMMARIES[self.score_by].merge is None:
            able = " and ".join(name for name, kind in SUMMARIES.items() if kind.merge is not None)
            raise Conflict(
                f"prefilter={factor} needs summaries that merge into those of larger blocks: {able}. Leave out "
                f"score_by={self.score_by}, or prefilter."
            )
        if pages != BLOCK_PAGES and not factor:
            raise UnusedOption(f"block_pages={pages} means nothing without prefilter; add for instance prefilter=8.")

    @property
    def summaries(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.score_by,)

    @property
    def traits(self) -> Traits:
        if self.prefilter == 0:
            return RANKS_PAGES
        return Traits(
            granularity="page",
            no_mass=f"with prefilter={self.prefilter} leaves pages unscored, whose share of attention is unknown",
        )

    def new_state(self, shape: LayerShape) -> BlockRows | None:
        return BlockRows(self.score_by, self.page_size, self.block_pages) if self.prefilter else None

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        pages = super().state_bytes_per_token(shape)
        return pages * (1 + 1 / self.block_pages) if self.prefilter else pages

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        whole = whole_blocks(candidates, self.block_pages)
        keep = ceil(self.prefilter * limit.units / self.block_pages)
        if not self.prefilter or keep >= len(whole):
            plain = limit.mass is None and not limit.adaptive and type(self).score is PagedMethod.score
            if plain and queries.shape[1] == 1 and self.ranking is SUMMARIES["minmax"]:
                read = getattr(reader, "summary_in_place", reader.summary)  # a reader of another make may lack it
                query, rows = queries[:, 0], read(self.score_by, candidates.units)
                if supports(query, rows):
                    pages = native.choose_pages(query, rows, shape.scale, limit.units, self.num_selections(shape))
                else:
                    rows = rows.gather() if isinstance(rows, PooledRows) else rows
                    pages = top_units(self._best(shape, queries, rows), limit.units)
                return Selection(pages + candidates.first, candidates.unit_size, full=True)
            return super().select(state, shape, queries, start, candidates, limit, reader)
        blocks = top_units(self._best(shape, queries, state.read(whole, reader)), keep) + whole.start
        pages = pages_in(blocks, candidates, self.block_pages)  # [num_heads, num_pages]
        places = top_units(self._best(shape, queries, reader.summary(self.score_by, pages)), limit.units)
        return Selection(pages.gather(1, places), candidates.unit_size)

    def _best(self, shape: LayerShape, queries: Tensor, rows: Tensor) -> Tensor:
        """Return the largest score of each row among the queries that share a selection, [heads that select, count]."""
        scores = self._scores(shape, queries, rows).amax(1)  # [num_query_heads, count]
        return scores.unflatten(0, (self.num_selections(shape), -1)).amax(1)
