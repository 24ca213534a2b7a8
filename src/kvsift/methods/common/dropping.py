"""Base class of the methods that drop tokens for good: H2O, TOVA, SnapKV.

By default dropped tokens are only hidden: the store keeps their keys and values, and no later selection has them. With
``evict=true`` the store frees them (``stores.evicting``); the answers are the same. A cache that has evicted tokens
cannot be rolled back or compared with dense attention, and takes another prompt only if prompts are dropped too.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvsift.errors import InvalidMethod
from kvsift.methods.base import Method, Phase
from kvsift.methods.checks import knob
from kvsift.methods.common.dropped_tokens import DroppedTokens, select_remaining, select_remaining_shared
from kvsift.methods.common.recent_queries import RecentQueries
from kvsift.methods.traits import Traits
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection


class DroppingState:
    """State of one sequence in one layer: dropped tokens, the newest queries, and which tokens were generated.

    Args:
        num_rows: heads that drop tokens of their own.
        wanted: newest queries that stay available.
    """

    def __init__(self, num_rows: int, wanted: int) -> None:
        self.drops, self.queries = DroppedTokens(num_rows), RecentQueries(wanted)
        self.generated: tuple[tuple[int, int], ...] = ()  # runs of tokens, start and stop; the others were prompt
        self.unknown_stop = 0  # tokens whose queries are unknown all precede this position
        self._checkpoint: DroppingState | None = None

    def observe(self, queries: Tensor | None, start: int, stop: int) -> None:
        """Receive the queries of new tokens, [num_query_heads, stop - start, head_dim]; None if they are unknown."""
        self.queries.observe(queries, start, stop)
        if queries is None:
            self.unknown_stop = stop

    def record_phase(self, start: int, stop: int, phase: Phase) -> None:
        """Record whether the tokens start to stop were prompt, or generated."""
        if phase == "prefill":
            return
        joins = bool(self.generated) and self.generated[-1][1] == start
        first = self.generated[-1][0] if joins else start
        self.generated = (*(self.generated[:-1] if joins else self.generated), (first, stop))

    def is_generated(self, start: int, stop: int) -> bool:
        """Whether all tokens from start to stop were generated."""
        return any(first <= start and stop <= last for first, last in self.generated)

    def checkpoint(self) -> None:
        """Remember the present length: the state may be rolled back to it from any later one."""
        self._checkpoint = None
        self._checkpoint = self.fork()

    def can_crop(self, length: int) -> bool:
        """Whether the state is complete after a roll-back to ``length``, without a checkpoint."""
        return self.queries.first <= max(length - self.queries.wanted, 0)

    def fork(self) -> Self:
        other = copy(self)
        other.drops, other.queries = self.drops.fork(), self.queries.fork()
        return other

    def crop(self, length: int) -> None:
        if length >= self.queries.length:
            return
        saved = self._checkpoint
        if saved is not None and length <= saved.queries.length:
            if length == saved.queries.length or not self.can_crop(length):  # freed tokens cannot be counted again
                vars(self).update(vars(saved.fork()))
            self._checkpoint = saved if length == saved.queries.length else None
        self.unknown_stop = min(self.unknown_stop, length) if self.can_crop(length) else length
        self.drops.crop(length)
        self.queries.crop(length)
        self.generated = tuple((start, min(stop, length)) for start, stop in self.generated if start < length)


@dataclass(frozen=True)
class DroppingMethod(Method):
    """A method that drops tokens for good; a subclass defines ``rank``.

    Attributes:
        evict: free dropped tokens, instead of only hiding them.
    """

    traits: ClassVar[Traits] = Traits(keeps_all=False, wants_queries=True, follows=True)

    evict: bool = knob(False)

    def observe(
        self, state: Any, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        state.observe(queries, start, start + keys.shape[1])

    def checkpoint(self, state: Any) -> None:
        state.checkpoint()

    def follow(self, state: Any, shape: LayerShape, start: int, stop: int, phase: Phase, reader: KVReader) -> None:
        state.record_phase(start, stop, phase)

    def rank(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, left: Tensor, reader: KVReader
    ) -> Tensor:
        """Worth of each remaining token, float32 [num_rows, count]; those of smallest worth are dropped.

        ``left`` int64 [num_rows, count], ascending, are the remaining tokens before ``start``. If ``state.drops`` are
        ragged they follow pads, whose worth is ignored.
        """
        raise InvalidMethod(f"{type(self).__name__} does not define rank")

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        def worth(left: Tensor) -> Tensor:
            return self.rank(state, shape, queries, start, left, reader)

        def own() -> int:
            return self.own(state, start, candidates, limit.units)

        drops, device = state.drops, queries.device
        if limit.adaptive:
            return select_remaining_shared(drops, candidates, limit, start, device, worth, self.prefer, own)
        return select_remaining(drops, candidates, limit, start, device, worth, self.prefer)

    def prefer(self, worth: Tensor, count: int) -> Tensor:
        """Set the worth of tokens that are always kept to inf: float32 [num_rows, remaining tokens], of which ``count``
        are kept."""
        return worth

    def own(self, state: Any, start: int, candidates: Candidates, count: int) -> int:
        """Candidates that each head keeps for the query at ``start`` whatever its share of attention, when heads are
        compared and keep ``count`` in the mean. Called after ``rank``; they must rank above all others."""
        return 0

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        return DroppedTokens.BYTES * self.num_rows(shape)

    def num_rows(self, shape: LayerShape) -> int:
        """Heads that drop tokens of their own: the KV heads."""
        return shape.num_kv_heads

    def describe(self, state: Any) -> dict[str, Any]:
        """Number of dropped tokens, and whether they were freed."""
        report = dropped_report(state.drops, self.evict)
        return report if not state.unknown_stop else {**report, "queries_unknown_before": state.unknown_stop}


def dropped_report(drops: DroppedTokens, evict: bool) -> dict[str, Any]:
    """Statistics of dropped tokens; their number is the mean over heads that share a budget."""
    by_head = drops.num_dropped
    how = "freed" if evict else "only hidden: keys and values of all tokens are kept (evict=true frees them)"
    report = {"dropped_tokens": sum(by_head) // len(by_head), "dropped_are": how}
    return {**report, "dropped_by_head": by_head} if drops.ragged else report


def attention_weights(shape: LayerShape, queries: Tensor, keys: Tensor, seen: Tensor | None = None) -> Tensor:
    """Softmax weights in float32, [num_query_heads, num_queries, count].

    queries [num_query_heads, num_queries, head_dim]; keys [num_heads, count, head_dim], num_heads the KV heads or the
    query heads; seen bool [num_rows, num_queries, at most count], num_rows 1, the KV heads or the query heads: which of
    the last tokens each query may see. It sees all tokens before those.
    """
    grouped = queries.to(keys.device).float().unflatten(0, (len(keys), -1)).flatten(1, 2)
    logits = shape.capped(((grouped * shape.scale) @ keys.float().mT).view(len(queries), queries.shape[1], -1))
    if seen is not None:
        hidden = ~seen.repeat_interleave(len(queries) // len(seen), 0)
        logits[:, :, logits.shape[2] - hidden.shape[2] :].masked_fill_(hidden, -torch.inf)
    return logits.softmax(-1)
