"""The guards of a batch, a sequence each, which all layers of a cache share (``plan.guard``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvsift.layer.accounting import RunStats
from kvsift.plan.guard import Guard
from kvsift.plan.plan import Rule


class Guards:
    """Guards by sequence. All layers take the same steps; what has been done for one of them changes nothing again.

    Attributes:
        forks: number of forks of the sequences so far.
    """

    def __init__(self) -> None:
        self._rows: dict[int, Guard] = {}
        self.forks = 0

    def of(self, row: int) -> Guard:
        """The guard of a sequence."""
        return self._rows.setdefault(row, Guard())

    def begin(self, row: int, position: int, rule: Rule | None) -> None:
        """Tokens of a prompt follow from a position on; ``rule`` is that of decode."""
        if rule is not None and rule.budget.min_recovery is not None:
            self.of(row).begin(position, rule.budget)

    def rule(self, row: int, position: int, rule: Rule | None, stats: RunStats) -> Rule | None:
        """The rule of decode for the query at a position, its budget widened; None is dense. ``stats`` take note of
        what was widened."""
        if rule is None or rule.budget.min_recovery is None:
            return rule
        guard = self.of(row)
        if widening := guard.settle(position, rule.budget):
            stats.widenings.append(widening._replace(row=row))
        return widened_rule(rule, guard)

    def crop(self, row: int, length: int) -> None:
        """Forget what was decided from position ``length`` on."""
        if row in self._rows:
            self._rows[row].crop(length)

    def fork(self, sources: Sequence[int], taken: int) -> int:
        """Sequence i becomes a copy of sequence ``sources[i]``, unless another layer has done it; forks that the caller
        has now taken, ``taken`` before."""
        if taken == self.forks:
            self._rows = {row: self._rows[source].fork() for row, source in enumerate(sources) if source in self._rows}
            self.forks += 1
        return taken + 1

    def clear(self) -> None:
        """Begin all sequences anew, since the plan is another."""
        self._rows.clear()


def widened_rule(rule: Rule, guard: Guard) -> Rule | None:
    """A rule with its budget as a guard has widened it; None is dense."""
    budget = guard.budget(rule.budget)
    if budget is None or budget is rule.budget:
        return None if budget is None else rule
    return replace(rule, budget=budget)
