"""CritiPrefill: blocks of keys that a segment of queries finds critical (https://arxiv.org/abs/2409.12490).

The largest and smallest numbers per channel represent the queries of a segment and the keys of a block. Their products
give a share of attention per block, which is averaged with that of the layer below.

Deviation from the paper and its code:
- the segment itself is always visible, with exact causality, and so are sinks and window; only earlier blocks are
  candidates, so the softmax excludes the future, and the last segment is treated like any other;
- products are scaled as logits are (``scaled``): otherwise the softmax is nearly one-hot, and fusion adds two winners;
- the pools of the keys are the page summaries of the store, merged over the pages of a block, as in Quest;
- ``rest`` estimates what is not selected: every block as block_size tokens of its mean key and mean value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import log
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvsift.errors import InvalidValue, UnusedOption
from kvsift.kernels.extremes import extremes
from kvsift.kernels.page_summary import SUMMARIES
from kvsift.kernels.sketch import unpack_means
from kvsift.methods.base import Method, Phase
from kvsift.methods.checks import knob
from kvsift.methods.scoring import top_units
from kvsift.methods.segment_batch import SegmentRequests, best_of_segments
from kvsift.methods.traits import Traits
from kvsift.native.sketch_format import SketchLayout, random_rotation
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Part, Selection

Estimator = Literal["code", "paper", "bound"]

SUMMARY, MEANS = "minmax", "sketch1"  # of the latter, the means alone are read
MAX_PRODUCTS = 1 << 24  # of queries and keys, per channel, in memory at once: 64 MiB


@dataclass(frozen=True)
class CritiPrefill(Method):
    """Blocks by the extremes of their keys and of the segment's queries, averaged from layer to layer.

    Attributes:
        segment: prefill queries that share a selection.
        block: tokens per block, whole pages.
        page_size: tokens per page of the summaries.
        estimator: "code": the middle of the queries' extremes times either extreme of the keys, the larger; "paper":
            the shares of the four products of extremes, averaged over the queries' and the larger; "bound": the largest
            logit that a query of the segment and a key of the block could have.
        fusion: average a segment's shares with those of the nearest selecting layer below.
        weight_current: weight of this layer in that average; by default 0.75, and 0.25 with ``estimator="paper"``.
        scaled: multiply products by the softmax scale, which the paper and its code leave out.
        rest: estimate what is not selected; false: leave it out.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill",)
    traits: ClassVar[Traits] = Traits(granularity="block")
    source: ClassVar[str] = "arXiv 2409.12490"
    not_in_batches = ((lambda rule: rule.method.rest, "rest estimates segment by segment; leave it out"),)

    segment: int = knob(512, 16)
    block: int = knob(32, 1)
    page_size: int = knob(16, 1)
    estimator: Estimator = knob("code")
    fusion: bool = knob(True)
    weight_current: float | None = knob(None, is_share=True)
    scaled: bool = knob(True)
    rest: bool = knob(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block % self.page_size:
            raise InvalidValue(
                f"block={self.block} must be a multiple of page_size={self.page_size}: blocks are pages."
            )
        if self.weight_current is not None and not self.fusion:
            raise UnusedOption(f"weight_current={self.weight_current} means nothing without fusion; leave it out.")

    @property
    def segment_size(self) -> int:  # type: ignore[override]
        return self.segment

    @property
    def unit_size(self) -> int:
        return self.block

    @property
    def summaries(self) -> tuple[str, ...]:  # type: ignore[override]
        return (SUMMARY, MEANS) if self.rest else (SUMMARY,)

    @property
    def summary_page_size(self) -> int:
        return self.page_size

    @property
    def budget_defaults(self) -> dict[str, Any]:
        return {"dense_layers": (0,)}

    @property
    def weight(self) -> float:
        """Weight of this layer in the fusion."""
        if self.weight_current is not None:
            return self.weight_current
        return 0.25 if self.estimator == "paper" else 0.75

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        per_block = self.block // self.page_size
        pages = reader.summary(SUMMARY, slice(candidates.first * per_block, candidates.stop * per_block))
        pooled = extremes(queries, queries.shape[1]) * (shape.scale if self.scaled else 1.0)
        shares = block_shares(pooled, block_rows(pages, per_block), self.estimator)[:, 0]  # [num_kv_heads, count]
        if self.fusion:
            shares = averaged(shares, reader.from_below(), self.weight)
            reader.pass_up(shares)
        chosen = Selection(top_units(shares, limit.units) + candidates.first, self.block, full=True)
        return replace(chosen, extra=self._rest(shape, queries, chosen, candidates, reader)) if self.rest else chosen

    def select_segments(
        self, state: Any, shape: LayerShape, queries: Tensor, requests: SegmentRequests, reader: KVReader
    ) -> Sequence[Selection]:
        if self.rest:
            return super().select_segments(state, shape, queries, requests, reader)
        choices, per_block = requests.choices, self.block // self.page_size
        candidates = choices.candidates[-1]
        pages = reader.summary(SUMMARY, slice(candidates.first * per_block, candidates.stop * per_block))
        pooled = extremes(queries, choices.num_queries) * (shape.scale if self.scaled else 1.0)
        visible = choices.counts.on(queries.device)[:, 0]
        shares = block_shares(pooled, block_rows(pages, per_block), self.estimator, visible)
        if self.fusion:
            shares = averaged(shares, reader.from_below(), self.weight)
            reader.pass_up(shares)
        return best_of_segments(shares.transpose(0, 1), requests)

    def _rest(
        self, shape: LayerShape, queries: Tensor, chosen: Selection, candidates: Candidates, reader: KVReader
    ) -> Part:
        """Estimate attention to the candidates that are not chosen; logits are float32 [num_kv_heads, group_size,
        num_queries, count]."""
        per_block = self.block // self.page_size
        rows = reader.summary(MEANS, slice(candidates.first * per_block, candidates.stop * per_block))
        means = unpack_means(rows, SketchLayout(1, shape.head_dim, self.page_size))
        keys, values = (mean.unflatten(1, (-1, per_block)).mean(2) for mean in means)  # [num_kv_heads, count, head_dim]
        rotated = (queries.float() * shape.scale) @ random_rotation(shape.head_dim, queries.device)
        logits = shape.capped(rotated.unflatten(0, (len(keys), -1)) @ keys.unsqueeze(1).mT)
        seen = torch.zeros(logits.shape[0], candidates.count, dtype=torch.bool, device=logits.device)
        seen.scatter_(1, chosen.units - candidates.first, True)
        logits = logits.masked_fill(seen[:, None, None], -torch.inf) + log(self.block)
        output = logits.softmax(-1) @ values.unsqueeze(1)
        return Part(output.flatten(0, 1).unsqueeze(0), logits.logsumexp(-1).flatten(0, 1).unsqueeze(0))


def block_rows(pages: Tensor, per_block: int) -> Tensor:
    """Merge summaries of pages into those of blocks, [num_kv_heads, count, width]."""
    merge = SUMMARIES[SUMMARY].merge
    assert merge is not None
    return pages if per_block == 1 else merge(pages.unflatten(1, (-1, per_block)))


def block_shares(pooled: Tensor, rows: Tensor, estimator: Estimator, visible: Tensor | None = None) -> Tensor:
    """Estimate the share of each block of the attention of each segment, averaged over the heads of the group.

    Args:
        pooled: float32 [num_query_heads, num_segments, 2 * head_dim], scaled, maxima first.
        rows: [num_kv_heads, num_blocks, 2 * head_dim], maxima first.
        estimator: see ``CritiPrefill``.
        visible: int [num_segments], how many blocks from the first on each segment may see; None for all. What it
            may not see has share 0, and so has everything where it may see nothing.

    Returns:
        float32 [num_kv_heads, num_segments, num_blocks].
    """
    highest, lowest = pooled.unflatten(0, (rows.shape[0], -1)).chunk(2, -1)  # [num_kv_heads, group_size, segments, dim]
    top, bottom = rows.float().chunk(2, -1)  # [num_kv_heads, num_blocks, head_dim]
    hidden = None
    if visible is not None:
        hidden = torch.arange(rows.shape[1], device=rows.device) >= visible.unsqueeze(1)  # [num_segments, num_blocks]

    def products(queries: Tensor, keys: Tensor) -> Tensor:
        return (queries.flatten(1, 2) @ keys.mT).unflatten(1, queries.shape[1:3])

    if estimator == "paper":
        corners = [
            torch.stack([_softmax(products(queries, keys), hidden) for queries in (highest, lowest)]).mean(0)
            for keys in (top, bottom)
        ]
        return torch.maximum(*corners).mean(1)
    if estimator == "bound":
        logits = _bounds(highest, lowest, top, bottom)
    else:
        middle = (highest + lowest) / 2
        logits = torch.maximum(products(middle, top), products(middle, bottom))
    return _softmax(logits.mean(1), hidden)


def averaged(shares: Tensor, below: Tensor | None, weight: float) -> Tensor:
    """Average shares with the averages of the layer below."""
    return shares if below is None else weight * shares + (1 - weight) * below.to(shares.device)


def _bounds(highest: Tensor, lowest: Tensor, top: Tensor, bottom: Tensor) -> Tensor:
    """Sum over channels of the largest product of a number between lowest and highest with one between bottom and top,
    [num_kv_heads, group_size, num_segments, num_blocks]. A maximum per channel is no matrix product."""
    tile = max(1, MAX_PRODUCTS // max(1, highest.numel()))
    sums = []
    for first in range(0, top.shape[1], tile):
        keys = [part[:, None, None, first : first + tile] for part in (top, bottom)]
        corners = (queries.unsqueeze(3) * key for queries in (highest, lowest) for key in keys)
        sums.append(reduce(torch.maximum, corners).sum(-1))
    return torch.cat(sums, -1)


def _softmax(logits: Tensor, hidden: Tensor | None) -> Tensor:
    if hidden is None:
        return logits.softmax(-1)
    # hidden blocks must take no share; the softmax of an empty row is NaN
    return logits.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)
