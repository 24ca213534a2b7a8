"""Sketch: tokens by logits estimated from one or two bits per channel; what is not selected is estimated.

Each page holds its mean key and a code of each token's difference from it (``kernels.sketch``), so that every token's
weight is known roughly. The query heads that share a KV head vote for tokens, each by what a token weighs next to all
that is visible anyway, sinks and window; the tokens with the most votes are attended exactly. The others enter the
answer as pages, each with the sum of its unselected tokens' weights and the mean of its values:

    weight_i = exp(l_i - variance_i / 2),   vote_i = sum over heads of weight_i / sum of the weights of sinks and window
    rest = sum over pages of weight(page) * mean value(page) / sum of weights

An estimate with noise overstates its exponential, hence the variance. The weights of sinks and window are exact, and
known before any sketch is read. Where a mass or head budgets compare heads, votes are shares of all attention.

Sources: the code and its factor are RaBitQ's (arXiv 2405.12497); estimating what is not retrieved is RetroInfer's idea
(arXiv 2505.02922), there by clusters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvsift import native
from kvsift.kernels.sketch import Unpacked, estimated_rest, log_weights, unpack, votes
from kvsift.methods.checks import knob
from kvsift.methods.common.anchors import AnchoredMethod, from_anchor
from kvsift.methods.scoring import RANKS, ScoringMethod, chosen_units, own_ranking, units_per_head
from kvsift.methods.traits import Traits
from kvsift.native.shapes import HeadRows, PooledRows
from kvsift.native.sketch_format import SketchLayout, sketch_layout
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Part, Selection


@dataclass(frozen=True)
class Sketch(AnchoredMethod, ScoringMethod):
    """Tokens by logits estimated from codes of their keys, and an estimate of the rest, in decode; prefill is dense.

    Attributes:
        bits: per channel of a key.
        page_size: tokens that share a mean; a row of bytes per page holds their codes.
        rest: estimate what is not selected; false: leave it out.
        anchors: file from kvsift calibrate --layers that says which layers select; the others attend the same tokens,
            without an estimate of the rest. Without a file every layer selects.
    """

    traits: ClassVar[Traits] = RANKS._replace(weighs_past=True)
    source: ClassVar[str] = "arXiv 2405.12497"
    not_captured = (
        (lambda rule: own_ranking(rule.method, Sketch),
         "{it.name} has its own {found}; the kernels rank tokens as sketch does"),
        (lambda rule: rule.method.heads == "query",
         "heads=query gives every query head tokens of its own; the kernels choose them for each KV head"),
    )  # fmt: skip

    bits: Literal[1, 2] = knob(1, 1, 2)
    page_size: int = knob(16, 1)
    rest: bool = knob(True)

    @cached_property
    def summaries(self) -> tuple[str, ...]:  # type: ignore[override]
        return (f"sketch{self.bits}",)

    @property
    def summary_page_size(self) -> int:
        return self.page_size

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        plain = limit.mass is None and not limit.adaptive
        reused = None if state is None else from_anchor(state, reader)
        if reused is not None and reused.shape[1] <= limit.units:  # else of a layer with a larger budget
            return Selection(reused, 1, full=plain)
        packed, skipped = self._packed(candidates, reader)
        layout, past = sketch_layout(self.bits, shape.head_dim, self.page_size), limit.always_lse
        past = queries.new_full(queries.shape[:2], -torch.inf, dtype=torch.float32) if past is None else past
        query = queries[:, 0]  # [num_query_heads, head_dim]; alone, the compiled core selects for it
        if plain and shape.softcap is None and queries.shape[1] == 1 and native.sketches_fit(query, packed, layout):
            ids, values, lse = native.choose_sketched(
                query, packed, layout, shape.scale, skipped, candidates.count, limit.units, self.num_selections(shape),
                past[:, 0],
            )  # fmt: skip
            rest = self.rest and limit.units < candidates.count
            extra = Part(values[None, :, None], lse[None, :, None]) if rest else None
            chosen = Selection(ids + candidates.first, candidates.unit_size, extra=extra, full=True)
        else:
            chosen = self._select_in_torch(shape, queries, candidates, limit, past, _unpacked(packed, layout), skipped)
        if self.anchors is not None:
            reader.pass_up(chosen.units, keep=True)
        return chosen

    def _select_in_torch(
        self, shape: LayerShape, queries: Tensor, candidates: Candidates, limit: Limit, past_lse: Tensor,
        rows: Unpacked, skipped: int,
    ) -> Selection:  # fmt: skip
        weights = self._log_weights(shape, queries, rows)[..., skipped : skipped + candidates.count]
        keep = None
        if limit.mass is None and not limit.adaptive:
            by_list = votes(weights, past_lse, self.num_selections(shape))
        else:
            total = torch.logaddexp(weights.logsumexp(-1), past_lse)
            shares = (weights - total.unsqueeze(-1)).exp().mean(1)  # [num_query_heads, count]
            by_list = shares.unflatten(0, (self.num_selections(shape), -1)).mean(1)
            keep = units_per_head(by_list, 1 - by_list.sum(-1), limit)
        chosen = chosen_units(by_list, keep, limit, candidates)
        if not self.rest or (chosen.units.shape[1] == candidates.count and chosen.full):
            return chosen
        places = torch.where(chosen.units < 0, candidates.count, chosen.units - candidates.first)
        extra = estimated_rest(weights[:, 0], places, rows.value_means, self.page_size, skipped)
        return replace(chosen, extra=extra)

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        packed, skipped = self._packed(candidates, reader)
        rows = _unpacked(packed, sketch_layout(self.bits, shape.head_dim, self.page_size))
        return self._log_weights(shape, queries, rows)[..., skipped : skipped + candidates.count]

    def _packed(self, candidates: Candidates, reader: KVReader) -> tuple[HeadRows, int]:
        """Rows of the pages of the candidates, and how many tokens of them come before the first candidate."""
        first, stop = candidates.first // self.page_size, -(-candidates.stop // self.page_size)
        read = getattr(reader, "summary_in_place", reader.summary)  # a reader of another make may lack it
        return read(self.summaries[0], slice(first, stop)), candidates.first - first * self.page_size

    def _log_weights(self, shape: LayerShape, queries: Tensor, rows: Unpacked) -> Tensor:
        """Logarithms of the estimated weights, float32 [num_query_heads, num_queries, num_tokens]."""
        return log_weights(queries.float() * shape.scale, rows, self.bits, shape.softcap)


def _unpacked(packed: HeadRows, layout: SketchLayout) -> Unpacked:
    return unpack(packed.gather() if isinstance(packed, PooledRows) else packed, layout)
