"""Methods that score every candidate and select the best."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvsift.errors import InvalidMethod
from kvsift.methods.base import Method
from kvsift.methods.checks import knob
from kvsift.methods.common.head_budgets import head_counts
from kvsift.methods.traits import Traits
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection

HeadSharing = Literal["auto", "query", "kv"]
RANKING = ("score", "select", "num_selections", "reposition", "new_state", "observe")  # which captured steps never call

SCORES = Traits(estimates_mass=True)
RANKS = SCORES._replace(compares_heads=True)


@dataclass(frozen=True)
class ScoringMethod(Method):
    """A method that scores every candidate and selects the best; a subclass defines ``score``.

    Attributes:
        heads: who shares a selection: each "query" head has its own, the query heads of a "kv" head share one, or
            "auto": shared when the model has grouped queries.
    """

    heads: HeadSharing = knob("auto")

    @property
    def traits(self) -> Traits:
        """A method with a ``select`` of its own states whether it compares heads."""
        return RANKS if type(self).select is ScoringMethod.select else SCORES

    def num_selections(self, shape: LayerShape) -> int:
        """Selections per segment: one per query head, or one per KV head for its group."""
        shared = self.heads == "kv" or (self.heads == "auto" and shape.group_size > 1)
        return shape.num_kv_heads if shared else shape.num_query_heads

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        """Estimate the logit of each candidate: float32 [num_query_heads, num_queries, count], or one row for all
        queries of the segment, [num_query_heads, 1, count].

        With ``Budget.mass`` a score is the mean logit of the unit's tokens.
        """
        raise InvalidMethod(f"{type(self).__name__} does not define score")

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        scores = self.score(state, shape, queries, start, candidates, reader)
        heads, num_queries, count = shape.num_query_heads, queries.shape[1], candidates.count
        if scores.shape not in ((heads, num_queries, count), (heads, 1, count)):
            raise InvalidMethod(
                f"score of {type(self).__name__} returned {list(scores.shape)}; it must return a logit for each query "
                f"head, query and candidate, here {[heads, num_queries, count]}."
            )
        num_heads = self.num_selections(shape)
        best = scores.amax(1).unflatten(0, (num_heads, -1)).amax(1)  # [num_heads, count]
        keep = None
        if limit.always_lse is not None:
            best, always = _shares(shape.capped(scores), limit.always_lse, num_heads, candidates.unit_size)
            keep = units_per_head(best, always, limit)
        return chosen_units(best, keep, limit, candidates)


def top_units(scores: Tensor, k: int, keep: Tensor | None = None) -> Tensor:
    """Return the ids of the k largest scores of each row, ascending, ties to the lower id; -1 where a row keeps fewer.

    scores float32 [num_heads, count]; keep int64 [num_heads], how many of its k each row keeps -> [num_heads, k].
    """
    if keep is None:
        return _top(scores, min(k, scores.shape[1]))
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    dropped = torch.arange(order.shape[1], device=order.device) >= keep.clamp_max(k).unsqueeze(1)
    # dropped ids sort behind all others, then become -1
    order = order.masked_fill(dropped, scores.shape[1]).sort(-1).values
    return order.masked_fill(order == scores.shape[1], -1)


def _top(scores: Tensor, k: int) -> Tensor:
    """The k largest without a full sort, and without synchronising with a device. As in topk and sort, NaN is larger
    than any number."""
    if k == 0:
        return scores.new_empty(scores.shape[0], 0, dtype=torch.int64)
    best, order = scores.topk(k, dim=-1, sorted=False)
    least = best.masked_fill(best.isnan(), torch.inf).amin(-1, keepdim=True)
    # topk returns any of the units that tie for the last places: its result stands where it returned all of them
    if scores.device.type == "cpu" and bool(((scores < least).sum(-1) == scores.shape[1] - k).all()):
        return order.sort(-1).values
    return _top_without_sync(scores, least, k)


def _top_without_sync(scores: Tensor, least: Tensor, k: int) -> Tensor:
    """The k largest of each row, ``least`` [num_heads, 1] being the smallest number among them."""
    tied = scores == least
    above = ~(tied | (scores < least))  # NaN too
    chosen = above | (tied & (tied.cumsum(-1) <= k - above.sum(-1, keepdim=True)))  # k of each row, or more if NaN
    ranks = torch.arange(1, k + 1, device=scores.device).expand(scores.shape[0], k).contiguous()
    return torch.searchsorted(chosen.cumsum(-1), ranks)  # the unit at which the count of chosen ones reaches each rank


def own_ranking(method: Method, *classes: type[Method]) -> str:
    """Return what a method has of its own in place of that of the classes whose ranking the kernels do."""
    kind = type(method)
    own = [part for part in RANKING if all(getattr(kind, part) is not getattr(cls, part) for cls in classes)]
    return " and ".join(own)


def units_per_head(share: Tensor, always: Tensor, limit: Limit) -> Tensor | None:
    """Units that each head selects, int64 [num_heads], by the mass or the adaptive budgets; None if the limit is the
    same for all heads.

    share [num_heads, count] of the candidates and always [num_heads] of the always-visible tokens add up to 1.
    """
    if limit.adaptive:
        return head_counts(share, limit.units)
    return None if limit.mass is None else units_for_mass(share, always, limit.mass)


def chosen_units(scores: Tensor, keep: Tensor | None, limit: Limit, candidates: Candidates) -> Selection:
    """Select the best candidates of each head, ``keep`` of them if given (``units_per_head``).

    scores float32 [num_heads, count].
    """
    if keep is None:
        return Selection(top_units(scores, limit.units) + candidates.first, candidates.unit_size, full=True)
    chosen = top_units(scores, int(keep.max()) if limit.adaptive else limit.units, keep)
    return Selection(torch.where(chosen < 0, chosen, chosen + candidates.first), candidates.unit_size)


def _shares(scores: Tensor, always_lse: Tensor, num_heads: int, unit_size: int) -> tuple[Tensor, Tensor]:
    """Shares of the attention to candidates and always-visible tokens: of each candidate, [num_heads, count], and of
    the always-visible tokens together, [num_heads].

    scores [num_query_heads, num_queries, count]; always_lse [num_query_heads, num_queries]. The shares of heads and
    queries of one row are averaged.
    """
    logits = scores + math.log(unit_size)
    total = torch.logaddexp(logits.logsumexp(-1), always_lse)
    share = (logits - total.unsqueeze(-1)).exp().mean(1).unflatten(0, (num_heads, -1)).mean(1)
    always = (always_lse - total).exp().mean(1).unflatten(0, (num_heads, -1)).mean(1)
    return share, always


def units_for_mass(share: Tensor, always: Tensor, mass: float) -> Tensor:
    """Count the largest shares that reach ``mass`` together with the always-visible tokens; share [num_heads, count],
    always [num_heads] -> int64 [num_heads]."""
    reached = share.sort(dim=-1, descending=True).values.cumsum(-1) + always.unsqueeze(1)
    return (reached < mass).sum(-1) + (always < mass)
