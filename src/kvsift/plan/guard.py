"""The guard of a budget (``Budget.min_recovery``): when it doubles, decided from probes alone.

A probe compares a sparse decode step with exact attention. Its recovery is the mean over query heads and over the
layers that were sparse in the step, the number that reports show; the worst layer would not do, because the attention
of some layers is so diffuse that no budget recovers it, and every sequence would end dense. A step below
``min_recovery`` is followed by another probe in the next step; two in a row double the budget, up to dense. It never
shrinks within a request. A new prompt begins with the budget of the plan.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from kvsift.plan.budget import Budget

LEAST_MISSING = 0.01  # a share below which mass= is not halved any more: what its estimate missed was larger


class Widening(NamedTuple):
    """A budget that doubled."""

    position: int  # of the query whose probe decided
    recovery: float  # of that probe
    lowest: float  # recovery of the worst layer
    lowest_layer: int
    least: float  # the recovery that was asked for
    before: str  # sizes as in a plan, or "dense"
    after: str
    row: int = 0  # of the batch

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        fields = self._asdict()
        renamed = {"min_recovery": fields.pop("least"), "from": fields.pop("before"), "to": fields.pop("after")}
        return {**fields, **renamed}


class Mark(NamedTuple):
    """What holds from the position after this one on."""

    position: int
    doublings: int = 0
    dense: bool = False
    low: bool = False  # the last probe was below, and the next one decides
    again: bool = False  # the next step is probed
    first: int | None = None  # position of the request's first probe

    @property
    def size(self) -> tuple[int, bool]:
        """Which budget holds."""
        return self.doublings, self.dense


class Guard:
    """The guard of one sequence. A budget that it is given is that of the plan, the same in every call.

    It remembers what it decided position by position, so a sequence that is rolled back continues as if nothing had
    been.
    """

    def __init__(self) -> None:
        self._marks: list[Mark] = []
        self._probed: dict[int, float] = {}  # layer -> recovery, of the last probe while it is undecided
        self._position = -1  # of that probe

    def begin(self, position: int, budget: Budget) -> None:
        """A prompt begins, or goes on, at a position: the budget is the plan's again."""
        self.settle(position, budget)
        self.crop(position)
        if self._last._replace(position=-1) != Mark(-1):
            self._marks.append(Mark(position))

    def due(self, position: int, every: int) -> bool:
        """Whether the sparse step at a position is to be probed, in every layer; ``every`` so many, 0 never."""
        last = self._last
        if every == 0 or last.dense:
            return False
        return last.first is None or last.again or (position - last.first) % every == 0

    def note(self, position: int, layer: int, recovery: float) -> None:
        """Add one layer's recovery to the probe at a position. Layers that left nothing out have none."""
        if position != self._position:
            self._position, self._probed = position, {}
        self._probed[layer] = recovery

    def settle(self, position: int, budget: Budget) -> Widening | None:
        """Decide by a probe before a position, once; how the budget doubled, if it did."""
        if not self._probed or self._position >= position:
            return None
        last, probed, at = self._last, self._probed, self._position
        self._probed = {}
        mark = decide(last, at, fmean(probed.values()), budget)
        self._marks.append(mark)
        if mark.size == last.size:
            return None
        assert budget.min_recovery is not None
        worst = min(probed, key=lambda layer: probed[layer])
        before, after = sizes(_budget(last, budget)), sizes(_budget(mark, budget))
        return Widening(at, fmean(probed.values()), probed[worst], worst, budget.min_recovery, before, after)

    def widens(self, budget: Budget) -> bool:
        """Whether the last probe, undecided yet, will double the budget."""
        if not self._probed:
            return False
        mark = decide(self._last, self._position, fmean(self._probed.values()), budget)
        return mark.size != self._last.size

    def budget(self, budget: Budget) -> Budget | None:
        """The budget as it is now; None is dense."""
        return _budget(self._last, budget)

    def crop(self, length: int) -> None:
        """Forget what was decided from position ``length`` on."""
        while self._marks and self._marks[-1].position >= length:
            self._marks.pop()
        if self._position >= length:
            self._probed = {}

    def fork(self) -> Guard:
        """A copy that goes on alone."""
        copy = Guard()
        copy._marks, copy._probed, copy._position = list(self._marks), dict(self._probed), self._position
        return copy

    @property
    def _last(self) -> Mark:
        return self._marks[-1] if self._marks else Mark(-1)


def decide(last: Mark, position: int, recovery: float, budget: Budget) -> Mark:
    """What holds after a probe.

    Args:
        last: what held before it.
        position: position of the query.
        recovery: mean over heads and sparse layers.
        budget: budget of the plan.
    """
    assert budget.min_recovery is not None
    low, first = recovery < budget.min_recovery, position if last.first is None else last.first
    if not (low and last.low):
        return last._replace(position=position, low=low, again=low, first=first)
    doublings = last.doublings + 1
    dense = shows_all(widened(budget, doublings), position + 1)
    # the doubled budget may be too small as well: the next step is probed, but again it takes two in a row
    return Mark(position, doublings, dense, low=False, again=not dense, first=first)


def widened(budget: Budget, doublings: int) -> Budget:
    """A budget after so many doublings: of ``tokens`` or ``ratio``, up to 1; the share that ``mass`` leaves is
    halved."""
    factor = 1 << doublings
    return replace(
        budget,
        tokens=None if budget.tokens is None else budget.tokens * factor,
        ratio=None if budget.ratio is None else min(1.0, budget.ratio * factor),
        mass=None if budget.mass is None else round(1 - (1 - budget.mass) / factor, 9),
    )


def shows_all(budget: Budget, context: int) -> bool:
    """Whether a budget has no bound left in a context of so many tokens."""
    unbounded = budget.mass is None or 1 - budget.mass < LEAST_MISSING
    return unbounded and Budget.limit(budget, context) >= context  # of the mean of layers, if they differ


def sizes(budget: Budget | None) -> str:
    """The sizes of a budget as a plan has them, for instance "budget=2048"; "dense" for None."""
    if budget is None:
        return "dense"
    named = {"budget": budget.tokens, "ratio": budget.ratio, "mass": budget.mass}
    return ":".join(f"{name}={value}" for name, value in named.items() if value is not None)


def _budget(mark: Mark, budget: Budget) -> Budget | None:
    if mark.dense:
        return None
    return widened(budget, mark.doublings) if mark.doublings else budget
