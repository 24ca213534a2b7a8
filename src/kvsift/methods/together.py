"""What methods share that answer the segments of a prefill chunk in one go."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsift.kernels.top_pages import visible_pages
from kvsift.methods.base import Asked
from kvsift.types import Selection


def alike(asked: Sequence[Asked], num_queries: int | None = None) -> bool:
    """Whether segments have the same first candidate, and each but the last ``num_queries`` queries, by default as many
    as every other."""
    sizes = {each.queries.shape[1] for each in asked[: -1 if num_queries else None]}
    return sizes <= {num_queries or asked[0].queries.shape[1]} and len({each.candidates.first for each in asked}) == 1


def best_of_segments(scores: Tensor, asked: Sequence[Asked]) -> list[Selection]:
    """The units of the largest scores for each segment, ties to the lower unit.

    Args:
        scores: float32 [num_segments, num_heads, count], column i is candidate first + i; what a segment has no
            candidate for is not looked at.
        asked: of the segments.
    """
    spans = [(0, each.candidates.count, each.limit.units, each.candidates.count) for each in asked]
    held = torch.tensor(spans, dtype=torch.int32).to(scores.device, non_blocking=True)
    lists, _ = visible_pages(scores, held, max(each.limit.units for each in asked))
    first, size = asked[0].candidates.first, asked[0].candidates.unit_size
    units = lists.long() + first
    return [Selection(of[:, : each.limit.units], size, full=True) for of, each in zip(units, asked, strict=True)]
