"""Selection for consecutive segments of a prompt at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.kernels.segment_attention import IntegerRows
from kvsift.kernels.top_pages import visible_pages
from kvsift.types import Candidates, KVReader, Limit, Selection


class SegmentRequest(NamedTuple):
    """Arguments of ``select`` for one segment."""

    queries: Tensor
    start: int
    candidates: Candidates
    limit: Limit
    reader: KVReader


@dataclass(frozen=True, eq=False)
class SegmentChoices:
    """What consecutive segments, equally long and each with candidates, may choose from. It follows from their
    positions, so that all layers of a model share it.

    Attributes:
        bounds: start and stop of each.
        candidates: those of each; the first one is the same for all.
        limits: most units of each.
    """

    bounds: tuple[tuple[int, int], ...]
    candidates: tuple[Candidates, ...]
    limits: tuple[Limit, ...]

    @property
    def num_queries(self) -> int:
        """Queries of each segment."""
        return self.bounds[0][1] - self.bounds[0][0]

    @property
    def first(self) -> int:
        """The first candidate."""
        return self.candidates[0].first

    @property
    def unit_size(self) -> int:
        """Tokens per unit."""
        return self.candidates[0].unit_size

    @cached_property
    def most(self) -> int:
        """Units that some segment may select, at most."""
        return max(limit.units for limit in self.limits)

    @cached_property
    def total(self) -> int:
        """Units that all segments may select."""
        return sum(limit.units for limit in self.limits)

    @cached_property
    def spans(self) -> IntegerRows:
        """For ``kernels.top_pages``: units before the first candidate, and the best of the candidates."""
        pairs = zip(self.candidates, self.limits)
        return IntegerRows((each.first, each.stop, limit.units, each.stop) for each, limit in pairs)

    @cached_property
    def counts(self) -> IntegerRows:
        """Candidates of each segment."""
        return IntegerRows((each.count,) for each in self.candidates)


class SegmentRequests(Sequence[SegmentRequest]):
    """One request for each segment, made when it is read: a method that selects for all of them at once reads none.

    Args:
        choices: choices of the segments.
        queries: queries of all of them, [num_query_heads, num_queries, head_dim].
        reader_of: the reader of a segment, by start and stop.
    """

    def __init__(self, choices: SegmentChoices, queries: Tensor, reader_of: Callable[[int, int], KVReader]) -> None:
        self.choices, self._queries, self._reader_of = choices, queries, reader_of

    def __len__(self) -> int:
        return len(self.choices.bounds)

    def __getitem__(self, index: Any) -> Any:
        return self._each[index]

    @cached_property
    def _each(self) -> tuple[SegmentRequest, ...]:
        choices, num_queries = self.choices, self.choices.num_queries
        each = zip(self._queries.split(num_queries, 1), choices.bounds, choices.candidates, choices.limits)
        return tuple(
            SegmentRequest(queries, start, candidates, limit, self._reader_of(start, stop))
            for queries, (start, stop), candidates, limit in each
        )


class SegmentSelections(Sequence[Selection]):
    """Selections of all segments in one tensor.

    Args:
        choices: choices of the segments; each selects as much as it may.
        lists: int32 [num_segments, num_heads, first candidate + most], units before the first candidate and selected
            ones, ascending.
        counts: int32 [num_segments, num_heads], units listed; a list is undefined behind them.
    """

    def __init__(self, choices: SegmentChoices, lists: Tensor, counts: Tensor) -> None:
        self.choices, self.lists, self.counts = choices, lists, counts

    def __len__(self) -> int:
        return len(self.lists)

    def __getitem__(self, index: Any) -> Any:
        return self._each[index]

    @cached_property
    def _each(self) -> tuple[Selection, ...]:
        units, choices = self.lists[:, :, self.choices.first :].long(), self.choices
        return tuple(
            Selection(own[:, : limit.units], choices.unit_size, full=True) for own, limit in zip(units, choices.limits)
        )


def best_of_segments(scores: Tensor, requests: SegmentRequests) -> SegmentSelections:
    """Select the units of the largest scores for each segment, ties to the lower unit.

    Args:
        scores: float32 [num_segments, num_heads, count], column i is candidate first + i; columns beyond
            the candidates of a segment are ignored.
        requests: requests for the segments.
    """
    choices = requests.choices
    capacity = choices.first + choices.most
    lists = scores.new_empty((*scores.shape[:2], capacity), dtype=torch.int32)
    counts = scores.new_empty(scores.shape[:2], dtype=torch.int32)
    visible_pages(scores, choices.spans.on(scores.device), capacity, out=(lists, counts))
    return SegmentSelections(choices, lists, counts)
