"""What the methods of a plan remember in one layer, and when they hear of tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from time import perf_counter
from typing import Any

from torch import Tensor

from kvsift.methods.base import Phase
from kvsift.placement.device import RowReader
from kvsift.runtime.counted import CountedReader
from kvsift.runtime.plan import PHASES, Plan, Rule
from kvsift.runtime.relay import Relay
from kvsift.runtime.stats import RunStats
from kvsift.types import LayerShape, Limit


class States(dict[Phase, list[Any]]):
    """A memory per row, by the phase of the rule; phases without a rule have none. Both phases share one where decode
    goes on with what prefill has left (``Plan.evicts_prompt``).

    Args:
        plan: whose methods they belong to.
        shape: the layer.
        num_rows: sequences in the batch.
        kept: memories that go on instead of new ones.
    """

    def __init__(
        self, plan: Plan, shape: LayerShape, num_rows: int, kept: Mapping[Phase, list[Any]] | None = None
    ) -> None:
        self.plan, self.shape = plan, shape
        for phase in PHASES:
            if (rule := plan.rule(phase)) is not None:
                self[phase] = [rule.method.new_state(shape) for _ in range(num_rows)]
        self.update(kept or {})
        if plan.evicts_prompt:
            shared = next(iter((kept or {}).values()), self["decode"])
            self["prefill"] = self["decode"] = shared

    def under(self, plan: Plan, num_rows: int) -> tuple[States, set[Phase]]:
        """Memories for another plan, those of unchanged rules among them, and the phases whose memories are new."""
        kept = {phase: states for phase, states in self.items() if plan.rule(phase) == self.plan.rule(phase)}
        states = States(plan, self.shape, num_rows, kept)
        return states, {of for of in states if not any(states[of] is each for each in kept.values())}

    def observe(
        self, row: int, queries: Tensor | None, keys: Tensor, values: Tensor, start: int,
        phases: Collection[Phase] = PHASES,
    ) -> None:  # fmt: skip
        """Show new tokens of a row to the methods."""
        for phase, rule in self._rules():
            if phase in phases:
                rule.method.observe(self[phase][row], self.shape, queries, keys, values, start)

    def follow(self, row: int, num_new: int, phase: Phase, reader: RowReader, relay: Relay, stats: RunStats) -> None:
        """Tell methods that the newest tokens of a row were answered in a phase."""
        for of_phase, rule in self._rules():
            if not rule.method.follows:
                continue
            started, tally = perf_counter(), stats.tally(self.shape.layer, phase)
            start, stop = reader.length - num_new, reader.length
            counted = CountedReader(reader, relay, (row, self.shape.layer, (phase, start, stop)))
            rule.method.follow(self[of_phase][row], self.shape, start, stop, phase, counted)
            tally.index_bytes_read += counted.bytes_read
            tally.select_s += perf_counter() - started

    def prepare(self, row: int, reader: RowReader, relay: Relay) -> None:
        """Let the method of decode build what it needs over what is stored of a row."""
        rule, length = self.plan.decode, reader.length
        if rule is None or not length or rule.is_dense(self.shape.layer, length, length + 1):
            return
        candidates = rule.budget.candidates(length, rule.method.unit_size)
        limit = Limit(min(rule.budget.units(length, rule.method.unit_size), candidates.count))
        counted = CountedReader(reader, relay, (row, self.shape.layer, ("decode", length, length)))
        rule.method.prepare(self["decode"][row], self.shape, candidates, counted, limit)

    def describe(self) -> list[dict[str, Any]]:
        """What the method of decode says about every row."""
        rule = self.plan.decode
        return [] if rule is None else [rule.method.describe(state) for state in self["decode"]]

    def fork(self, sources: Sequence[int]) -> None:
        """Row i remembers what row ``sources[i]`` does."""
        forked = {
            id(states): [None if states[source] is None else states[source].fork() for source in sources]
            for states in self.values()
        }
        self.update({phase: forked[id(states)] for phase, states in self.items()})

    def crop(self, row: int, length: int) -> None:
        """Forget the tokens of a row from position ``length`` on."""
        for states in self.values():
            if states[row] is not None:
                states[row].crop(length)

    def mark(self) -> None:
        """This length may be come back to: states that forget remember it."""
        for states in self.values():
            for state in states:
                if hasattr(state, "mark"):
                    state.mark()

    def _rules(self) -> list[tuple[Phase, Rule]]:
        """Phases and rules, but for methods that follow every token and would never choose here."""
        heard: tuple[Phase, ...] = ("decode",) if self.plan.evicts_prompt else PHASES
        rules = [(phase, rule) for phase in heard if (rule := self.plan.rule(phase)) is not None]
        layer = self.shape.layer
        return [(of, rule) for of, rule in rules if not (rule.method.follows and layer in rule.budget.dense_layers)]
