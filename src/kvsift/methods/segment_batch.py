"""Selection for all segments of a prefill chunk at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsift.kernels.top_pages import visible_pages
from kvsift.methods.base import SegmentRequest
from kvsift.types import Selection


def alike(requests: Sequence[SegmentRequest], num_queries: int | None = None) -> bool:
    """Whether segments have the same first candidate and the same number of queries; with ``num_queries`` given, that
    number, but for the last segment."""
    sizes = {request.queries.shape[1] for request in requests[: -1 if num_queries else None]}
    return (
        sizes <= {num_queries or requests[0].queries.shape[1]}
        and len({request.candidates.first for request in requests}) == 1
    )


def best_of_segments(scores: Tensor, requests: Sequence[SegmentRequest]) -> list[Selection]:
    """Select the units of the largest scores for each segment, ties to the lower unit.

    Args:
        scores: float32 [num_segments, num_heads, count], column i is candidate first + i; columns beyond
            the candidates of a segment are ignored.
        requests: one per segment.
    """
    spans = [(0, request.candidates.count, request.limit.units, request.candidates.count) for request in requests]
    limits = torch.tensor(spans, dtype=torch.int32).to(scores.device, non_blocking=True)
    lists, _ = visible_pages(scores, limits, max(request.limit.units for request in requests))
    first, size = requests[0].candidates.first, requests[0].candidates.unit_size
    units = lists.long() + first
    return [
        Selection(row[:, : request.limit.units], size, full=True) for row, request in zip(units, requests, strict=True)
    ]
