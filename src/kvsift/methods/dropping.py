"""What methods that drop tokens for good have in common: H2O, TOVA, SnapKV.

By default they only hide: the store keeps every key and value, and what was dropped is never chosen again. With
``evict=true`` the store frees it (``placement.evicting``); the answers are the same. Evicting ones can then not be
rolled back, nor given another prompt unless prompts are dropped too, and nobody can say what was missed.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.methods import knobs
from kvsift.methods.base import Method, Phase
from kvsift.methods.drops import Drops
from kvsift.methods.keeping import select_left, select_left_together
from kvsift.methods.recent_queries import RecentQueries
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection


class DroppingState:
    """Memory of one sequence in one layer: what was dropped, the newest queries, and which were generated.

    Args:
        num_rows: heads that drop for themselves.
        wanted: newest queries that are asked for.
    """

    def __init__(self, num_rows: int, wanted: int) -> None:
        self.drops, self.queries = Drops(num_rows), RecentQueries(wanted)
        self.generated: tuple[tuple[int, int], ...] = ()  # runs of tokens, start and stop; the others were prompt
        self.unknown_stop = 0  # below it there are tokens whose queries nobody knows
        self._marked: DroppingState | None = None

    def observe(self, queries: Tensor | None, start: int, stop: int) -> None:
        """See the queries of new tokens, [num_query_heads, stop - start, head_dim]; None: they are not known."""
        self.queries.observe(queries, start, stop)
        if queries is None:
            self.unknown_stop = stop

    def see_phase(self, start: int, stop: int, phase: Phase) -> None:
        """The tokens start to stop were prompt, or generated."""
        if phase == "prefill":
            return
        joins = bool(self.generated) and self.generated[-1][1] == start
        first = self.generated[-1][0] if joins else start
        self.generated = (*(self.generated[:-1] if joins else self.generated), (first, stop))

    def is_generated(self, start: int, stop: int) -> bool:
        """Whether all tokens from start to stop were generated."""
        return any(first <= start and stop <= last for first, last in self.generated)

    def mark(self) -> None:
        """This length may be come back to, from however far."""
        self._marked = None
        self._marked = self.fork()

    def knows(self, length: int) -> bool:
        """Whether nothing is lacking once the tokens from position ``length`` on are taken back."""
        return self.queries.first <= max(length - self.queries.wanted, 0)

    def fork(self) -> Self:
        other = copy(self)
        other.drops, other.queries = self.drops.fork(), self.queries.fork()
        return other

    def crop(self, length: int) -> None:
        if length >= self.queries.length:
            return
        marked = self._marked
        if marked is not None and length <= marked.queries.length:
            if length == marked.queries.length or not self.knows(length):  # what was freed cannot be counted again
                self.__dict__.update(marked.fork().__dict__)
            self._marked = marked if length == marked.queries.length else None
        self.unknown_stop = min(self.unknown_stop, length) if self.knows(length) else length
        self.drops.crop(length)
        self.queries.crop(length)
        self.generated = tuple((start, min(stop, length)) for start, stop in self.generated if start < length)


@dataclass(frozen=True)
class DroppingMethod(Method):
    """A method that drops tokens once and for all: it says how to rank those that are left.

    Attributes:
        evict: free what is dropped, instead of only not reading it.
    """

    keeps_all: ClassVar[bool] = False
    wants_queries: ClassVar[bool] = True
    follows: ClassVar[bool] = True

    evict: bool = False

    def __post_init__(self) -> None:
        knobs.flag("evict", self.evict)

    def observe(
        self, state: Any, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        state.observe(queries, start, start + keys.shape[1])

    def follow(self, state: Any, shape: LayerShape, start: int, stop: int, phase: Phase, reader: KVReader) -> None:
        state.see_phase(start, stop, phase)

    def rank(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, left: Tensor, reader: KVReader
    ) -> Tensor:
        """What each token that is left is worth, float32 [num_rows, count]; the smallest are dropped.

        ``left`` int64 [num_rows, count], ascending, are all that are left of the tokens before ``start``. If
        ``state.drops`` are ragged they stand behind pads, whose worth nobody asks for.
        """
        raise InputError(f"{type(self).__name__} does not say how it ranks")

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
            return select_left_together(drops, candidates, limit, start, device, worth, self.prefer, own)
        return select_left(drops, candidates, limit, start, device, worth, self.prefer)

    def prefer(self, worth: Tensor, count: int) -> Tensor:
        """Worths float32 [num_rows, count of what is left] with those at inf that are kept whatever their worth, if
        ``count`` are kept."""
        return worth

    def own(self, state: Any, start: int, candidates: Candidates, count: int) -> int:
        """How many candidates each head keeps for the query at ``start`` that are no share of attention, when heads are
        compared and keep ``count`` in the mean; asked after ``rank``, and all of them must rank above the others."""
        return 0

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        return Drops.BYTES * self.num_rows(shape)

    def num_rows(self, shape: LayerShape) -> int:
        """Heads that drop for themselves: the KV heads."""
        return shape.num_kv_heads

    def describe(self, state: Any) -> dict[str, Any]:
        """How many tokens were dropped, by each head that drops for itself, and whether that freed anything."""
        said = dropped(state.drops, self.evict)
        return said if not state.unknown_stop else {**said, "queries_unknown_before": state.unknown_stop}


def dropped(drops: Drops, evict: bool) -> dict[str, Any]:
    """What a report says about tokens that were dropped; their number is the mean of heads that share a budget."""
    by_head = drops.num_dropped
    how = "freed" if evict else "only hidden: keys and values of all tokens are kept (evict=true frees them)"
    said = {"dropped_tokens": sum(by_head) // len(by_head), "dropped_are": how}  # whole: they drop as many in all
    return {**said, "dropped_by_head": by_head} if drops.ragged else said


def attention_weights(shape: LayerShape, queries: Tensor, keys: Tensor, seen: Tensor | None = None) -> Tensor:
    """Softmax weights in float32, [num_query_heads, num_queries, count].

    queries [num_query_heads, num_queries, head_dim]; keys [num_heads, count, head_dim], num_heads the KV heads or the
    query heads; seen bool [num_rows, num_queries, at most count], num_rows 1, the KV heads or the query heads: which of
    the last tokens each query may see. It sees all that ``seen`` does not speak of.
    """
    grouped = queries.to(keys.device).float().unflatten(0, (len(keys), -1)).flatten(1, 2)
    logits = ((grouped * shape.scale) @ keys.float().mT).view(len(queries), queries.shape[1], -1)
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    if seen is not None:
        hidden = ~seen.repeat_interleave(len(queries) // len(seen), 0)
        logits[:, :, logits.shape[2] - hidden.shape[2] :].masked_fill_(hidden, -torch.inf)
    return logits.softmax(-1)
