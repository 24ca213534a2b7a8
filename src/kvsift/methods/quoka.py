"""QuoKA: tokens with the direction of a few distinctive queries of the chunk (https://arxiv.org/abs/2602.08722).

The queries least like their mean are kept, s(q) = -cos(mean, q); a key's score is its largest cosine with one of them,
averaged over the query heads of a KV head before the product: mean_h cos(q_h, k) = mean_h(q_h / |q_h|) . k / |k|.

Deviation from the paper:
- the chunk itself is always visible, with exact causality, and so are sinks and window; earlier tokens are candidates;
- ``mode="shared"`` keeps the same queries for all heads of a group, which makes the average above exact. The paper
  pairs the j-th kept query of one head with the j-th of the next: ``mode="paired_sorted"``;
- where the mean of the queries is zero, evenly spaced queries are kept;
- ``prefilter`` ranks pages by their summaries first, and reads the keys of the best pages alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvsift.errors import UnusedOption
from kvsift.kernels.page_summary import SUMMARIES, page_scores
from kvsift.kernels.pick_queries import averaged, pick_queries
from kvsift.kernels.probe_scores import probe_scores
from kvsift.kernels.unlikeness import unlikeness
from kvsift.methods import checks
from kvsift.methods.base import ChunkedMethod, Phase
from kvsift.methods.checks import knob
from kvsift.methods.common.blocks import pages_in, whole_blocks
from kvsift.methods.common.token_rows import KeyNorms
from kvsift.methods.scoring import top_units
from kvsift.methods.segment_batch import SegmentRequests, best_of_segments
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection

Mode = Literal["shared", "paired_sorted", "max_of_mean_exact"]
Score = Literal["cosine", "dot"]
Reduce = Literal["max", "mean"]

PAGE_SIZE = 16  # by default
SUMMARY = "minmax"


@dataclass(frozen=True)
class QuoKA(ChunkedMethod):
    """Tokens by their cosine with the queries that differ most from the mean query.

    Attributes:
        queries: kept of each chunk (N_Q of the paper).
        mode: "shared": the heads of a group keep the same queries; "paired_sorted": each head its own, averaged by
            rank, as in the paper; "max_of_mean_exact": each head its own and its own scores, averaged only then.
        score: "cosine", or "dot" for products, which favour keys of large norm.
        reduce: over the kept queries, "max" or "mean".
        prefilter: rank pages by the bound of their summaries first, and score the tokens of the best ones alone: as
            many pages as hold ``prefilter`` times the tokens to select, rounded up. 0 scores every token. Pages that
            are candidates in part, at either end, are always scored and do not count.
        page_size: tokens per page, for ``prefilter``.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    source: ClassVar[str] = "arXiv 2602.08722"
    not_in_batches = ((lambda rule: rule.method.prefilter, "prefilter ranks pages segment by segment; leave it out"),)

    queries: int = knob(16, 1)
    mode: Mode = knob("shared")
    score: Score = knob("cosine")
    reduce: Reduce = knob("max")
    prefilter: float = 0
    page_size: int = knob(PAGE_SIZE, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.prefilter(self.prefilter, "token")
        if self.page_size != PAGE_SIZE and not self.prefilter:
            raise UnusedOption(
                f"page_size={self.page_size} means nothing without prefilter; add for instance prefilter=8."
            )

    @property
    def summaries(self) -> tuple[str, ...]:  # type: ignore[override]
        return (SUMMARY,) if self.prefilter else ()

    @property
    def summary_page_size(self) -> int:
        return self.page_size

    def new_state(self, shape: LayerShape) -> KeyNorms | None:
        return KeyNorms() if self.score == "cosine" else None

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        norms = KeyNorms.BYTES * shape.num_kv_heads if self.score == "cosine" else 0
        return super().state_bytes_per_token(shape) + norms

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        cosine, exact = self.score == "cosine", self.mode == "max_of_mean_exact"
        kept = kept_queries(queries, 1, shape.num_kv_heads, self.queries, self.mode, cosine)[0]
        if not cosine:
            kept = kept * shape.scale  # the largest number in half precision is 65504
        num_heads, tokens = shape.group_size if exact else 1, candidates.tokens
        norms = state.norms(reader, tokens.start, tokens.stop) if cosine else None
        pages = whole_blocks(candidates, self.page_size)
        keep = ceil(self.prefilter * limit.units / self.page_size)
        if not self.prefilter or keep >= len(pages):
            scores = key_scores(kept, reader.keys(tokens.start, tokens.stop), norms, self.reduce, num_heads)
            return Selection(top_units(scores, limit.units) + candidates.first, 1, full=True)
        best = top_units(self._page_scores(kept, num_heads, norms, pages, candidates, reader), keep) + pages.start
        units = pages_in(best, candidates, self.page_size)  # [num_kv_heads, num_units]
        before = reader.keys(tokens.start, pages.start * self.page_size)
        after = reader.keys(pages.stop * self.page_size, tokens.stop)
        keys = torch.cat([before, reader.keys_of(best), after], 1)  # of the units
        norms = None if norms is None else norms.gather(1, units - candidates.first)
        best = top_units(key_scores(kept, keys, norms, self.reduce, num_heads), limit.units)
        return Selection(units.gather(1, best), 1, full=True)

    def select_segments(
        self, state: Any, shape: LayerShape, queries: Tensor, requests: SegmentRequests, reader: KVReader
    ) -> Sequence[Selection]:
        if self.prefilter:
            return super().select_segments(state, shape, queries, requests, reader)
        cosine, exact = self.score == "cosine", self.mode == "max_of_mean_exact"
        kept = kept_queries(queries, len(requests), shape.num_kv_heads, self.queries, self.mode, cosine)
        if not cosine:
            kept = kept * shape.scale
        if exact:  # a list of probes for each query head
            kept = kept.unflatten(2, (shape.group_size, -1)).flatten(1, 2)
        tokens = requests.choices.candidates[-1].tokens
        keys, table = reader.paged_keys(tokens.start, tokens.stop)
        scores = probe_scores(kept.to(queries.dtype), keys, table, tokens, cosine=cosine, mean=self.reduce == "mean")
        if exact:
            scores = scores.unflatten(1, (shape.num_kv_heads, -1)).mean(2)
        return best_of_segments(scores, requests)

    def _page_scores(
        self, kept: Tensor, num_heads: int, norms: Tensor | None, pages: range, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        """Bounds of the products of whole candidate pages with the kept queries, [num_kv_heads, num_pages]."""
        rows = reader.summary(SUMMARY, slice(pages.start, pages.stop))
        bounds = reduced(page_scores(SUMMARIES[SUMMARY].features(kept), rows), self.reduce, num_heads)
        if norms is None:
            return bounds
        # the bound of a page grows with the norms of its keys
        first = pages.start * self.page_size - candidates.first
        inside = norms[:, first : first + len(pages) * self.page_size].unflatten(1, (len(pages), self.page_size))
        return bounds * inside.mean(-1)


def kept_queries(queries: Tensor, num_segments: int, num_kv_heads: int, count: int, mode: Mode, cosine: bool) -> Tensor:
    """Return the queries least like the mean query of their head, prepared for a product with the keys; all if few.

    queries [num_query_heads, num_segments * num_queries, head_dim] -> float32 [num_segments, num_kv_heads, num_kept,
    head_dim]: unit queries (with ``cosine``) averaged over the heads of the group, or the queries of all its heads one
    after the other (``max_of_mean_exact``).
    """
    mean = mode != "max_of_mean_exact"
    if queries.shape[1] > num_segments * count:
        unlike = unlikeness(queries, num_segments, count)
        return pick_queries(queries, unlike, num_kv_heads, count, shared=mode == "shared", mean=mean, unit=cosine)
    q = queries.float().unflatten(1, (num_segments, -1)).transpose(0, 1).unflatten(1, (num_kv_heads, -1))
    return averaged(q, mean=mean, unit=cosine)


def key_scores(kept: Tensor, keys: Tensor, norms: Tensor | None, reduce: Reduce, num_heads: int = 1) -> Tensor:
    """Score each key: its product with the kept queries, reduced over them, times its inverse norm.

    kept float32 [num_kv_heads, num_kept, head_dim], of ``num_heads`` query heads one after the other; keys
    [num_kv_heads, num_keys, head_dim]; norms float32 [num_kv_heads, num_keys], or None -> float32 [num_kv_heads,
    num_keys].
    """
    products = _products(kept.to(keys.dtype), keys)  # a float32 copy of the keys costs more than the product
    # the factor of a key is positive, so it applies after the reduction
    scores = reduced(products, reduce, num_heads)
    return scores if norms is None else scores * norms


def _products(kept: Tensor, keys: Tensor) -> Tensor:
    """[num_kv_heads, num_kept, num_keys], in the dtype of the keys."""
    if keys.is_cuda:
        return kept @ keys.mT
    # head by head: on the host, a batched product copies keys that are a view of a pool
    products = kept.new_empty(*kept.shape[:2], keys.shape[1])
    for head, head_keys in enumerate(keys):
        torch.mm(kept[head], head_keys.mT, out=products[head])
    return products


def reduced(products: Tensor, reduce: Reduce, num_heads: int) -> Tensor:
    """[num_kv_heads, num_heads * num_kept, count] -> float32 [num_kv_heads, count]: reduced over the kept queries
    of each head, then averaged over heads."""
    products = products.unflatten(1, (num_heads, -1))
    by_head = products.amax(2).float() if reduce == "max" else products.mean(2, dtype=torch.float32)
    return by_head.mean(1)
