"""How a chunk of a prompt is cut into segments that share a selection."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

from torch import Tensor

from kvsift.kernels.segment_attention import Span, Spans
from kvsift.layer.layer_messages import LayerMessages
from kvsift.methods.segment_batch import SegmentChoices
from kvsift.plan.plan import Rule
from kvsift.stores.base import Segment, seen_densely
from kvsift.types import Limit

Bounds = tuple[tuple[int, int], ...]  # positions, start and stop of each


@dataclass(frozen=True, eq=False)
class SegmentGroup:
    """Consecutive segments of a prompt under a rule: one that is dense, or sparse ones of equal length.

    Attributes:
        rule: the rule that selects.
        is_dense: whether they see everything.
        bounds: bounds of the segments.
    """

    rule: Rule
    is_dense: bool
    bounds: Bounds

    @property
    def start(self) -> int:
        return self.bounds[0][0]

    @property
    def stop(self) -> int:
        return self.bounds[-1][1]

    @property
    def num_queries(self) -> int:
        return self.stop - self.start

    @property
    def context_tokens(self) -> int:
        """Tokens that dense attention shows, summed over the queries."""
        return seen_densely(self.start, self.stop)

    def segments(self, queries: Tensor) -> list[Segment]:
        """Each by itself; queries [num_query_heads, num_queries, head_dim] of all of them."""
        own = queries.unsqueeze(0)
        return [Segment(own[:, :, start - self.start : stop - self.start], start, stop) for start, stop in self.bounds]

    @cached_property
    def always(self) -> Bounds:
        """(sinks_stop, window_start) of each segment."""
        return tuple(self.rule.budget.always(start, self.rule.method.unit_size) for start, _ in self.bounds)

    @cached_property
    def choices(self) -> SegmentChoices:
        budget, unit_size = self.rule.budget, self.rule.method.unit_size
        candidates = tuple(budget.candidates(start, unit_size) for start, _ in self.bounds)
        limits = (
            Limit(min(budget.units(start, unit_size), each.count)) for each, (start, _) in zip(candidates, self.bounds)
        )
        return SegmentChoices(self.bounds, candidates, tuple(limits))

    @cached_property
    def spans(self) -> Spans:
        """Window and own past of each segment."""
        return Spans(
            Span(start - self.start, stop - self.start, min(window, start))
            for (start, stop), (_, window) in zip(self.bounds, self.always)
        )

    @cached_property
    def visible_always(self) -> int:
        """Sinks, window and own past, summed over the queries."""
        hidden = ((stop - start) * (window - sinks) for (start, stop), (sinks, window) in zip(self.bounds, self.always))
        return self.context_tokens - sum(hidden)

    @cached_property
    def read_always(self) -> int:
        """Tokens of sinks, windows and segments."""
        pairs = zip(self.bounds, self.always)
        return sum(sinks + max(stop - window, 0) for (_, stop), (sinks, window) in pairs)

    @cached_property
    def read_densely(self) -> int:
        """Tokens that dense attention reads."""
        return sum(stop for _, stop in self.bounds)


def groups_of(
    rule: Rule, layer: int, start: int, stop: int, messages: LayerMessages, row: int, together: int | None = None
) -> tuple[SegmentGroup, ...]:
    """The tokens ``start`` to ``stop`` of a prompt, cut at multiples of the method's segment size. Cutting at absolute
    positions makes the answer independent of how the prompt was chunked.

    Args:
        rule: the rule by which they are attended.
        layer: its number among those with full attention.
        start, stop: positions.
        messages: layers of one pass share what they do not see densely.
        row: row of the pass.
        together: segments of a group, at most; as many as there are by default.
    """
    if layer in rule.budget.dense_layers:
        return (SegmentGroup(rule, True, ((start, stop),)),)
    return messages.shared(row, ("groups", id(rule), start, stop), lambda: _groups(rule, start, stop, together))


def _groups(rule: Rule, start: int, stop: int, together: int | None) -> tuple[SegmentGroup, ...]:
    size = rule.method.segment_size

    def key(piece: tuple[int, int]) -> tuple[bool, int, int]:
        first, last = piece
        if rule.is_dense(-1, first, last):
            return True, 0, 0
        number = 0 if together is None else first // (size * together)
        return False, last - first, number if last - first == size else first

    groups = []
    for (is_dense, *_), group in groupby(pairwise([start, *range((start // size + 1) * size, stop, size), stop]), key):
        bounds = tuple(group)
        groups.append(SegmentGroup(rule, is_dense, ((bounds[0][0], bounds[-1][1]),) if is_dense else bounds))
    return tuple(groups)
