"""Exact and deterministic answers in captured steps; here the steps run without graphs, on a GPU with them."""

import random
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from engine.exact_models import PATHS, new_llm, open_llm, same
from engine.loop_sequences import GRID, assert_equal, assert_nothing_left, new_sequence, take_steps, tokens
from engine.tiny_directory import text_of
from refusals import refused

from kvsift import LLM, Sampling
from kvsift.engine.graphs import block_groups
from kvsift.engine.graphs.block_groups import BlockGroup
from kvsift.engine.graphs.block_launches import Drafts
from kvsift.engine.graphs.feeds import Shift
from kvsift.engine.graphs.session import Session
from kvsift.engine.graphs.slots import Slots, StepKind
from kvsift.engine.sequence import EngineSequence
from kvsift.engine.speculative.pace import Amount, Pace
from kvsift.models.fused_step import FusedStep
from kvsift.models.projection import Projection
from kvsift.plan.syntax import parse_plan
from kvsift.stores.page_pool import Run
from kvsift.stores.page_table import PageTable
from kvsift.stores.reader import RowReader

SMALL = "budget=80:sinks=4:window=16"
PLANS = [f"sketch:{SMALL}:dense_layers=none", f"quest:{SMALL}:dense_layers=0", "dense"]
SAMPLINGS = [Sampling(), Sampling(0.8, seed=3), Sampling(1.2, top_p=0.9, seed=4)]
NEW = 24

pytestmark = pytest.mark.usefixtures("eager_pace")


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> None:
    """Not here."""


@pytest.fixture(scope="module", params=PATHS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return new_llm(tmp_path_factory.mktemp("steps"), request.param)


def test_sequences_of_all_kinds_join_and_leave(llm: LLM) -> None:
    kinds = [(plan, exact) for plan in PLANS for exact in (False, True)]

    def sequence_of(number: int) -> EngineSequence:
        plan, exact = kinds[number]
        sampling, text = SAMPLINGS[number % 3], text_of(100 + 37 * number)
        return new_sequence(llm, text, plan, 16, sampling, exact=exact)

    expected = []
    for number in range(len(kinds)):
        llm.loop.submit(seq := sequence_of(number))
        take_steps(llm, [seq])
        expected.append(tokens(seq))
    for seed in range(3):
        rng, seqs = random.Random(seed), dict[int, EngineSequence]()
        waiting = rng.sample(range(len(kinds)), len(kinds))
        while waiting or not all(seq.is_ended for seq in seqs.values()):
            if waiting and rng.random() < 0.4:
                seqs[waiting[-1]] = sequence_of(waiting[-1])
                llm.loop.submit(seqs[waiting.pop()])
            llm.loop.step()
            llm.loop.check()
            if rng.random() < 0.02 and seqs:
                llm.loop.cancel(rng.choice(list(seqs.values())))
        for number, seq in seqs.items():
            assert seq.error is None
            assert tokens(seq) == expected[number][: len(tokens(seq))], kinds[number]
            assert seq.finish_reason == "cancelled" or len(tokens(seq)) == len(expected[number])


@pytest.mark.parametrize("path", PATHS)
def test_sequences_that_get_experts_join_and_leave(path: str, tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    test_sequences_of_all_kinds_join_and_leave(new_llm(tmp_path, path, "Qwen3Moe", **experts))


@pytest.mark.parametrize("exact", [False, True])
def test_steps_launched_ahead_change_no_token_that_a_client_chooses(
    llm: LLM, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "choose", lambda *_: Amount(0.0))
    launched: list[int] = []
    run = Slots.run

    def watched(slots: Slots, kind: StepKind, number: int) -> object:
        launched.append(number)
        return run(slots, kind, number)

    def answer(num_tokens: int, others: tuple[int, ...]) -> list[int]:
        plan = PLANS[1] if exact else "dense"
        seq = new_sequence(llm, text_of(300), plan, num_tokens, SAMPLINGS[2], exact=exact)
        if exact:
            seq.decoder.pace.measured.left = 1000  # type: ignore[union-attr]  # drafts pause
        take = seq.output.take

        def chosen(logits: object, probe_s: float) -> tuple[int, str]:
            token, reason = take(logits, probe_s)  # type: ignore[arg-type]
            return (token + 1 if len(tokens(seq)) in others else token), reason

        seq.output.take = chosen  # type: ignore[method-assign, assignment]
        llm.loop.submit(seq)
        take_steps(llm, [seq])
        assert seq.error is None
        return tokens(seq)

    monkeypatch.setattr(Slots, "run", watched)
    answers = [answer(40, others) for others in ((), (4, 5, 17, 30))]
    assert {1, 2, 3} < set(launched)
    monkeypatch.setattr(block_groups, "PLAIN_STEPS", 1)
    launched.clear()
    assert [answer(40, others) for others in ((), (4, 5, 17, 30))] == answers
    assert set(launched) == {0}
    assert answers[0] != answers[1]


@pytest.mark.parametrize("exact", [False, True])
def test_a_sampled_sequence_that_joins_another_part_changes_no_token_launched_ahead(llm: LLM, exact: bool) -> None:
    """Its part has steps captured in which tokens are drawn, for all sequences of the group, while theirs are on the
    way."""
    other = open_llm(Path(llm.directory.path), llm.fast_path.name)
    dense = other.generate(text_of(300), max_new_tokens=60).token_ids
    seqs = [new_sequence(other, text_of(300), "dense", 60)]
    other.loop.submit(seqs[0])
    while len(tokens(seqs[0])) < 20:
        other.loop.step()
    case = text_of(200), PLANS[1] if exact else "dense", 12, SAMPLINGS[1]
    seqs += [new_sequence(other, *case, exact=exact) for _ in range(1 if exact else 4)]
    for seq in seqs[1:]:
        other.loop.submit(seq)
    take_steps(other, seqs)
    assert tokens(seqs[0]) == dense


@pytest.mark.parametrize("sampling", SAMPLINGS[::2], ids=["greedy", "top_p"])
def test_drafts_behind_a_verification_go_on_from_what_it_accepts(
    llm: LLM, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "choose", lambda pace, repeat, repeated, most: Amount(0.0, min(pace.number, most)))
    draft, note, shifts, used = BlockGroup._draft, BlockGroup._note_drafts, list[Shift | None](), list[Drafts]()

    def noted(group: BlockGroup, drafts: Drafts) -> None:
        used.append(drafts)
        note(group, drafts)

    def watched(group: BlockGroup, slots: Slots, kind: StepKind, places: Any, counts: Any, shift: Any = None) -> Any:
        shifts.append(shift)
        found = draft(group, slots, kind, places, counts, shift)
        if shift is not None and llm.device.type == "cpu":  # where the host knows what was accepted
            moved = [
                place._replace(num_cached=place.num_cached + int(ahead), token=int(token))
                for place, ahead, token in zip(places, shift.ahead, shift.tokens)
            ]
            again = draft(group, slots, kind, moved, counts)
            steps = [[drafts.tokens.view(-1, slots.num_slots)[:number, slot] for slot, number in enumerate(counts)]
                     for drafts in (found, again)]  # fmt: skip
            assert all(map(torch.equal, *steps))
        return found

    monkeypatch.setattr(BlockGroup, "_draft", watched)
    monkeypatch.setattr(BlockGroup, "_note_drafts", noted)
    texts, seqs = [text_of(length) for length in (200, 320, 510)], list[EngineSequence]()
    for number, text in enumerate(texts):
        seq = new_sequence(llm, text, PLANS[0], 60, sampling, exact=True)
        seq.decoder.pace.number = 2 + number % 2  # type: ignore[union-attr, attr-defined]
        llm.loop.submit(seq)
        seqs.append(seq)
    take_steps(llm, seqs)
    for seq, text in zip(seqs, texts):
        assert tokens(seq) == llm.generate(text, max_new_tokens=60, sampling=sampling).token_ids
    behind = [shift for shift in shifts if shift is not None]
    assert len(behind) > 6
    assert len(shifts) - len(used) <= len(seqs)  # nobody has asked for others, but where a sequence has ended
    assert len({int(ahead) for shift in behind for ahead in shift.ahead} - {0}) > 1


def test_drafts_of_sequences_with_other_numbers_count_nothing_for_each_other(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of an answer a sequence drafts fewer tokens than those beside it."""
    lengths = (24, 9, 15)
    monkeypatch.setattr(Pace, "choose", lambda pace, repeat, repeated, most: Amount(0.0, min(5, most)))

    def run(chosen: tuple[int, ...]) -> list[EngineSequence]:
        seqs = []
        for number in chosen:
            seq = new_sequence(llm, text_of(200 + number), PLANS[0], number, exact=True)
            llm.loop.submit(seq)
            seqs.append(seq)
        take_steps(llm, seqs)
        return seqs

    for together, number in zip(run(lengths), lengths):
        [alone] = run((number,))
        assert tokens(together) == tokens(alone)
        if llm.device.type == "cpu":  # on a GPU drafts have other bits beside others, and others are accepted
            assert together.decoder.report.verified == alone.decoder.report.verified
            assert_equal(together, alone)


def test_sequences_that_draft_together_draft_as_many_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.loop, "clock", lambda: 0.0)  # no sequence is owed steps while others are read
    monkeypatch.setattr(Pace, "choose", lambda pace, repeat, repeated, most: Amount(0.0, min(pace.number, most)))
    seqs = []
    for number in (1, 5, 2):
        seq = new_sequence(llm, text_of(200 + number), PLANS[0], 60, exact=True)
        seq.decoder.pace.number = number  # type: ignore[union-attr, attr-defined]
        seqs.append(seq)
    llm.loop.call(lambda: [llm.loop.submit(seq) for seq in seqs])  # before the thread of the loop takes a step
    take_steps(llm, seqs)
    for seq in seqs:
        assert seq.decoder.report.verified[5] > 0


def test_sequences_of_other_rules_take_steps_of_their_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets decide how lists are cut, and with it the bits."""
    monkeypatch.setattr(llm.loop, "clock", lambda: 0.0)  # no sequence is owed steps while others are read
    plans = [f"quest:{SMALL}:dense_layers={layers}" for layers in ("none", "0", "none")] + ["dense", PLANS[0]]
    seqs = [new_sequence(llm, text_of(200 + 40 * number), plan, 30) for number, plan in enumerate(plans)]
    for seq in seqs:
        llm.loop.submit(seq)
    while any(seq.group is None for seq in seqs):
        assert not any(seq.is_ended for seq in seqs)
        llm.loop.step()
    assert seqs[0].group is seqs[2].group
    assert len({id(seq.group) for seq in seqs}) == 4
    take_steps(llm, seqs)


def test_what_is_attended_does_not_depend_on_where_its_pages_lie(llm: LLM) -> None:
    """A GPU attends runs of pages one by one elsewhere, which rounds differently."""
    llm.load()
    document = llm.read(text_of(300)).prefill(parse_plan("dense"))
    for kv in (llm.loop.pages.kv, document.table.kv):
        table = PageTable(1, kv)
        table.rows[0].runs = [Run(0, 4), Run(9, 14)]
        reader = RowReader(document.attentions[0].store.pool, table, 0, 100)
        assert reader.consecutive(100) == [(0, 100)]
        kv.steady = False
        assert reader.consecutive(100) == [(0, 64), (64, 100)]
        kv.steady = True
        table.rows[0].runs = []


def test_time_of_captures_is_no_time_of_a_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Slots.prepare

    def slow(slots: Slots, kind: StepKind) -> None:
        if not slots.captured(kind):
            sleep(0.5)
        prepare(slots, kind)

    monkeypatch.setattr(Slots, "prepare", slow)
    other = open_llm(Path(llm.directory.path), llm.fast_path.name)
    for answer in (
        other.generate(text_of(200), plan=PLANS[1], exact=True, max_new_tokens=NEW),
        other.read(text_of(300)).ask("What grinds?", plan=PLANS[1], exact=True, max_new_tokens=NEW, stop=None),
    ):
        assert answer.exact is not None
        assert answer.setup_s > 0.95
        assert max(answer.itl_s) < 0.48


def test_what_was_read_before_changes_no_bit(llm: LLM) -> None:
    keeping = open_llm(Path(llm.directory.path), llm.fast_path.name, keep_tokens=4096)
    for plan, exact in ((PLANS[0], False), (PLANS[1], True)):
        options = {"plan": plan, "exact": exact, "max_new_tokens": NEW}
        first, again = (keeping.generate(text_of(300), **options) for _ in range(2))
        assert again.new_prompt_tokens < again.prompt_tokens - GRID
        assert same(again, first)
        assert same(first, llm.generate(text_of(300), **options))


def test_log_probabilities_are_refused(llm: LLM) -> None:
    with refused("conflict"):
        llm.generate(text_of(200), plan=PLANS[0], exact=True, logprobs=2)


def test_a_context_is_cut_at_the_same_places_whatever_is_verified(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsift.engine.graphs.block_groups.reach", lambda kv: 6)
    prompt = text_of(300)
    exact = llm.generate(prompt, plan=PLANS[0], exact=True, max_new_tokens=NEW)
    assert same(exact, llm.generate(prompt, max_new_tokens=NEW))
    assert max(exact.exact["verified"]) <= 5


def test_all_products_of_blocks_are_steady(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    product = Projection.__call__

    def watched(*arguments: Any, **options: Any) -> Any:
        seen.append(options.get("steady"))
        return product(*arguments, **options)

    monkeypatch.setattr(Projection, "__call__", watched)
    ids = llm.generate(text_of(100), max_new_tokens=1).token_ids  # captured steps are kept
    seen.clear()
    fresh = open_llm(Path(llm.directory.path), llm.fast_path.name)
    step, inside = FusedStep.__call__, list[Any]()

    def within(of: FusedStep, tokens: Any, angles: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
        seen.clear()
        logits = step(of, tokens, angles, batch, *arguments, **options)
        inside.extend(seen if batch.block else [])  # whether steps can be captured is tried without blocks
        return logits

    monkeypatch.setattr(FusedStep, "__call__", within)
    assert fresh.generate(text_of(100), max_new_tokens=4).token_ids[:1] == ids
    assert inside
    assert all(inside)


def test_a_sequence_whose_steps_find_no_memory_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    other = open_llm(Path(llm.directory.path), llm.fast_path.name)
    blocks, failures = Session.blocks, [1]

    def failing(*arguments: Any, **options: Any) -> Any:
        if failures and failures.pop():
            raise torch.OutOfMemoryError("no memory for angles")
        return blocks(*arguments, **options)

    monkeypatch.setattr(Session, "blocks", failing)
    seqs = [new_sequence(other, text_of(100 + number), "dense", 10) for number in range(2)]
    for seq in seqs:
        other.loop.submit(seq)
    take_steps(other, seqs)
    assert sorted(seq.error is None for seq in seqs) == [False, True]
    for seq in (seq for seq in seqs if seq.error is None):
        assert tokens(seq) == llm.generate(text_of(len(seq.request.ids) - 1), max_new_tokens=10).token_ids
    assert_nothing_left(other)
