"""What a method is: it names the units of earlier context that some queries may see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection

Phase = Literal["prefill", "decode"]
HeadSharing = Literal["auto", "query", "kv"]


class Asked(NamedTuple):
    """What ``select`` is asked for one segment."""

    queries: Tensor
    start: int
    candidates: Candidates
    limit: Limit
    reader: KVReader


@dataclass(frozen=True)
class Method:
    """Hyper-parameters of a method; frozen, shared by all layers and sequences.

    What a method remembers about a sequence lives in the object that ``new_state`` makes: one per layer and
    sequence. A state needs ``fork() -> state`` and ``crop(length)``; None is a state too.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("decode",)
    selects: ClassVar[bool] = True  # False: the always-visible tokens are all there is
    unbounded: ClassVar[bool] = False  # True: sees everything, takes no budget
    slides: ClassVar[bool] = False  # True: in prefill too, a query sees no more of the recent tokens than the window
    estimates_mass: ClassVar[bool] = False  # True: scores read as logits, so Budget.mass means something
    no_mass: ClassVar[str] = "estimates no attention mass"  # why Budget.mass is refused otherwise
    summaries: ClassVar[tuple[str, ...]] = ()  # kinds of page summary to maintain; or a property
    wants_queries: ClassVar[bool] = False  # True: learns from the queries of the prompt, not only from its keys
    source: ClassVar[str] = ""  # paper
    segment_size: ClassVar[int] = 256  # prefill queries that share a selection, cut at its multiples; or a property

    @property
    def unit_size(self) -> int:
        """Tokens per unit."""
        return 1

    @property
    def summary_page_size(self) -> int:
        """Tokens per page of the summaries that it reads; a unit may be several pages, or part of one."""
        return self.unit_size

    def new_state(self, shape: LayerShape) -> Any:
        """Memory of one sequence in one layer."""
        return None

    def observe(
        self, state: Any, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        """See tokens once, in order, just after they were stored; all [num_heads, num_new, head_dim].

        ``queries`` is None when the method joins a cache that was filled before.
        """

    def prepare(self, state: Any, shape: LayerShape, candidates: Candidates, reader: KVReader, limit: Limit) -> None:
        """Build what ``select`` will need, now that the prompt is stored; a method must do without being asked."""

    def describe(self, state: Any) -> dict[str, Any]:
        """What a report should say about this sequence and layer, ready for JSON."""
        return {}

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        """Choose from the candidates.

        Args:
            state: what ``new_state`` made for this sequence and layer.
            shape: the layer.
            queries: [num_query_heads, num_queries, head_dim] of one segment, after RoPE.
            start: position of the first query.
            candidates: what may be chosen; at least one, and more than ``limit.units`` unless a mass is asked.
            limit: how much may be chosen, at least one unit.
            reader: stored keys and page summaries.
        """
        raise InputError(f"{type(self).__name__} does not say how it selects")

    def select_segments(
        self, state: Any, shape: LayerShape, queries: Tensor, asked: Sequence[Asked], reader: KVReader
    ) -> Sequence[Selection]:
        """What ``select`` chooses for each of several segments of a chunk, one behind the other.

        ``queries`` are those of all, [num_query_heads, num_queries, head_dim]. A method that answers them in one go
        reads through ``reader``: what is read once for all of them counts once.
        """
        return [self.select(state, shape, *each) for each in asked]


@dataclass(frozen=True)
class ScoringMethod(Method):
    """A method that ranks every candidate and takes the best: it only says how to score.

    Attributes:
        heads: who shares a selection: each "query" head has its own, the query heads of a "kv" head share one, or
            "auto": shared when the model has grouped queries.
    """

    estimates_mass: ClassVar[bool] = True

    heads: HeadSharing = "auto"

    def __post_init__(self) -> None:
        if self.heads not in ("auto", "query", "kv"):
            raise InputError(f"heads={self.heads!r} must be 'auto', 'query' or 'kv'.")

    def num_selections(self, shape: LayerShape) -> int:
        """Heads that select for themselves: the query heads, or the KV heads for their groups."""
        shared = self.heads == "kv" or (self.heads == "auto" and shape.group_size > 1)
        return shape.num_kv_heads if shared else shape.num_query_heads

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        """Estimated logit of each candidate, larger is better: float32 [num_query_heads, num_queries, count],
        or one row for all queries of the segment, [num_query_heads, 1, count].

        With ``Budget.mass`` a score is read as the mean logit of the unit's tokens.
        """
        raise InputError(f"{type(self).__name__} does not say how it scores")

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        scores = self.score(state, shape, queries, start, candidates, reader)
        num_heads = self.num_selections(shape)
        best = scores.amax(1).unflatten(0, (num_heads, -1)).amax(1)  # [num_heads, count]
        keep = None
        if limit.mass is not None and limit.always_lse is not None:
            if shape.softcap is not None:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            best, keep = _mass_order(scores, limit.always_lse, limit.mass, num_heads, candidates.unit_size)
        chosen = top_units(best, limit.units, keep)
        if keep is None:
            return Selection(chosen + candidates.first, candidates.unit_size, full=True)
        return Selection(torch.where(chosen < 0, chosen, chosen + candidates.first), candidates.unit_size)


def top_units(scores: Tensor, k: int, keep: Tensor | None = None) -> Tensor:
    """Ids of the k largest scores of each row, ascending, ties to the lower id; -1 where a row keeps fewer.

    scores float32 [num_heads, count]; keep int64 [num_heads], how many of its k a row wants -> [num_heads, k].
    """
    if keep is None:
        return _top(scores, min(k, scores.shape[1]))
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    unwanted = torch.arange(order.shape[1], device=order.device) >= keep.clamp_max(k).unsqueeze(1)
    # unwanted ids sort behind every real one, then become -1
    order = order.masked_fill(unwanted, scores.shape[1]).sort(-1).values
    return order.masked_fill(order == scores.shape[1], -1)


def _top(scores: Tensor, k: int) -> Tensor:
    """The k largest without sorting them all, and without a question to the host on a device."""
    if k == 0:
        return scores.new_empty(scores.shape[0], 0, dtype=torch.int64)
    best, order = scores.topk(k, dim=-1, sorted=False)
    least = best.amin(-1, keepdim=True)
    tied = scores == least
    # topk takes any of the units that tie for the last places: right as it is where it took them all
    if scores.device.type == "cpu" and torch.equal(tied.sum(-1), (best == least).sum(-1)):
        return order.sort(-1).values
    above = scores > least
    chosen = above | (tied & (tied.cumsum(-1) <= k - above.sum(-1, keepdim=True)))  # k of each row
    places = torch.arange(1, k + 1, device=scores.device).expand(scores.shape[0], k).contiguous()
    return torch.searchsorted(chosen.cumsum(-1), places)  # the first unit by which so many are chosen


def _mass_order(
    scores: Tensor, always_lse: Tensor, mass: float, num_heads: int, unit_size: int
) -> tuple[Tensor, Tensor]:
    """Shares to rank by, [num_heads, count], and how many of the best reach ``mass`` with what is always visible.

    scores [num_query_heads, num_queries, count]; always_lse [num_query_heads, num_queries]. Heads and queries that
    share a row count alike: their shares are averaged.
    """
    logits = scores + math.log(unit_size)
    total = torch.logaddexp(logits.logsumexp(-1), always_lse)
    share = (logits - total.unsqueeze(-1)).exp().mean(1).unflatten(0, (num_heads, -1)).mean(1)
    always = (always_lse - total).exp().mean(1).unflatten(0, (num_heads, -1)).mean(1)
    return share, enough(share, always, mass)


def enough(share: Tensor, always: Tensor, mass: float) -> Tensor:
    """How many of the largest shares reach ``mass`` with what is always visible; share [num_heads, count], always
    [num_heads] -> int64 [num_heads]."""
    reached = share.sort(dim=-1, descending=True).values.cumsum(-1) + always.unsqueeze(1)
    return (reached < mass).sum(-1) + (always < mass)
