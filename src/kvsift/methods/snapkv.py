"""SnapKV: tokens that the end of the prompt attended to (https://arxiv.org/abs/2404.14469).

The prompt is attended in full. Then its last w queries, the observation window, vote for the tokens before them:

votes(j) = pool over neighbours of sum over q of the window of softmax_j(scale * q . k_j), the window causal in itself,

averaged over the query heads of a KV head. The window and the tokens with the most votes are kept. The others are
dropped for good: hidden by default, freed with ``evict=true``.

Deviations from the paper:
- heads that share a KV head keep the same tokens, by the mean of their votes; in the public code each query head keeps
  its own, and the cache grows by the group size: ``compat``;
- generated tokens count in the budget, where the cache of the paper grows: one that leaves the window replaces the
  prompt token with the fewest votes, and once there is none, the oldest generated token;
- sinks are visible whatever their votes, as for every method; ``compat`` has none;
- another prompt after generated tokens (a conversation) votes anew, over the remaining tokens;
- where the queries of the prompt are unknown, because another plan filled the cache, the first query to select votes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvsift.errors import Conflict, InvalidValue
from kvsift.methods.checks import knob
from kvsift.methods.common.dropped_tokens import DroppedTokens, keys_of
from kvsift.methods.common.dropping import DroppingMethod, DroppingState, attention_weights
from kvsift.methods.traits import Traits
from kvsift.types import Candidates, KVReader, LayerShape

REMEMBERED = 2  # votes: of this prompt and of the previous one, to which the sequence may be rolled back


class Vote(NamedTuple):
    """Votes of the queries before ``position``."""

    position: int
    window_start: int  # tokens from here on have no votes
    votes: Tensor  # float32 [num_rows, position]


class SnapState(DroppingState):
    """The state of a dropping method, and the votes."""

    def __init__(self, num_rows: int, wanted: int) -> None:
        super().__init__(num_rows, wanted)
        self.voted: tuple[Vote, ...] = ()

    def crop(self, length: int) -> None:
        super().crop(length)
        self.voted = tuple(vote for vote in self.voted if vote.position < length)


@dataclass(frozen=True)
class SnapKV(DroppingMethod):
    """Tokens with the largest pooled weight for the last queries of the prompt.

    Attributes:
        queries: number of queries in the observation window.
        kernel: tokens that are pooled, an odd number.
        pooling: "avg", with zeros beyond either end, or "max".
        heads: each "query" head keeps its own tokens, or the query heads of a "kv" head the same.
        compat: "code": the public code's class: a set per query head, no sinks, every layer, 320 tokens of which the
            window is 64; "paper": as its LongBench runs: 4096 tokens, of which 32, max-pooled over 7.
    """

    traits: ClassVar[Traits] = DroppingMethod.traits._replace(compares_heads=True)
    source: ClassVar[str] = "arXiv 2404.14469"

    queries: int = knob(64, 1)
    kernel: int = knob(5, 1)
    pooling: Literal["avg", "max"] = knob("avg")
    heads: Literal["kv", "query"] = knob("kv")
    compat: Literal["paper", "code"] | None = knob(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise InvalidValue(f"kernel={self.kernel} has no middle; give an odd number such as {self.kernel + 1}.")
        if self.compat is not None:
            self._imply(heads="query")
        if self.compat == "paper":
            self._imply(queries=32, kernel=7, pooling="max")
        if self.evict and self.heads == "query":
            raise Conflict(
                "evict=true stores one set of tokens per KV head, and heads='query' (or compat) keeps others for each "
                "query head. Leave one of them out."
            )

    @property
    def budget_defaults(self) -> dict[str, Any]:
        if self.compat is None:
            return {}
        # the own token of the query counts in the budget, in the paper it does not
        tokens = 4097 if self.compat == "paper" else 321
        return {"tokens": tokens, "sinks": 0, "window": self.queries + 1, "dense_layers": ()}

    def new_state(self, shape: LayerShape) -> SnapState:
        return SnapState(self.num_rows(shape), self.queries)

    def num_rows(self, shape: LayerShape) -> int:
        return shape.num_kv_heads if self.heads == "kv" else shape.num_query_heads

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        return (DroppedTokens.BYTES + 4) * self.num_rows(shape)

    def rank(
        self, state: SnapState, shape: LayerShape, queries: Tensor, start: int, left: Tensor, reader: KVReader
    ) -> Tensor:
        voted_at = state.voted[-1].position if state.voted else start
        if not state.voted or (voted_at < start and not state.is_generated(voted_at, start)):
            state.voted = (*state.voted, self._vote(state, shape, queries, start, left, reader))[-REMEMBERED:]
        _, window_start, votes = state.voted[-1]
        among = votes.gather(1, left.clamp(0, votes.shape[1] - 1))
        # votes are at most as many as queries; tokens without votes rank above all, the newest first
        return torch.where(left < window_start, among, left - window_start + self.queries + 1.0)

    def own(self, state: SnapState, start: int, candidates: Candidates, count: int) -> int:
        # tokens without votes: the same in every head, as they are dropped after all others
        return max(candidates.stop - max(state.voted[-1].window_start, candidates.first), 0)

    @torch.inference_mode()  # the votes outlive the caller's inference mode
    def _vote(
        self, state: SnapState, shape: LayerShape, queries: Tensor, start: int, left: Tensor, reader: KVReader
    ) -> Vote:
        """Votes of the queries before ``start`` on the remaining tokens."""
        first = max(start - self.queries, state.queries.first)
        window = state.queries.read(first, start) if first < start else None
        if window is None:
            first, window = start, queries[:, :1]
        keys = keys_of(reader, left, start, state.drops.ragged)
        positions = torch.arange(first, first + window.shape[1], device=left.device)
        seen = state.drops.seen(left, positions)  # [num_rows, num_queries, count]
        weights = attention_weights(shape, window, keys, seen.to(keys.device)).to(left.device)
        before = int((left[0] < first).sum())  # the window is the same in every row, after the pads
        summed = weights[:, :, :before].sum(1).unflatten(0, (len(left), -1)).mean(1)  # [num_rows, before]
        votes = torch.zeros(len(left), 1 + start, dtype=torch.float32, device=left.device)  # the first is of pads
        return Vote(start, first, votes.scatter_(1, left[:, :before] + 1, self._pooled(summed))[:, 1:])

    def _pooled(self, weights: Tensor) -> Tensor:
        """Pool each weight with its neighbours; the shape stays."""
        if weights.shape[1] == 0:
            return weights
        pool = avg_pool1d if self.pooling == "avg" else max_pool1d
        return pool(weights, self.kernel, stride=1, padding=self.kernel // 2)
