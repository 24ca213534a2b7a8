"""Captured steps whose tokens have the same bits whatever is computed beside them.

Each sequence of a step has a block of slots, for tokens that follow one another: one of them for dense decoding, or
those of a verification (``engine.speculative``). Each token is multiplied (``kernels.skinny_product``) and attended
(``kernels.block_attention``) as if it were alone; a model whose products do not allow it takes steps of the same number
of tokens always. Drafts are steps under the plan, on whose bits nothing depends.

The device is not kept waiting. A verification is launched behind its drafts, whose tokens it takes on the device, and
drafts behind the verification before them, in the hope that as many will be asked for again: what it accepts, and where
they go on, is found on the device. While drafts pause, a step is launched before the one before is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, product
from time import perf_counter

import torch
from torch import Tensor

from kvsift.engine.graphs.accounting import add_blocks, add_steps
from kvsift.engine.graphs.block_launches import Clock, Drafts, PlainStep, SequencePlace, launch_plain, to_host
from kvsift.engine.graphs.feeds import Assignment, Block, Shift, drafts_at, uploaded
from kvsift.engine.graphs.sequence_groups import Group
from kvsift.engine.graphs.session import BLOCK_SEQUENCES, BLOCK_TOKENS, STEADY_SLOTS, Session
from kvsift.engine.graphs.slots import Constraints, Slots, StepKind, StepMode, tokens_of
from kvsift.engine.sampling import CHOICES, Choice, Sampling, choice_of
from kvsift.engine.sequence import EngineSequence
from kvsift.engine.speculative.decoder import Proposal
from kvsift.engine.speculative.exact_step import Checked
from kvsift.kernels.block_attention import reach
from kvsift.layer.paged_decode import DecodeLayer, rule_of
from kvsift.models.hf.cache import SparseCache
from kvsift.plan.plan import Rule
from kvsift.stores.kv_pool import KVPool

PLAIN_STEPS = 64  # that slots are made ready for at once
FEW = 8  # steps in turn with drafts, after which a sequence is expected to go on so


@dataclass
class SequenceBlocks:
    """What a group keeps of a sequence.

    Attributes:
        cache: cache of the sequence.
        pages: int32, of the sequence, those to come included.
        sampling: how its tokens are chosen.
        rule: rule of its drafts.
        place: position of its block, which no other sequence of its kind (exact or not) has.
        setup_s: what the group had spent on captures when the sequence joined.
        blocks: tokens cached before each block, and its own.
        drafts: lengths of the context in the drafts.
        counted: int64 [2 * layers], what drafts have counted (``Slots.results``).
        drafting: steps in turn with drafts.
    """

    cache: SparseCache
    pages: Tensor
    sampling: Sampling
    rule: Rule | None
    place: int
    setup_s: float
    blocks: list[tuple[int, int]] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    counted: Tensor | int = 0
    drafting: int = 0

    def note(self, length: int, proposed: int, drafted: bool) -> None:
        """It has taken a step with so many tokens behind those cached and the last one."""
        if self.blocks and self.blocks[-1][0] == length:  # again, since it was interrupted
            self.blocks.pop()
        self.blocks.append((length, 1 + proposed))
        self.drafting = self.drafting + 1 if drafted else 0


class BlockGroup(Group[SequenceBlocks]):
    """Sequences that are dense or exact."""

    def __init__(self, session: Session, rotation: int | None, most: int = STEADY_SLOTS) -> None:
        super().__init__(session, rotation, most)
        self._ahead: dict[int, PlainStep | Drafts] = {}  # what is launched and not asked for, by the number of a part
        self._dense_seqs = STEADY_SLOTS if session.keeps_bits else BLOCK_SEQUENCES  # of a part
        self._layers: Sequence[DecodeLayer] = ()  # of the last drafts

    def join(self, seq: EngineSequence) -> None:
        cache = seq.cache
        assert cache is not None
        pages = torch.tensor(cache.table.planned(0), dtype=torch.int32, device=cache.attentions[0].like.device)
        taken = {kept.place for each, kept in self._seqs.items() if (each.decoder is None) == (seq.decoder is None)}
        place = next(place for place in count() if place not in taken)
        self._seqs[seq] = SequenceBlocks(
            cache, pages, seq.request.sampling, rule_of(seq.request.plan), place, self.setup_s
        )
        self._session.need(cache.table.longest)

    def prepare(self, rule: Rule | None, num_seqs: int, num_pages: int) -> int:
        self._session.expect(num_pages)
        started, captured = perf_counter(), 0
        blocks = [(2 * part, width, 1) for part, width in _widths(num_seqs, self._dense_seqs)]
        exact = [(2 * part + 1, width) for part, width in _widths(num_seqs, BLOCK_SEQUENCES)]
        blocks += [(*part, size) for part in exact for size in (1, BLOCK_TOKENS)]
        steps: list[tuple[Slots, StepMode]] = [(self._session.blocks(*each, [rule]), "dense") for each in blocks]
        if rule is not None:
            drafts = [self._session.slots(number, [rule]) for number in (1, 2, BLOCK_SEQUENCES)]
            steps += [(slots, slots.sparse_mode(rule)) for slots in drafts]
        for (slots, mode), choice in product(steps, CHOICES):
            setup = Setup(choice)
            setup.prepare(slots, mode)
            captured += setup.has_captured
        self.setup_s += perf_counter() - started
        return captured

    def parts(self, seqs: Sequence[EngineSequence]) -> list[list[EngineSequence]]:
        parts: dict[int, list[EngineSequence]] = {}
        for seq in seqs:
            parts.setdefault(self._number(seq), []).append(seq)
        return list(parts.values())

    def step(self, seqs: Sequence[EngineSequence]) -> list[int]:
        return self._plain_step(seqs)[0]

    def _plain_step(self, seqs: Sequence[EngineSequence]) -> tuple[list[int], float]:
        """The token that follows the last one of each sequence, and the seconds of the step."""
        number, kept = self._number(seqs[0]), [self._seqs[seq] for seq in seqs]
        step = self._ahead.pop(number, None)
        with self._setting_up() as setup:
            slots = self._blocks(number, 1)
            kind = setup.prepare(slots, "dense", _are_constrained(seqs))
        places = [SequencePlace.of(seq) for seq in seqs]
        is_assigned = isinstance(step, PlainStep) and step.slots is slots and not setup.has_captured
        if not isinstance(step, PlainStep) or not is_assigned or step.places != places:
            slots.assign_blocks(self._blocks_of(seqs, [[seq.token] for seq in seqs]), PLAIN_STEPS)
            step = launch_plain(slots, kind, places, 0)
        if step.chosen is None:
            slots.choose(kind, step.number, self._constraints_of(slots, seqs, [[seq.token] for seq in seqs]))
            slots.repeat_first()
            step = step.with_tokens()
        is_paused = all(seq.decoder is None or seq.decoder.is_paused for seq in seqs)
        after = None
        if is_paused and step.number + 1 < PLAIN_STEPS and all(seq.request.length - seq.num_cached > 2 for seq in seqs):
            after = launch_plain(slots, kind, [], step.number + 1)
        step.clock.wait()
        assert step.chosen is not None
        every = tokens_of(step.chosen)
        chosen = [every[self._place(seq) * slots.batch.block] for seq in seqs]
        if after is not None:
            places = [SequencePlace(seq, seq.num_cached + 1, token) for seq, token in zip(seqs, chosen)]
            self._ahead[number] = after._replace(places=places)
        for seq, each in zip(seqs, kept):
            each.note(seq.num_cached, 0, False)
        return chosen, step.clock.seconds

    def most_verified(self, seq: EngineSequence) -> int:
        """Tokens of the next block of a sequence, at most."""
        return self._most_verified(self._blocks(self._number(seq), BLOCK_TOKENS), seq.num_cached)

    def is_ahead(self, seq: EngineSequence) -> bool:
        step = self._ahead.get(self._number(seq))
        return isinstance(step, PlainStep) and SequencePlace.of(seq) in step.places

    def _most_verified(self, slots: Slots, num_cached: int) -> int:
        stretch = reach(slots.layers[0].kv)
        return min(BLOCK_TOKENS, stretch - num_cached % stretch)

    def check(self, seqs: Sequence[EngineSequence], proposals: Sequence[Proposal]) -> Checked:
        """Draft and verify (``ExactModel.check``)."""
        proposals = self._as_many(seqs, proposals)
        places = [SequencePlace.of(seq) for seq, proposal in zip(seqs, proposals) if proposal.drafts]
        if not places and not any(proposal.tokens for proposal in proposals):
            tokens, seconds = self._plain_step(seqs)
            return Checked([()] * len(seqs), [[token] for token in tokens], 0.0, seconds)
        number, counts = self._number(seqs[0]), [proposal.drafts for proposal in proposals if proposal.drafts]
        ahead = self._ahead.pop(number, None)
        with self._setting_up() as setup:
            slots = self._blocks(number, BLOCK_TOKENS)
            kind = setup.prepare(slots, "dense", _are_constrained(seqs))
            if places:
                of_drafts = self._session.slots(len(places), self._rules)
                modes = {of_drafts.sparse_mode(self._seqs[place.seq].rule) for place in places}
                draft_kind = setup.prepare(of_drafts, modes.pop() if len(modes) == 1 else "mixed", kind.constrained)
        fed: dict[EngineSequence, list[int]] = {seq: [seq.token, *each.tokens] for seq, each in zip(seqs, proposals)}
        drafts = ahead if isinstance(ahead, Drafts) else None
        if not places:
            drafts = None
        else:
            if drafts is None or drafts.slots is not of_drafts or drafts.places != places:
                drafts = self._draft(of_drafts, draft_kind, places, counts)
            for slot, place in enumerate(places):
                fed[place.seq] += drafts.of(slot)
        blocks = self._blocks_of(seqs, list(fed.values()))
        slots.assign_blocks(blocks, drafted=None if drafts is None else drafts.tokens)
        clock = Clock(slots.tokens.device)
        drafted = torch.empty(0) if drafts is None else to_host(drafts.tokens)
        clock_of_drafts = Clock(slots.tokens.device)
        slots.run(kind, 0)
        if kind.constrained:
            clock_of_drafts.wait()  # the verification runs on
            tokens_fed = [_resolved(fed[seq], drafted.tolist()) for seq in seqs]
            slots.choose(kind, 0, self._constraints_of(slots, seqs, tokens_fed))
        on_host = to_host(slots.results[:2])
        clock.mark()
        after = None
        goes_on = drafts is not None and len(places) == len(seqs) and not kind.constrained
        if drafts is not None and goes_on and self._go_on(slots, drafts, counts):
            after = self._draft_behind(slots, draft_kind, drafts, counts)
        clock.wait()
        every, read = tokens_of(on_host), drafted.tolist()
        chosen = [every[first : first + BLOCK_TOKENS] for first in range(0, len(every), BLOCK_TOKENS)]
        proposed = [_resolved(fed[seq][1:], read) for seq in seqs]
        following = self._following(seqs, proposed, chosen)
        if after is not None:
            self._ahead[number] = after._replace(places=self._after(seqs, proposed, following))
        if drafts is not None:
            self._note_drafts(drafts)
        for seq, each, proposal in zip(seqs, proposed, proposals):
            self._seqs[seq].note(seq.num_cached, len(each), proposal.drafts > 0)
        return Checked(proposed, list(following), 0.0 if drafts is None else drafts.clock.seconds, clock.seconds)

    def _as_many(self, seqs: Sequence[EngineSequence], proposals: Sequence[Proposal]) -> list[Proposal]:
        """Let all sequences that draft draft as many tokens as the longest, or as they may: its steps run anyway."""
        longest = max(proposal.drafts for proposal in proposals)
        if not longest:
            return list(proposals)
        slots = self._blocks(self._number(seqs[0]), BLOCK_TOKENS)
        left = [seq.request.length - seq.num_cached for seq in seqs]
        most = [min(one, self._most_verified(slots, seq.num_cached)) - 1 for seq, one in zip(seqs, left)]
        return [each._replace(drafts=min(longest, one)) if each.drafts else each for each, one in zip(proposals, most)]

    def _following(
        self, seqs: Sequence[EngineSequence], proposed: Sequence[Sequence[int]], chosen: Sequence[list[int]]
    ) -> list[list[int]]:
        """What follows the last token of each sequence, and each proposed one, of what each block has chosen."""
        return [chosen[self._place(seq)][: 1 + len(each)] for seq, each in zip(seqs, proposed)]

    def _after(
        self, seqs: Sequence[EngineSequence], proposed: Sequence[Sequence[int]], following: Sequence[Sequence[int]]
    ) -> list[SequencePlace]:
        """The places of sequences after a verification, if they go on."""
        places = []
        for seq, tokens, chosen in zip(seqs, proposed, following):
            accepted = next((number for number, token in enumerate(tokens) if chosen[number] != token), len(tokens))
            places.append(SequencePlace(seq, seq.num_cached + accepted + 1, chosen[accepted]))
        return places

    def _go_on(self, slots: Slots, drafts: Drafts, counts: Sequence[int]) -> bool:
        """Whether sequences will probably be asked for so many drafts again, and may be, whatever is accepted of
        these."""
        for place, verified, asked in zip(drafts.places, drafts.counts, counts):
            if self._seqs[place.seq].drafting < FEW:
                return False
            for num_cached in range(place.num_cached + 1, place.num_cached + verified + 2):
                if asked >= min(place.seq.request.length - num_cached, self._most_verified(slots, num_cached)):
                    return False
        return True

    def _draft_behind(self, slots: Slots, kind: StepKind, drafts: Drafts, counts: list[int]) -> Drafts:
        """Draft so many tokens of each sequence, from what the verification in ``slots`` accepts of these drafts."""
        of_drafts = drafts.slots
        free = [0] * (of_drafts.num_slots - len(drafts.places))
        places = [self._place(place.seq) for place in drafts.places]
        number, verified = uploaded(torch.tensor([places + free, drafts.counts + free]), slots.tokens.device)
        chosen, proposed = slots.tokens.view(-1, BLOCK_TOKENS)[number], drafts.tokens.view(-1, of_drafts.num_slots).T
        steps = torch.arange(proposed.shape[1], device=chosen.device)
        right = (chosen[:, : len(steps)] == proposed) & (steps < verified.unsqueeze(1))
        accepted = right.long().cumprod(1).sum(1)
        begin = [place._replace(num_cached=place.num_cached + 1) for place in drafts.places]
        token = chosen.gather(1, accepted.unsqueeze(1)).squeeze(1)
        return self._draft(of_drafts, kind, begin, counts, Shift(accepted, token, max(drafts.counts)))

    def _draft(
        self, slots: Slots, kind: StepKind, places: list[SequencePlace], counts: list[int], shift: Shift | None = None
    ) -> Drafts:
        """Choose so many tokens of each sequence under its rule; what they store is overwritten."""
        clock, steps, tokens, counted = Clock(slots.tokens.device), max(counts), list[Tensor](), dict[int, Tensor]()
        slots.assign([self._assignment(place) for place in places], steps, shift)
        drafts, on_host = [list[int]() for _ in places], list[tuple[Tensor, Clock]]()
        for number in range(steps):
            slots.run(kind, number)
            if kind.constrained:
                for copied, clock_of_copy in on_host[-1:]:
                    clock_of_copy.wait()  # the step that was just launched runs on
                    for slot, each in enumerate(drafts):
                        each.append(int(copied[slot]))
                by_slot = {slot: (place.seq, each) for slot, (place, each) in enumerate(zip(places, drafts))}
                going_on = {slot: each for slot, each in by_slot.items() if counts[slot] > number}
                slots.choose(kind, number, _constraints_of(going_on))
                on_host.append((to_host(slots.tokens), Clock(slots.tokens.device)))
            tokens.append(slots.tokens.clone())
            for slot, count_of_sequence in enumerate(counts):
                if count_of_sequence == number + 1:
                    counted[slot] = slots.counted[:, slot].clone()  # idle steps count a token, too
                    if count_of_sequence < steps:
                        slots.release(slot)
        clock.mark()
        return Drafts(slots, places, counts, torch.cat(tokens), [counted[slot] for slot in sorted(counted)], clock)

    def _note_drafts(self, drafts: Drafts) -> None:
        self._layers = drafts.slots.layers
        for (seq, num_cached, _), count_of_sequence, counted in zip(drafts.places, drafts.counts, drafts.counted):
            kept = self._seqs[seq]
            kept.drafts += range(num_cached + 1, num_cached + count_of_sequence + 1)
            kept.counted = kept.counted + counted

    def _blocks_of(self, seqs: Sequence[EngineSequence], tokens: Sequence[Sequence[int]]) -> dict[int, Block]:
        """Consecutive tokens of each sequence, by the place of its block."""
        blocks = {}
        for seq, fed in zip(seqs, tokens):
            kept = self._seqs[seq]
            drawn = SequencePlace.of(seq).drawn
            constraint = seq.output.constraint
            blocks[self._place(seq)] = Block(kept.pages, seq.num_cached, fed, kept.sampling, drawn, constraint)
        return blocks

    def _constraints_of(
        self, slots: Slots, seqs: Sequence[EngineSequence], fed: Sequence[Sequence[int]]
    ) -> Constraints:
        """What constrains the token behind each token that the blocks of sequences were fed, the drafts among these
        before it included (``Slots.choose``)."""
        by_slot = {
            self._place(seq) * slots.batch.block + slot: (seq, tokens[1 : slot + 1])
            for seq, tokens in zip(seqs, fed)
            for slot in range(len(tokens))
        }
        return _constraints_of(by_slot)

    def _blocks(self, number: int, size: int) -> Slots:
        """The slots of a part, with a block of at least so many tokens for each of its sequences."""
        width = 1 + max(self._place(seq) for seq in self._seqs if self._number(seq) == number)
        return self._session.blocks(number, width, size, self._rules)

    def _place(self, seq: EngineSequence) -> int:
        """Return the place of a sequence's block in the slots of its part."""
        return self._seqs[seq].place % self._sequences_of_part(seq)

    def _number(self, seq: EngineSequence) -> int:
        """Return the number of a sequence's part, odd for exact sequences."""
        return 2 * (self._seqs[seq].place // self._sequences_of_part(seq)) + (seq.decoder is not None)

    def _sequences_of_part(self, seq: EngineSequence) -> int:
        return self._dense_seqs if seq.decoder is None else BLOCK_SEQUENCES

    def _assignment(self, place: SequencePlace) -> Assignment:
        kept = self._seqs[place.seq]
        return Assignment(
            kept.pages, place.num_cached, place.token, kept.sampling, place.drawn, kept.rule,
            constraint=place.seq.output.constraint,
        )  # fmt: skip

    @property
    def _rules(self) -> list[Rule | None]:
        """Rules of all sequences: slots depend on them, and should not change from step to step."""
        return [kept.rule for kept in self._seqs.values()]

    @contextmanager
    def _setting_up(self) -> Iterator[Setup]:
        """Let no token count the time of this block if steps are captured in it."""
        started, setup = perf_counter(), Setup(choice_of(kept.sampling for kept in self._seqs.values()))
        yield setup
        if setup.has_captured:
            seconds = perf_counter() - started
            self.setup_s += seconds
            for kept in self._seqs.values():
                kept.cache.stats.probe_s += seconds

    def recall(self) -> None:
        self._ahead.clear()

    def release(self, kv: KVPool) -> None:
        if self._session.kv is kv:
            for kept in self._seqs.values():
                self._count(kept)
            self._layers = ()  # they hold the tensors
        super().release(kv)

    def _end(self, seq: EngineSequence, kept: SequenceBlocks) -> None:
        self._ahead.pop(self._number(seq), None)
        seq.setup_s = self.setup_s - kept.setup_s
        self._count(kept)
        add_blocks(kept.cache.stats, kept.cache.attentions, kept.blocks)

    def _count(self, kept: SequenceBlocks) -> None:
        """Count the drafts of a sequence so far."""
        if kept.drafts:
            lengths = torch.tensor(kept.drafts)
            sparse = torch.ones_like(lengths, dtype=torch.bool)
            counted = torch.zeros(2 * len(self._layers), dtype=torch.int64) + torch.as_tensor(kept.counted).cpu()
            add_steps(kept.cache.stats, self._layers, lengths, sparse, kept.rule, counted)
            kept.drafts, kept.counted = [], 0


@dataclass
class Setup:
    """Steps that are captured unless they are.

    Attributes:
        choice: choice of the tokens of all sequences.
        has_captured: whether one was not.
    """

    choice: Choice
    has_captured: bool = False

    def prepare(self, slots: Slots, mode: StepMode, constrained: bool = False) -> StepKind:
        """Capture a step of any of the sequences."""
        kind = StepKind(mode, self.choice, constrained)
        if not slots.captured(kind):
            slots.prepare(kind)
            self.has_captured = True
        return kind


def _are_constrained(seqs: Sequence[EngineSequence]) -> bool:
    return any(seq.output.constraint is not None for seq in seqs)


def _constraints_of(
    by_slot: Mapping[int, tuple[EngineSequence, Sequence[int]]],
) -> Constraints:
    """The constraints of sequences that have some, with their drafts."""
    found = {slot: (seq.output.constraint, drafts) for slot, (seq, drafts) in by_slot.items()}
    return {slot: (constraint, drafts) for slot, (constraint, drafts) in found.items() if constraint is not None}


def _resolved(fed: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Tokens that were fed, with the drafts that numbers stand for (``drafts_at``)."""
    return [drafts[drafts_at(token)] if token < 0 else token for token in fed]


def _widths(num_seqs: int, sequences_of_part: int) -> list[tuple[int, int]]:
    """Return each part that so many sequences may be in, as its number and how many of them it may have: one, two,
    four, ..."""
    parts = -(-num_seqs // sequences_of_part)
    most = (min(num_seqs, sequences_of_part) - 1).bit_length()
    return [(part, 1 << power) for part in range(parts) for power in range(most + 1)]
