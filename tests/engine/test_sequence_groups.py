"""Sequences of the loop in captured steps: each answers and counts as it does alone, whoever joins and leaves."""

import os
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
from engine.loop_sequences import (
    BELOW,
    GREEDY,
    PLANS,
    QUEST,
    alone,
    assert_equal,
    assert_nothing_left,
    history,
    new_llm,
    new_loop,
    new_sequence,
    take_steps,
    together,
    tokens,
)
from engine.tiny_directory import text_of

from kvsift import LLM, Sampling
from kvsift.engine import pauses, schedule
from kvsift.engine.graphs import sequence_groups
from kvsift.engine.graphs.session import Session
from kvsift.engine.graphs.slots import Slots
from kvsift.engine.sequence import EngineSequence

HISTORIES = int(10 * float(os.environ.get("KVSIFT_EXAMPLES", "1")))


@pytest.mark.parametrize("dense_below", [0, BELOW])
def test_sequences_of_several_plans_answer_side_by_side_as_alone(dense_below: int, llama: Path) -> None:
    samplings = [Sampling(0.9, 0.9, seed=number) if number % 3 == 2 else GREEDY for number in range(len(PLANS))]
    texts = [text_of(150 + 61 * number) for number in range(len(PLANS))]
    cases, options = list(zip(texts, PLANS, [12] * len(PLANS), samplings)), {"dense_below": dense_below}
    llm, single, composed = (new_llm(llama, path, **options) for path in ("eager", "eager", "composed"))
    seqs = together(llm, cases)
    for seq, case in zip(seqs, cases):
        assert_equal(seq, alone(single, *case))
        assert seq.finish_reason == "length"
        assert seq.path.startswith("composed") == case[1].startswith("snapkv"), seq.path
        if not case[1].startswith("sketch"):  # over pages of 16 the compiled core rounds their queries
            assert_equal(seq, alone(composed, *case))
    assert_nothing_left(llm)


@pytest.mark.parametrize("deterministic", [False, True])
def test_who_cannot_join_ends_alone(deterministic: bool, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [tokens(alone(new_llm(llama, deterministic=deterministic), text_of(size), QUEST)) for size in (100, 150)]
    llm = new_llm(llama, deterministic=deterministic)
    seqs = [new_sequence(llm, text_of(size), QUEST) for size in (100, 120, 150)]
    need, joined = Session.need, list[int]()

    def failing(session: Session, num_pages: int) -> None:
        joined.append(num_pages)
        if len(joined) == 2:
            raise MemoryError("no room")
        need(session, num_pages)

    monkeypatch.setattr(Session, "need", failing)
    for seq in seqs:
        llm.loop.submit(seq)
    take_steps(llm, seqs)
    assert isinstance(seqs[1].error, MemoryError)
    assert [tokens(seq) for seq in seqs[::2]] == expected
    assert_nothing_left(llm)


def test_joining_and_cancelling_changes_no_other_sequence(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single, known = new_llm(llama), dict[tuple[Any, ...], EngineSequence]()
    for seed in range(HISTORIES):
        rng = random.Random(seed)
        monkeypatch.setattr(pauses, "PAUSE_S", rng.choice([0.0, 1.0]))
        monkeypatch.setattr(sequence_groups, "MOVE_STEPS", rng.choice([1, 512]))
        monkeypatch.setattr(sequence_groups, "LAUNCHED_AHEAD", rng.choice([1, 2, 3]))
        monkeypatch.setattr(schedule, "PLACED_STEPS", rng.choice([1, 4, 16]))
        llm, keep_tokens = new_llm(llama), rng.choice([0, 1024])
        new_loop(llm, max_seqs=rng.choice([2, 8]), keep_tokens=keep_tokens)
        for seq, case in history(llm, rng):
            if case not in known:
                known[case] = alone(single, *case)
            assert_equal(seq, known[case])


def test_steps_go_on_while_a_sequence_joins_and_are_made_anew_when_the_pool_moves(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    assign = Slots.assign

    def watched(slots: Slots, seqs: Any, steps: int) -> None:
        made.append(len(seqs))
        assign(slots, seqs, steps)

    monkeypatch.setattr(Slots, "assign", watched)
    llm, moved = new_llm(llama), 0
    seqs = [new_sequence(llm, text_of(500), QUEST, 40)]
    llm.loop.submit(seqs[0])
    while len(tokens(seqs[0])) < 8:
        llm.loop.step()
    before, keys = llm.loop.pages.kv.moves, weakref.ref(llm.loop.pages.kv.layers[0].keys)
    assert made.count(1) == 1
    seqs.append(new_sequence(llm, text_of(900), QUEST, 10))
    llm.loop.submit(seqs[1])
    take_steps(llm, seqs)
    moved = llm.loop.pages.kv.moves - before
    assert moved > 0
    assert keys() is None, "for a while there were two pools"
    assert made[-1] in (1, 2)
    assert 2 in made
    for seq, text, count in zip(seqs, (text_of(500), text_of(900)), (40, 10)):
        assert_equal(seq, alone(new_llm(llama, "composed"), text, QUEST, count))


@pytest.mark.parametrize("where", ["run", "read"])
def test_a_step_that_fails_is_taken_again(where: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, failures = new_llm(llama), [ValueError("broken")]
    seqs = [new_sequence(llm, text_of(300 + 40 * number), QUEST, 20) for number in range(3)]
    for seq in seqs:
        llm.loop.submit(seq)
    while not all(len(tokens(seq)) > 5 for seq in seqs):
        llm.loop.step()
    owner, name = (Slots, "run") if where == "run" else (sequence_groups.SequenceGroup, "_read")
    original = getattr(owner, name)

    def fail(*arguments: Any) -> Any:
        result = original(*arguments)
        if failures:
            raise failures.pop()
        return result

    monkeypatch.setattr(owner, name, fail)
    take_steps(llm, seqs)
    for number, seq in enumerate(seqs):
        assert seq.error is None
        assert tokens(seq) == tokens(alone(new_llm(llama, "composed"), text_of(300 + 40 * number), QUEST, 20))


def test_what_a_client_chooses_itself_is_fed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server repeats tokens that it sent before its engine was restarted, whatever the steps would choose now."""

    def forced(llm: LLM) -> EngineSequence:
        seq = new_sequence(llm, text_of(400), QUEST, 20)
        take = seq.output.take

        def chosen(logits: Any, probe_s: float) -> Any:
            token, reason = take(logits, probe_s)
            return (token + 1 if len(tokens(seq)) in (4, 5, 9) else token), reason

        seq.output.take = chosen  # type: ignore[method-assign]
        llm.loop.submit(seq)
        take_steps(llm, [seq])
        return seq

    captured, composed = forced(new_llm(llama)), forced(new_llm(llama, "composed"))
    assert captured.path == "eager"
    assert tokens(captured) == tokens(composed)
    assert tokens(captured) != tokens(alone(new_llm(llama), text_of(400), QUEST, 20))


def test_the_next_prompt_takes_the_steps_of_the_last_and_a_document_their_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Session] = []
    begin = Session.__init__

    def watched(session: Session, *arguments: Any, **options: Any) -> None:
        opened.append(session)
        begin(session, *arguments, **options)

    monkeypatch.setattr(Session, "__init__", watched)
    llm, expected = new_llm(llama), new_llm(llama, "composed").generate(text_of(400), plan=QUEST, max_new_tokens=9)
    for _ in range(2):
        answer = llm.generate(text_of(400), plan=QUEST, max_new_tokens=9)
        assert (answer.path, answer.token_ids) == ("eager", expected.token_ids)
    assert len(opened) == 1
    pool = llm.loop.pages.kv
    assert llm.read(text_of(300)).ask("Which mill?", max_new_tokens=3).path == "eager"
    assert llm.loop.pages.kv is not pool
    assert llm.generate(text_of(400), plan=QUEST, max_new_tokens=9).token_ids == expected.token_ids
