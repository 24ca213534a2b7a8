"""Captured steps over the pool of a loop, for sequences that join and leave while others decode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from kvsift.engine.graphs.accounting import CapturedSequence
from kvsift.engine.graphs.captured_sequences import CapturedSequences
from kvsift.engine.graphs.session import STEADY_SLOTS, Session
from kvsift.engine.graphs.slots import Slots, StepKind
from kvsift.engine.sequence import Sequence
from kvsift.layer.paged_decode import rule_of
from kvsift.plan.plan import Rule
from kvsift.stores.kv_pool import KVPool
from kvsift.stores.page_pool import Run
from kvsift.stores.page_table import PageTable

GroupMember = TypeVar("GroupMember")  # what a group keeps of a sequence


class PoolSession:
    """Slots over the pool of a loop, captured again when its tensors have moved or a sequence is longer than any
    before.

    Args:
        kv: the pool.
        open_session: returns captured steps for a rule, over the pool of a table and for sequences of so many pages.
        keeps_bits: steps of blocks may be of any number of sequences (``models.step``).
    """

    def __init__(
        self, kv: KVPool, open_session: Callable[[Rule | None, PageTable, int], Session], keeps_bits: bool = False
    ) -> None:
        self.kv, self._open, self.keeps_bits = kv, open_session, keeps_bits
        self.table = PageTable(1, kv)  # of the scratch page
        self._session: Session | None = None
        self._moves = 0
        self._pages = 1  # of the longest sequence

    def need(self, num_pages: int) -> None:
        """Make room for a sequence of so many pages, and soon for twice as many: it is said in powers of two."""
        if num_pages > self._pages:
            self._pages = 1 << (num_pages - 1).bit_length()

    def expect(self, num_pages: int) -> None:
        """Make room for sequences of so many pages, the longest that may come."""
        self._pages = max(self._pages, num_pages)

    def slots(self, num_slots: int, rules: abc.Sequence[Rule | None]) -> Slots:
        """Return slots for at least so many sequences with these rules, all of one method."""
        self._ready(next((rule for rule in rules if rule is not None), None))
        return self._open_session.slots(num_slots, rules)

    def blocks(self, number: int, seqs: int, size: int, rules: abc.Sequence[Rule | None]) -> Slots:
        """Return slots of blocks (``Session.blocks``), whose steps write the summaries of these rules."""
        self._ready(next((rule for rule in rules if rule is not None), None))
        return self._open_session.blocks(number, seqs, size)

    def _ready(self, rule: Rule | None) -> None:
        if not self.holds or not self._session_takes(rule):
            self.release()
            self._session = self._open(rule, self.table, self._pages)
            self._moves = self.kv.moves

    def release(self) -> None:
        """Let go of the tensors."""
        if self._session is not None:
            self._session.forget()
        self._session = None

    @property
    def _open_session(self) -> Session:
        assert self._session is not None, "slots come first"
        return self._session

    def captured(self, num_slots: int, rules: abc.Sequence[Rule | None], kind: StepKind) -> bool:
        """Return whether a step for them is captured."""
        return self.holds and self._open_session.captured(num_slots, rules, kind)

    def dense_below(self, slots: Slots, rule: Rule) -> int:
        """Return the context length below which dense steps are to be preferred."""
        return self._open_session.dense_below(slots, rule)

    @property
    def steady(self) -> bool:
        """Whether what a sequence answers does not depend on others."""
        return self._open_session.steady

    @property
    def holds(self) -> bool:
        """Whether the pool is where it was."""
        return self._session is not None and self._moves == self.kv.moves

    def _session_takes(self, rule: Rule | None) -> bool:
        session = self._open_session
        own = rule_of(session.cache.run.plan)
        if session.steady and own != rule:
            return False
        return session.max_pages >= self._pages and (rule is None or (own is not None and own.method == rule.method))


class Group(ABC, Generic[GroupMember]):
    """Sequences of a loop that take captured steps together.

    Args:
        source: of their slots.
        rotation: of their keys (``models.hf.pinning``).
        most: sequences.
    """

    def __init__(self, source: PoolSession, rotation: int | None, most: int = STEADY_SLOTS) -> None:
        self._source, self.rotation, self._most = source, rotation, most
        self._seqs: dict[Sequence, GroupMember] = {}

    @property
    @abstractmethod
    def setup_s(self) -> float:
        """Seconds spent on capturing."""

    def serves(self, kv: KVPool) -> bool:
        """Return whether the group decodes over a pool, or still has a sequence."""
        return self._source.kv is kv or bool(self._seqs)

    @property
    def seqs(self) -> list[Sequence]:
        """Sequences that have not left."""
        return list(self._seqs)

    def runs(self, kv: KVPool) -> list[Run]:
        """Pages of a pool that are of no sequence."""
        return self._source.table.all_runs if self._source.kv is kv else []

    def takes(self, seq: Sequence, rotation: int | None) -> bool:
        """Return whether a sequence may join: steps rank by one method, sequences without a rule beside."""
        assert seq.cache is not None
        rule, rules = rule_of(seq.request.plan), (rule_of(each.request.plan) for each in self._seqs)
        methods = {each.method for each in rules if each is not None}
        fits = self._source.kv is seq.cache.table.kv and rotation == self.rotation and len(self._seqs) < self._most
        return fits and (rule is None or not methods or methods == {rule.method})

    @abstractmethod
    def join(self, seq: Sequence) -> None:
        """Take a sequence whose prompt is read."""

    def forget(self, seq: Sequence) -> None:
        """Be without a sequence that has not joined."""
        self._seqs.pop(seq, None)

    def may_prepare(self, rule: Rule | None) -> bool:
        """Whether steps for sequences under a rule may be captured ahead, without losing others."""
        return not self._seqs

    @abstractmethod
    def prepare(self, rule: Rule | None, num_seqs: int, num_pages: int) -> int:
        """Capture the steps of up to so many sequences under a rule, each of up to so many pages; returns how many."""

    @abstractmethod
    def parts(self, seqs: abc.Sequence[Sequence]) -> list[list[Sequence]]:
        """Those of the group's sequences, all of them, that the next step has a token for, by the step that they take
        together. The others join after it."""

    @abstractmethod
    def step(self, seqs: abc.Sequence[Sequence]) -> list[int]:
        """Return the next token of each sequence of a part."""

    @abstractmethod
    def recall(self) -> None:
        """Forget what was launched ahead, and go on from where the sequences are."""

    def release(self, kv: KVPool) -> None:
        """Let go of the tensors of a pool."""
        if self._source.kv is kv:
            self.recall()
            self._source.release()

    def leave(self, seq: Sequence) -> CapturedSequence | None:
        """Let a sequence go, and count its steps; returns those of which some were launched ahead.

        After an interrupt it may be called again. The sequence has left then, and nothing is counted twice; what was
        not counted yet is lost.
        """
        kept = self._seqs.get(seq)
        try:
            return None if kept is None else self._end(seq, kept)
        finally:  # also if it cannot be counted: the others go on without it
            self._seqs.pop(seq, None)  # first: a sequence without steps is not asked to leave again
            seq.steps = None  # whoever keeps the sequence keeps no graphs

    @abstractmethod
    def _end(self, seq: Sequence, kept: GroupMember) -> CapturedSequence | None:
        """Count the steps of a sequence that leaves, which is not called again; returns as ``leave``."""


class JoinedSequence(NamedTuple):
    """A sequence, its captured steps, and what its group had spent on captures when it joined."""

    steps: CapturedSequence
    setup_s: float


class SequenceGroup(Group[JoinedSequence]):
    """Sequences whose steps are launched ahead; what they are rounded to depends on how many they are."""

    def __init__(self, source: PoolSession, rotation: int | None, most: int = STEADY_SLOTS) -> None:
        super().__init__(source, rotation, most)
        self._steps = CapturedSequences(source)
        self._prepared: Rule | None = None  # for sequences of its method steps were captured ahead, and are kept

    def takes(self, seq: Sequence, rotation: int | None) -> bool:
        rule = rule_of(seq.request.plan)
        alike = rule is None or self._prepared is None or rule.method == self._prepared.method
        if alike and self._source.kv.steady:  # slots are made for the budgets that sequences have, and may come to have
            plan, others = seq.request.plan, {each.request.plan.decode for each in self._seqs}
            alike = not others or (not plan.is_guarded and others == {plan.decode})
        return alike and super().takes(seq, rotation)

    @property
    def setup_s(self) -> float:
        return self._steps.setup_s

    def join(self, seq: Sequence) -> None:
        assert seq.cache is not None
        cache, stats, start, most = seq.cache, seq.counters, seq.num_cached, seq.request.max_new_tokens - 1
        rule, guard = rule_of(seq.request.plan), cache.run.guards.of(0)
        steps = CapturedSequence(cache, 0, stats, start, most, seq.token, rule, seq.request.sampling, guard)
        before = [tally.sparse_queries for (_, phase), tally in stats.tallies.items() if phase == "decode"]
        steps.sparse_steps = max(before, default=0)
        self._seqs[seq] = JoinedSequence(steps, self._steps.setup_s)
        self._source.need(cache.table.longest)

    def parts(self, seqs: abc.Sequence[Sequence]) -> list[list[Sequence]]:
        present = self._steps.ready([self._seqs[seq].steps for seq in seqs])
        if not present:
            self._steps.recall()
            return [list(seqs)]
        if len(present) < len(seqs):
            self._steps.stop_ahead()
        return [[seq for seq in seqs if self._seqs[seq].steps in present]]

    def step(self, seqs: abc.Sequence[Sequence]) -> list[int]:
        if any(seq.token != self._seqs[seq].steps.token for seq in seqs):  # their clients took others
            self.recall()
        return self._steps.step([self._seqs[seq].steps for seq in seqs])

    def may_prepare(self, rule: Rule | None) -> bool:
        before = self._prepared
        return super().may_prepare(rule) and (before is None or (rule is not None and rule.method == before.method))

    def prepare(self, rule: Rule | None, num_seqs: int, num_pages: int) -> int:
        self._source.expect(num_pages)
        self._prepared = rule
        return self._steps.prepare(rule, num_seqs)

    def recall(self) -> None:
        for seq, (steps, _) in self._seqs.items():
            steps.go_back(seq.num_cached - steps.start, seq.token)
        self._steps.recall()

    def release(self, kv: KVPool) -> None:
        if self._source.kv is kv:
            super().release(kv)
            self._steps.release()

    def _end(self, seq: Sequence, kept: JoinedSequence) -> CapturedSequence:
        seq.setup_s, seq.dense_below = self._steps.setup_s - kept.setup_s, self._steps.dense_below
        self._steps.leave(kept.steps)
        return kept.steps
