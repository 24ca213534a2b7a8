"""What a method is: it names the units of earlier context that some queries may see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.kernels.page_summary import SUMMARIES
from kvsift.methods.head_budgets import head_counts
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Moved, Selection

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
    sequence. A state needs ``fork() -> state`` and ``crop(length)``; None is a state too. One that forgets, and so
    cannot go back as far as it likes, has ``mark()``: this length may be come back to.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("decode",)
    selects: ClassVar[bool] = True  # False: the always-visible tokens are all there is
    unbounded: ClassVar[bool] = False  # True: sees everything, takes no budget
    slides: ClassVar[bool] = False  # True: in prefill too, a query sees no more of the recent tokens than the window
    estimates_mass: ClassVar[bool] = False  # True: scores read as logits, so Budget.mass means something
    no_mass: ClassVar[str] = "estimates no attention mass"  # why Budget.mass is refused otherwise
    compares_heads: ClassVar[bool] = False  # True: ``select`` honours Limit.adaptive; or a property
    moves: ClassVar[bool] = False  # True: ``move`` says from where tokens are seen; or a property
    summaries: ClassVar[tuple[str, ...]] = ()  # kinds of page summary to maintain; or a property
    wants_hidden: ClassVar[bool] = False  # True: in decode, ``from_below`` is the query foreseen from the layer below
    fills: ClassVar[bool] = True  # False: may choose fewer units than the limit, though no mass is asked for
    wants_queries: ClassVar[bool] = False  # True: learns from the queries of the prompt, not only from its keys
    source: ClassVar[str] = ""  # paper
    granularity: ClassVar[str] = "token"  # of what it selects: "token", "page" or "block"
    on_host: ClassVar[bool] = False  # True: decode reads keys in host memory, and only there
    keeps_all: ClassVar[bool] = True  # False: what it once leaves out never comes back
    follows: ClassVar[bool] = False  # True: ``follow`` wants to hear of tokens that were answered
    segment_size: ClassVar[int] = 256  # prefill queries that share a selection, cut at its multiples; or a property

    @property
    def unit_size(self) -> int:
        """Tokens per unit."""
        return 1

    @property
    def summary_page_size(self) -> int:
        """Tokens per page of the summaries that it reads; a unit may be several pages, or part of one."""
        return self.unit_size

    def check_layers(self, layers: Sequence[int]) -> None:
        """Refuse a model that cannot be run on, by the true indices of its attention layers.

        Raises:
            InputError: if hyper-parameters name layers that it lacks.
        """

    def new_state(self, shape: LayerShape) -> Any:
        """Memory of one sequence in one layer."""
        return None

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        """Memory of one layer for every cached token, keys and values in 16 bits not counted: page summaries by
        default. A method whose state grows adds to it."""
        widths = [(SUMMARIES[kind].width(shape.head_dim), SUMMARIES[kind].dtype) for kind in self.summaries]
        row_bytes = sum(width * (2 if dtype is None else dtype.itemsize) for width, dtype in widths)
        return shape.num_kv_heads * row_bytes / self.summary_page_size

    def observe(
        self, state: Any, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        """See tokens once, in order, just after they were stored; all [num_heads, num_new, head_dim].

        ``queries`` is None when the method joins a cache that was filled before.
        """

    def follow(self, state: Any, shape: LayerShape, start: int, stop: int, phase: Phase, reader: KVReader) -> None:
        """Tokens that were observed have been answered too, in this phase: for what depends on the phase, or on keys
        before them. Not called in dense layers, nor for a cache that was filled before."""

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

    def move(self, positions: Tensor, spans: Sequence[tuple[int, int]]) -> Moved:
        """From where queries at ``positions`` see sinks and selection, of a method that ``moves``. What is recent keeps
        its true distances.

        ``spans`` holds (sinks_stop, window_start) of each query if the method ``slides``, else of the first.
        """
        raise InputError(f"{type(self).__name__} does not say where it moves queries")

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

    @property
    def compares_heads(self) -> bool:  # type: ignore[override]
        """A method that chooses in its own way says so itself; scores that are no logits say nothing about heads."""
        return self.estimates_mass and type(self).select is ScoringMethod.select

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
        if limit.always_lse is not None:
            if shape.softcap is not None:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            best, always = _shares(scores, limit.always_lse, num_heads, candidates.unit_size)
            keep = wanted(best, always, limit)
        return chosen_units(best, keep, limit, candidates)


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
    """The k largest without sorting them all, and without a question to the host on a device. As in topk and sort, NaN
    is larger than any number."""
    if k == 0:
        return scores.new_empty(scores.shape[0], 0, dtype=torch.int64)
    best, order = scores.topk(k, dim=-1, sorted=False)
    least = best.masked_fill(best.isnan(), torch.inf).amin(-1, keepdim=True)
    # topk takes any of the units that tie for the last places: right as it is where it took them all
    if scores.device.type == "cpu" and bool(((scores < least).sum(-1) == scores.shape[1] - k).all()):
        return order.sort(-1).values
    return _top_without_waiting(scores, least, k)


def _top_without_waiting(scores: Tensor, least: Tensor, k: int) -> Tensor:
    """The k largest of each row, ``least`` [num_heads, 1] being the smallest number among them."""
    tied = scores == least
    above = ~(tied | (scores < least))  # NaN too
    chosen = above | (tied & (tied.cumsum(-1) <= k - above.sum(-1, keepdim=True)))  # k of each row, or more if NaN
    places = torch.arange(1, k + 1, device=scores.device).expand(scores.shape[0], k).contiguous()
    return torch.searchsorted(chosen.cumsum(-1), places)  # the first unit by which so many are chosen


def wanted(share: Tensor, always: Tensor, limit: Limit) -> Tensor | None:
    """How many units each head wants, int64 [num_heads]: as many as reach the mass, or as adaptive budgets say; None if
    all heads take what the limit gives.

    share [num_heads, count], always [num_heads], of the attention that candidates and always-visible tokens have.
    """
    if limit.adaptive:
        return head_counts(share, limit.units)
    return None if limit.mass is None else enough(share, always, limit.mass)


def chosen_units(scores: Tensor, keep: Tensor | None, limit: Limit, candidates: Candidates) -> Selection:
    """The best candidates of each head, ``keep`` of them if it says how many (``wanted``).

    scores float32 [num_heads, count].
    """
    if keep is None:
        return Selection(top_units(scores, limit.units) + candidates.first, candidates.unit_size, full=True)
    chosen = top_units(scores, int(keep.max()) if limit.adaptive else limit.units, keep)
    return Selection(torch.where(chosen < 0, chosen, chosen + candidates.first), candidates.unit_size)


def _shares(scores: Tensor, always_lse: Tensor, num_heads: int, unit_size: int) -> tuple[Tensor, Tensor]:
    """Of the attention that candidates and always-visible tokens have: every candidate's, [num_heads, count], and that
    of all that is always visible, [num_heads].

    scores [num_query_heads, num_queries, count]; always_lse [num_query_heads, num_queries]. Heads and queries that
    share a row count alike: their shares are averaged.
    """
    logits = scores + math.log(unit_size)
    total = torch.logaddexp(logits.logsumexp(-1), always_lse)
    share = (logits - total.unsqueeze(-1)).exp().mean(1).unflatten(0, (num_heads, -1)).mean(1)
    always = (always_lse - total).exp().mean(1).unflatten(0, (num_heads, -1)).mean(1)
    return share, always


def enough(share: Tensor, always: Tensor, mass: float) -> Tensor:
    """How many of the largest shares reach ``mass`` with what is always visible; share [num_heads, count], always
    [num_heads] -> int64 [num_heads]."""
    reached = share.sort(dim=-1, descending=True).values.cumsum(-1) + always.unsqueeze(1)
    return (reached < mass).sum(-1) + (always < mass)
