"""Sequences that decode in captured steps while others join and leave: the host reads the tokens of a step while the
next one runs.

The end of a sequence shows one step late. What was launched for it after its end is written into pages of its own, and
is not read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from itertools import product
from time import perf_counter
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvsift.engine.graphs.accounting import CapturedSequence, add_counts
from kvsift.engine.graphs.feeds import Assignment
from kvsift.engine.graphs.probing import Probe, probe_sequences
from kvsift.engine.graphs.session import STEADY_SLOTS, Session
from kvsift.engine.graphs.slots import Slots, StepKind, tokens_of
from kvsift.engine.sampling import CHOICES, choice_of
from kvsift.engine.sequence import EngineSequence
from kvsift.layer.paged_decode import ALWAYS, StepMode, rule_of
from kvsift.plan.plan import Rule
from kvsift.stores.kv_pool import KVPool
from kvsift.stores.page_pool import Run

LAUNCHED_AHEAD = 2  # steps launched ahead of the last token read
MOVE_STEPS = 512  # so many steps must be left before fewer slots are worth capturing: a second for microseconds each
GroupMember = TypeVar("GroupMember")  # what a group keeps of a sequence


class Group(ABC, Generic[GroupMember]):
    """Sequences of a loop that take captured steps together.

    Args:
        session: captures their steps.
        rotation: rotation of their keys (``models.hf.pinning``).
        most: sequences.

    Attributes:
        setup_s: seconds spent on captures, and on measuring the crossover.
    """

    def __init__(self, session: Session, rotation: int | None, most: int = STEADY_SLOTS) -> None:
        self._session, self.rotation, self._most = session, rotation, most
        self._seqs: dict[EngineSequence, GroupMember] = {}
        self.setup_s = 0.0

    def serves(self, kv: KVPool) -> bool:
        """Return whether the group decodes over a pool, or still has a sequence."""
        return self._session.kv is kv or bool(self._seqs)

    @property
    def seqs(self) -> list[EngineSequence]:
        """Sequences that have not left."""
        return list(self._seqs)

    def runs(self, kv: KVPool) -> list[Run]:
        """Pages of a pool that are of no sequence."""
        return self._session.table.all_runs if self._session.kv is kv else []

    def takes(self, seq: EngineSequence, rotation: int | None) -> bool:
        """Whether a sequence may join: the rules of a group share a method, and dense sequences may be beside them."""
        assert seq.cache is not None
        rule, rules = rule_of(seq.request.plan), (rule_of(each.request.plan) for each in self._seqs)
        methods = {each.method for each in rules if each is not None}
        fits = self._session.kv is seq.cache.table.kv and rotation == self.rotation and len(self._seqs) < self._most
        return fits and (rule is None or not methods or methods == {rule.method})

    @abstractmethod
    def join(self, seq: EngineSequence) -> None:
        """Add a sequence whose prompt is prefilled."""

    def forget(self, seq: EngineSequence) -> None:
        """Remove a sequence that failed to join."""
        self._seqs.pop(seq, None)

    def may_prepare(self, rule: Rule | None) -> bool:
        """Whether steps for sequences under a rule may be captured ahead, without losing others."""
        return not self._seqs

    @abstractmethod
    def prepare(self, rule: Rule | None, num_seqs: int, num_pages: int) -> int:
        """Capture the steps of up to so many sequences under a rule, each of up to so many pages; returns how many."""

    @abstractmethod
    def parts(self, seqs: Sequence[EngineSequence]) -> list[list[EngineSequence]]:
        """Group the sequences that have a token in the next step by the step that they take together; ``seqs`` are all
        of the group's, and the others join after it."""

    @abstractmethod
    def step(self, seqs: Sequence[EngineSequence]) -> list[int]:
        """Return the next token of each sequence of a part."""

    @abstractmethod
    def recall(self) -> None:
        """Forget what was launched ahead, and go on from where the sequences are."""

    def release(self, kv: KVPool) -> None:
        """Let go of the tensors of a pool."""
        if self._session.kv is kv:
            self.recall()
            self._session.release()

    def leave(self, seq: EngineSequence) -> CapturedSequence | None:
        """Let a sequence go, and count its steps; returns those of which some were launched ahead.

        After an interrupt it may be called again. The sequence has left then, and nothing is counted twice; what was
        not counted yet is lost.
        """
        kept = self._seqs.get(seq)
        try:
            return None if kept is None else self._end(seq, kept)
        finally:  # also if it cannot be counted: the others go on without it
            self._seqs.pop(seq, None)  # first: a sequence without steps is not asked to leave again
            seq.group = None  # whoever keeps the sequence keeps no CUDA graphs

    @abstractmethod
    def _end(self, seq: EngineSequence, kept: GroupMember) -> CapturedSequence | None:
        """Count the steps of a sequence that leaves, which is not called again; returns as ``leave``."""


class LaunchedStep(NamedTuple):
    """A step whose results have not been read.

    Attributes:
        kind: kind of the step.
        number: number of the step since sequences were assigned.
        members: sequences by slot.
        probes: its probes.
        results: ``Slots.results``, on the host once the event has come; None: no token is chosen yet.
        event: comes then; None without a device.
    """

    kind: StepKind
    number: int
    members: Sequence[CapturedSequence]
    probes: Sequence[Probe]
    results: Tensor | None = None
    event: torch.cuda.Event | None = None


class SequenceGroup(Group[CapturedSequence]):
    """Sequences whose steps are launched ahead; what they are rounded to depends on how many they are."""

    def __init__(self, session: Session, rotation: int | None, most: int = STEADY_SLOTS) -> None:
        super().__init__(session, rotation, most)
        self._slots: Slots | None = None
        self._by_slot: list[CapturedSequence] = []  # one that is done keeps its slot, idle, until the others move
        self._number = 0  # of the next step since sequences were assigned
        self._moves = False  # to other slots, once no step is launched
        self._launched: deque[LaunchedStep] = deque()
        self._buffers: list[Tensor] = []
        self._dense_below = 0  # contexts shorter than this were dense
        self._prepared: Rule | None = None  # for sequences of its method steps were captured ahead, and are kept

    def takes(self, seq: EngineSequence, rotation: int | None) -> bool:
        rule = rule_of(seq.request.plan)
        alike = rule is None or self._prepared is None or rule.method == self._prepared.method
        if (
            alike and self._session.kv.steady
        ):  # slots are made for the budgets that sequences have, and may come to have
            plan, others = seq.request.plan, {each.request.plan.decode for each in self._seqs}
            alike = not others or (not plan.is_guarded and others == {plan.decode})
        return alike and super().takes(seq, rotation)

    def join(self, seq: EngineSequence) -> None:
        assert seq.cache is not None
        cache, stats, start, most = seq.cache, seq.counters, seq.num_cached, seq.request.max_new_tokens - 1
        rule, guard = rule_of(seq.request.plan), cache.run.guards.of(0)
        sampling, constraint = seq.request.sampling, seq.output.constraint
        steps = CapturedSequence(cache, stats, start, most, seq.token, rule, sampling, constraint, guard, self.setup_s)
        before = [tally.sparse_queries for (_, phase), tally in stats.tallies.items() if phase == "decode"]
        steps.sparse_steps = max(before, default=0)
        self._seqs[seq] = steps
        self._session.need(cache.table.longest)

    def may_prepare(self, rule: Rule | None) -> bool:
        before = self._prepared
        return super().may_prepare(rule) and (before is None or (rule is not None and rule.method == before.method))

    def prepare(self, rule: Rule | None, num_seqs: int, num_pages: int) -> int:
        """Capture all steps that one, two, four, ... sequences under a rule may take, dense sequences beside."""
        started, count = perf_counter(), 0
        self._session.expect(num_pages)
        self._prepared = rule
        for number in [1 << power for power in reversed(range((num_seqs - 1).bit_length() + 1))]:
            slots = self._session.slots(number, [rule])
            modes: set[StepMode] = {"dense"} if rule is None else {"dense", "mixed", slots.sparse_mode(rule)}
            if self._session.steady:
                modes = {"mixed"}
            if rule is not None:
                self._session.dense_below(slots, rule)
            for mode, choice in product(modes, CHOICES):
                kind = StepKind(mode, choice)
                count += not slots.captured(kind)
                slots.prepare(kind)
        self.setup_s += perf_counter() - started
        return count

    def parts(self, seqs: Sequence[EngineSequence]) -> list[list[EngineSequence]]:
        """One that joins waits for what was launched without it."""
        if not self._launched:
            return [list(seqs)]
        present = [seq for seq in seqs if self._seqs[seq] in self._launched[0].members]
        if not present:
            self.recall()
            return [list(seqs)]
        if len(present) < len(seqs):  # launch nothing more before all take slots again
            self._moves = True
        return [present]

    def step(self, seqs: Sequence[EngineSequence]) -> list[int]:
        members = [self._seqs[seq] for seq in seqs]
        present = [member for member in self._by_slot if not member.done]
        is_given = any(seq.token != member.token for seq, member in zip(seqs, members))  # another one, by a client
        if is_given or any(member not in members for member in present):
            self.recall()
            present = []
        joins = len(present) < len(members)
        self._moves = self._moves or not self._session.holds or self._should_move(present)
        if not self._launched and (self._moves or joins):
            self._assign(members)
        while not self._moves and len(self._launched) < LAUNCHED_AHEAD and any(seq.remaining > 0 for seq in members):
            self._launch(members)
            self._moves = any(seq.will_widen for seq in members if seq.remaining > 0)
        return self._read(members)

    def recall(self) -> None:
        for seq, member in self._seqs.items():
            member.go_back(seq.num_cached - member.start, seq.token)
        self._launched.clear()
        self._moves = True
        self._save()
        for member in self._by_slot:
            member.recall()
        self._by_slot = []

    def _save(self) -> None:
        """Return what slots keep of their sequences to these, as of the last token that each has."""
        for slot, member in enumerate(self._by_slot):
            if self._slots is not None and not member.done:
                self._slots.save(slot, member.cache, member.start + member.steps)

    def release(self, kv: KVPool) -> None:
        if self._session.kv is kv:
            super().release(kv)
            self._slots = None

    def _end(self, seq: EngineSequence, kept: CapturedSequence) -> CapturedSequence:
        seq.setup_s, seq.dense_below = self.setup_s - kept.setup_s, self._dense_below
        kept.done = True
        if kept in self._by_slot and self._slots is not None:
            slot = self._by_slot.index(kept)
            self._slots.save(slot, kept.cache, seq.num_cached)
            self._slots.release(slot)
        if kept.steps:
            slots = self._slots or self._session.slots(1, [kept.rule])
            add_counts(kept, slots.layers, slots.over_bus)
        return kept

    def _assign(self, members: Sequence[CapturedSequence]) -> None:
        started = perf_counter()
        self._save()
        for member in members:
            member.widen()
        slots = self._slots = self._session.slots(len(members), [member.rule for member in members])
        for member in members:
            self._prepare(member, slots)
        steps = max(member.remaining for member in members)
        become_sparse = {member.dense_below - member.written - 1 for member in members}
        for step in {0} | become_sparse:
            if running := [member for member in members if 0 <= step < member.remaining]:
                slots.prepare(self._kind(members, running, step))
        slots.assign([_assignment(member) for member in members], steps)
        self._by_slot, self._number, self._moves = list(members), 0, False
        shape, dtype, pinned = slots.results.shape, slots.results.dtype, slots.results.is_cuda
        self._buffers = [torch.empty(shape, dtype=dtype, pin_memory=pinned) for _ in range(LAUNCHED_AHEAD + 1)]
        seconds = perf_counter() - started
        self.setup_s += seconds
        self._pause(seconds)

    def _prepare(self, member: CapturedSequence, slots: Slots) -> None:
        member.count_slot()
        member.sparse_mode, member.dense_below = slots.sparse_mode(member.rule), ALWAYS
        if member.rule is not None and not member.stays_dense:
            measured = self._session.dense_below(slots, member.rule)
            if not member.budgets:  # else the guard has decided on a budget for which dense steps may be faster
                self._dense_below = max(self._dense_below, measured)
            member.dense_below = max(measured, member.rule.budget.min_context)

    def _pause(self, seconds: float) -> None:
        """Let seconds be no part of the time of any token."""
        for member in self._by_slot:
            member.stats.probe_s += 0.0 if member.done else seconds

    def _launch(self, members: Sequence[CapturedSequence]) -> None:
        slots = self._slots
        assert slots is not None
        kind = self._kind(self._by_slot, members)
        if not slots.captured(kind):  # sequences have ended, and with them the other mode of a mixed step
            kind = kind._replace(mode="mixed")
        for member in members:
            if member.remaining > 0:
                member.widen()  # notes what was probed; a budget that grows has stopped the launches before
            _follow_summaries(member, kind)
            member.dense.append(member.mode() == "dense")
            member.sparse_before.append(member.sparse_steps)
        self._choose_launched()
        step = slots.run(kind, self._number)
        launched = LaunchedStep(kind, self._number, self._by_slot, [])
        launched = launched if kind.constrained else self._with_results(launched)
        self._number += 1
        probes, seconds = probe_sequences(slots, step, self._by_slot)
        self._pause(seconds)
        self._launched.append(launched._replace(probes=probes))

    def _choose_launched(self) -> None:
        """Choose the tokens of a constrained step that was launched last. The masks are made while it runs, and the
        host is one step ahead of the device instead of two."""
        if not self._launched or self._launched[-1].results is not None:
            return
        step = self._launched[-1]
        constraints = {
            slot: (member.constraint, ())
            for slot, member in enumerate(step.members)
            if member.constraint is not None and not member.done
        }
        assert self._slots is not None
        self._slots.choose(step.kind, step.number, constraints)
        self._launched[-1] = self._with_results(step)

    def _with_results(self, step: LaunchedStep) -> LaunchedStep:
        """A step whose tokens were chosen, with its results on their way to the host."""
        slots, buffer, event = self._slots, self._buffers[step.number % len(self._buffers)], None
        assert slots is not None
        buffer.copy_(slots.results, non_blocking=True)
        if buffer.is_pinned():
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(slots.tokens.device))
        return step._replace(results=buffer, event=event)

    def _read(self, members: Sequence[CapturedSequence]) -> list[int]:
        if len(self._launched) == 1:
            self._choose_launched()
        step = self._launched.popleft()
        assert step.results is not None
        if step.event is not None:
            step.event.synchronize()
        for probe in step.probes:
            if not probe.seq.done:
                probe.add()
        tokens, counted = tokens_of(step.results), step.results[2:].clone()
        read = []
        for member in members:
            slot = step.members.index(member)
            member.go_on(tokens[slot], counted[:, slot])
            read.append(member.token)
        return read

    def _kind(
        self, members: Sequence[CapturedSequence], running: Sequence[CapturedSequence], ahead: int = 0
    ) -> StepKind:
        """The step that these of the sequences need, so many steps from now."""
        modes: set[StepMode] = {"mixed"} if self._session.steady else {member.mode(ahead) for member in running}
        choice, constrained = choice_of(member.sampling for member in members), any(map(_is_constrained, members))
        return StepKind(modes.pop() if len(modes) == 1 else "mixed", choice, constrained)

    def _should_move(self, members: Sequence[CapturedSequence]) -> bool:
        """Return whether the sequences that are left move to fewer slots, or to steps that nothing constrains."""
        if self._slots is None or not members:
            return False
        fewer = 2 * len(members) <= self._slots.num_slots and not self._session.steady
        freed = any(map(_is_constrained, self._by_slot)) and not any(map(_is_constrained, members))
        if not (fewer or freed):
            return False
        steps, kind = max(member.remaining for member in members), self._kind(members, members)
        rules = [member.rule for member in members]
        return steps > 0 and (steps >= MOVE_STEPS or self._session.captured(len(members), rules, kind))


def _follow_summaries(member: CapturedSequence, kind: StepKind) -> None:
    """Note where summaries begin to be missing; write them before the first sparse step.

    Mixed steps write the summaries of all sequences, and so leave no gap behind a sequence that is dense in them.
    """
    if member.rule is None:
        return
    if kind.mode == "dense" and member.stale_from is None:
        member.stale_from = member.written
    elif member.mode() != "dense" and member.stale_from is not None:
        member.write_summaries()


def _assignment(member: CapturedSequence) -> Assignment:
    pages = member.cache.table.planned(0)
    return Assignment(
        pages, member.written, member.token, member.sampling, member.steps + 1, member.rule, member.dense_below,
        member.cache,
        member.constraint,
    )  # fmt: skip


def _is_constrained(member: CapturedSequence) -> bool:
    return member.constraint is not None
