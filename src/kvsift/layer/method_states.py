"""The memories of a plan's methods in one layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from time import perf_counter
from typing import Any

from torch import Tensor

from kvsift.layer.accounting import RunStats
from kvsift.layer.layer_messages import LayerMessages
from kvsift.layer.selection import CountingReader
from kvsift.methods.base import Method, Phase
from kvsift.plan.plan import PHASES, Plan, Rule
from kvsift.stores.base import Store
from kvsift.stores.reader import RowReader
from kvsift.types import LayerShape, Limit


class MethodStates:
    """One state per phase and sequence; phases without a rule have none. Both phases share their states where decode
    continues with what prefill has left (``Plan.evicts_prompt``).

    Args:
        plan: the plan whose methods they belong to.
        shape: the layer.
        num_rows: sequences in the batch.
        inherited: states of unchanged rules.
    """

    def __init__(
        self, plan: Plan, shape: LayerShape, num_rows: int, inherited: Mapping[Phase, list[Any]] | None = None
    ) -> None:
        self.plan, self.shape = plan, shape
        observing: tuple[Phase, ...] = ("decode",) if plan.evicts_prompt else PHASES
        rules = [(phase, rule) for phase in observing if (rule := plan.rule(phase)) is not None]
        self._rules = [(phase, rule) for phase, rule in rules if not self._is_idle(rule)]
        self._observing = [(phase, r) for phase, r in self._rules if type(r.method).observe is not Method.observe]
        self._following = [(phase, rule) for phase, rule in self._rules if rule.traits.follows]
        self._states: dict[Phase, list[Any]] = {}
        for phase in PHASES:
            if (rule := plan.rule(phase)) is not None:
                self._states[phase] = [rule.method.new_state(shape) for _ in range(num_rows)]
        self._states |= inherited or {}
        if plan.evicts_prompt:
            shared = next(iter((inherited or {}).values()), self._states["decode"])
            self._states["prefill"] = self._states["decode"] = shared

    def of(self, phase: Phase, row: int) -> Any:
        """The state of a sequence."""
        return self._states[phase][row]

    def under(self, plan: Plan, num_rows: int) -> tuple[MethodStates, set[Phase]]:
        """States for another plan, those of unchanged rules among them, and the phases whose states are new."""
        inherited = {
            phase: states for phase, states in self._states.items() if plan.rule(phase) == self.plan.rule(phase)
        }
        other = MethodStates(plan, self.shape, num_rows, inherited)
        old = {id(states) for states in inherited.values()}
        return other, {phase for phase, states in other._states.items() if id(states) not in old}

    def observe(
        self, row: int, queries: Tensor | None, keys: Tensor, values: Tensor, start: int,
        phases: Collection[Phase] = PHASES,
    ) -> None:  # fmt: skip
        """Let the methods observe new tokens of a sequence."""
        for phase, rule in self._observing:
            if phase in phases:
                rule.method.observe(self.of(phase, row), self.shape, queries, keys, values, start)

    @property
    def watches(self) -> bool:
        """Whether some method observes or follows generated tokens."""
        return bool(self._observing or self._following)

    def observes(self, phases: Collection[Phase]) -> bool:
        """Whether some method of these phases observes tokens."""
        return any(phase in phases for phase, _ in self._observing)

    def follow(
        self, row: int, num_new: int, phase: Phase, store: Store, messages: LayerMessages, stats: RunStats
    ) -> None:
        """Let methods follow the newest tokens of a sequence, which were attended in a phase."""
        for rule_phase, rule in self._following:
            started, tally, reader = perf_counter(), stats.tally(self.shape.layer, phase), store.reader(row)
            start, stop = reader.length - num_new, reader.length
            counting = CountingReader(reader, messages, (row, self.shape.layer, (phase, start, stop)))
            rule.method.follow(self.of(rule_phase, row), self.shape, start, stop, phase, counting)
            tally.index_bytes_read += counting.bytes_read
            tally.select_s += perf_counter() - started

    def prepare(self, row: int, reader: RowReader, messages: LayerMessages) -> None:
        """Let the method of decode build its structures over what is stored of a sequence."""
        rule, length = self.plan.decode, reader.length
        if rule is None or not length or rule.is_dense(self.shape.attention_index, length, length + 1):
            return
        candidates = rule.budget.candidates(length, rule.method.unit_size)
        limit = Limit(min(rule.budget.units(length, rule.method.unit_size), candidates.count))
        counting = CountingReader(reader, messages, (row, self.shape.layer, ("decode", length, length)))
        rule.method.prepare(self.of("decode", row), self.shape, candidates, counting, limit)

    def settle(self, row: int, store: Store, messages: LayerMessages) -> None:
        """Let a method that seals build over a chunk of the prompt that was prefilled."""
        if self.plan.decode is not None and self.plan.decode.traits.seals:
            self.prepare(row, store.reader(row), messages)

    def sealed(self, row: int, length: int) -> dict[Phase, Any]:
        """Copies of the states that other sequences can start from, as they are after ``length`` tokens."""
        found = {}
        for phase, rule in self._rules:
            if rule.traits.seals:
                found[phase] = self.of(phase, row).fork()
                found[phase].crop(length)
        return found

    def adopt(self, row: int, sealed: Mapping[Phase, Any]) -> None:
        """Start a sequence from such copies."""
        for phase, state in sealed.items():
            self._states[phase][row] = state.fork()

    def begin_as(self, other: MethodStates, length: int) -> None:
        """Begin with copies of the states of another batch under the same plan, after ``length`` tokens."""
        self._states = other._states
        self.fork(range(len(next(iter(self._states.values()), ()))))
        for row in range(len(next(iter(self._states.values()), ()))):
            self.crop(row, length)

    def describe(self) -> list[dict[str, Any]]:
        """The decode method's report on every sequence."""
        rule = self.plan.decode
        return [] if rule is None else [rule.method.describe(state) for state in self._states["decode"]]

    def fork(self, sources: Sequence[int]) -> None:
        """Sequence i gets a copy of the states of sequence ``sources[i]``."""
        forked = {
            id(states): [None if states[source] is None else states[source].fork() for source in sources]
            for states in self._states.values()
        }
        self._states = {phase: forked[id(states)] for phase, states in self._states.items()}

    def crop(self, row: int, length: int) -> None:
        """Forget the tokens of a sequence from position ``length`` on."""
        for states in self._states.values():
            if states[row] is not None:
                states[row].crop(length)

    def checkpoint(self) -> None:
        """Remember the present lengths, in states that forget: sequences may be rolled back to them."""
        for phase, states in self._states.items():
            rule = self.plan.rule(phase)
            assert rule is not None
            for state in states:
                rule.method.checkpoint(state)

    def _is_idle(self, rule: Rule) -> bool:
        """Whether a method follows every token or seals, and never selects in this layer."""
        traits = rule.traits
        return (traits.follows or traits.seals) and rule.budget.is_dense(self.shape)
