"""H2O: heavy hitters, the tokens that queries attended to so far, and recent ones (https://arxiv.org/abs/2306.14048).

score(j) = sum over past queries i of softmax_j(scale * q_i . k_j), over the tokens that i saw,

summed over the query heads of a KV head, which keep the same tokens. Above the budget, the tokens of lowest score that
are not recent are dropped for good, with their scores: hidden by default, freed with ``evict=true``. Early tokens are
seen by more queries than late ones, as in the paper.

Column sums need attention weights, which no fused kernel returns: they are computed again, some queries at a time.
Memory grows linearly with the context; time grows with its square, by one more product of queries and keys.

Deviations from the paper:
- the recent tokens are the window, and of the rest of the budget the share ``recent``, half by default as in the paper;
- sinks are visible whatever their score, as for every method; give sinks=0 for the paper's;
- budgets are in tokens or a share of the context so far; the paper's are shares of the prompt;
- in prefill tokens are dropped once per segment of queries, before it is answered;
- ``mode="oneshot"`` drops generated tokens last, as they have no scores;
- where no query has been counted yet, the query being answered ranks the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsift.methods.base import Phase
from kvsift.methods.checks import knob
from kvsift.methods.common.dropped_tokens import DroppedTokens, keys_of
from kvsift.methods.common.dropping import DroppingMethod, DroppingState, attention_weights
from kvsift.methods.traits import Traits
from kvsift.types import Candidates, KVReader, LayerShape

MAX_WEIGHTS = 1 << 25  # at once: 128 MiB

Mode = Literal["online", "oneshot", "decode_only"]


SUMMED_QUERIES = 64  # whose weights are summed together, cut at its multiples
SNAPSHOT = 256  # tokens from one remembered sum to the next; a multiple of SUMMED_QUERIES


class Sums(NamedTuple):
    """Scores by the queries before ``position``, ``counted`` of them."""

    position: int
    counted: int
    scores: Tensor | None  # float32 [num_kv_heads, capacity], 0 from ``position`` on

    def copied(self) -> Sums:
        """A copy in memory of its own."""
        return self if self.scores is None else self._replace(scores=self.scores[:, : self.position].clone())


NOTHING = Sums(0, 0, None)


class HeavyState(DroppingState):
    """The state of a dropping method, and the running sums.

    The sums at two earlier positions are kept unchanged: after a roll-back, summing starts again from there.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows, wanted=2 * SNAPSHOT + SUMMED_QUERIES)
        self.sums = NOTHING
        self.earlier = (NOTHING, NOTHING)
        self._new: tuple[tuple[int, Tensor], ...] = ()  # (position of the first, queries) of the present chunk

    def observe(self, queries: Tensor | None, start: int, stop: int) -> None:
        """Receive the queries of new tokens; queries that are not counted yet are kept until they are."""
        before = self.queries.read(self.sums.position, start) if self.sums.position < start else None
        self._new = () if before is None else ((self.sums.position, before.clone()),)
        self._new += () if queries is None else ((start, queries),)
        super().observe(queries, start, stop)

    def read(self, start: int, stop: int) -> Tensor | None:
        """Queries at positions start to stop, [num_query_heads, stop - start, head_dim]; None if one is unknown."""
        parts = [
            part[:, max(start - first, 0) : stop - first]
            for first, part in self._new
            if first < stop and start < first + part.shape[1]
        ]
        if sum(part.shape[1] for part in parts) == stop - start:
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return self.queries.read(start, stop)

    def end_chunk(self) -> None:
        """Discard the queries of a counted chunk; those of an incomplete block are among the newest queries."""
        self._new = ()

    def update(self, sums: Sums) -> None:
        """Set the running sums, and keep a copy of them at every snapshot."""
        self.sums = sums
        if sums.position % SNAPSHOT == 0:
            self.earlier = (self.earlier[1], sums.copied())

    def can_crop(self, length: int) -> bool:
        return self.earlier[0].position <= length and self.queries.first <= self.earlier[0].position

    def fork(self) -> Self:
        other = super().fork()
        other.sums = self.sums.copied()
        return other

    def crop(self, length: int) -> None:
        super().crop(length)
        self._new = ()
        if self.sums.position > length:
            valid = [sums for sums in self.earlier if sums.position <= length] or [NOTHING]
            self.sums, self.earlier = valid[-1].copied(), (valid[0], valid[-1])


@dataclass(frozen=True)
class H2O(DroppingMethod):
    """Tokens with the largest sum of softmax weights over past queries.

    Attributes:
        mode: whose weights are summed: of all queries ("online"), of the prompt's alone ("oneshot"), or of generated
            tokens alone ("decode_only", which has no answer for prefill).
        recent: share of what the budget leaves besides sinks and window that goes to the most recent tokens.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    traits: ClassVar[Traits] = DroppingMethod.traits._replace(compares_heads=True)
    source: ClassVar[str] = "arXiv 2306.14048"

    mode: Mode = knob("online")
    recent: float = knob(0.5, is_share=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "decode_only":
            self._imply(phases=("decode",))

    def new_state(self, shape: LayerShape) -> HeavyState:
        return HeavyState(self.num_rows(shape))

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        return (DroppedTokens.BYTES + 3 * 4) * self.num_rows(shape)  # the sums, and two earlier ones

    def follow(self, state: Any, shape: LayerShape, start: int, stop: int, phase: Phase, reader: KVReader) -> None:
        super().follow(state, shape, start, stop, phase, reader)
        # whole blocks of the prompt, wherever its chunks end
        self._count(state, shape, stop if phase == "decode" else stop // SUMMED_QUERIES * SUMMED_QUERIES, reader)
        state.end_chunk()

    def rank(
        self, state: HeavyState, shape: LayerShape, queries: Tensor, start: int, left: Tensor, reader: KVReader
    ) -> Tensor:
        self._count(state, shape, start, reader)
        if state.sums.scores is None:
            keys = keys_of(reader, left, start, state.drops.ragged)
            is_token = left.unsqueeze(1).to(keys.device) >= 0 if state.drops.ragged else None
            return by_kv_head(shape, attention_weights(shape, queries[:, :1], keys, is_token)).to(left.device)
        scores = pad(state.sums.scores, (0, max(start - state.sums.scores.shape[1], 0)))
        worth = scores.gather(1, state.drops.index(left).to(scores.device)).to(left.device)
        return worth if self.mode != "oneshot" else _generated_last(state, left, worth)

    def prefer(self, worth: Tensor, count: int) -> Tensor:
        worth[:, worth.shape[1] - int(self.recent * count) :] = torch.inf
        return worth

    def own(self, state: HeavyState, start: int, candidates: Candidates, count: int) -> int:
        # the recent tokens, and before them the generated ones where those are dropped last
        first, stop = candidates.first, min(candidates.stop - int(self.recent * count), start)
        runs = state.generated if self.mode == "oneshot" and state.sums.scores is not None else ()
        return candidates.stop - stop + sum(max(min(end, stop) - max(begin, first), 0) for begin, end in runs)

    @torch.inference_mode()  # sums outlive the block they were made in
    def _count(self, state: HeavyState, shape: LayerShape, stop: int, reader: KVReader) -> None:
        """Add the weights of the queries before ``stop`` that were not counted yet, block by block."""
        while (start := state.sums.position) < stop:
            edges = [edge for run in state.generated for edge in run if edge > start]
            last = min(stop, (start // SUMMED_QUERIES + 1) * SUMMED_QUERIES, *edges)
            prompt = not state.is_generated(start, last)
            counts = self.mode == "online" or prompt == (self.mode == "oneshot")
            queries = state.read(start, last) if counts else None
            sums = state.sums._replace(position=last)
            state.update(sums if queries is None else self._added(state, shape, sums, queries, start, reader))

    def _added(
        self, state: HeavyState, shape: LayerShape, sums: Sums, queries: Tensor, start: int, reader: KVReader
    ) -> Sums:
        """Add the weights of queries from ``start`` on, [num_query_heads, num_queries, head_dim], to the sums."""
        stop, drops = sums.position, state.drops
        tokens = drops.left_for(start, stop, queries.device)  # those that the first query saw, and later ones
        keys = keys_of(reader, tokens, stop, drops.ragged)
        tokens, scores = tokens.to(keys.device), _room(sums.scores, shape, keys, stop)
        # causality concerns the block's own tokens alone, unless some were dropped within it (a roll-back) or there are
        # pads
        open_from = 0 if drops.newest > start or drops.ragged else tokens.shape[1] - (stop - start)
        tile = max(1, MAX_WEIGHTS // (shape.num_query_heads * keys.shape[1]))
        for first in range(start, stop, tile):
            positions = torch.arange(first, min(first + tile, stop), device=keys.device)
            seen = drops.seen(tokens[:, open_from:], positions)
            weights = attention_weights(shape, queries[:, first - start : first - start + tile], keys, seen)
            scores.scatter_add_(1, drops.index(tokens), by_kv_head(shape, weights))  # of a pad: 0
        return Sums(stop, sums.counted + stop - start, scores)


def by_kv_head(shape: LayerShape, weights: Tensor) -> Tensor:
    """[num_query_heads, num_queries, count] -> [num_kv_heads, count], summed over queries and the heads of a group."""
    return weights.sum(1).unflatten(0, (shape.num_kv_heads, -1)).sum(1)


def _room(scores: Tensor | None, shape: LayerShape, like: Tensor, stop: int) -> Tensor:
    """Scores with room for the tokens before ``stop``."""
    if scores is None:
        return torch.zeros(shape.num_kv_heads, stop, dtype=torch.float32, device=like.device)
    capacity = scores.shape[1]
    return scores if stop <= capacity else pad(scores, (0, max(stop, capacity * 5 // 4) - capacity))


def _generated_last(state: HeavyState, left: Tensor, worth: Tensor) -> Tensor:
    """Worths that drop generated tokens, which have no scores, after all others, the oldest first."""
    most = worth.amax() + 1
    for start, stop in state.generated:
        worth = torch.where((start <= left) & (left < stop), most + (left - start), worth)
    return worth
