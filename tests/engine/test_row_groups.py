"""Rows of the loop in captured steps: each answers and counts as it does alone, whoever joins and leaves."""

from __future__ import annotations

import os
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
from engine.loop_rows import GREEDY, PLANS, QUEST, alone, assert_equal, history, new_llm, new_row, take_steps, tokens
from engine.tiny_directory import text_of

from kvsift import LLM, Sampling
from kvsift.engine import pauses, schedule
from kvsift.engine.graphs import captured_rows
from kvsift.engine.graphs.row_groups import PoolSession
from kvsift.engine.graphs.session import Session
from kvsift.engine.graphs.slots import Slots
from kvsift.engine.row import Row

HISTORIES = int(20 * float(os.environ.get("KVSIFT_EXAMPLES", "1")))


def test_rows_of_several_plans_answer_side_by_side_as_alone(llama: Path) -> None:
    samplings = [Sampling(0.9, 0.9, seed=number) if number % 3 == 2 else GREEDY for number in range(len(PLANS))]
    texts = [text_of(150 + 61 * number) for number in range(len(PLANS))]
    cases = list(zip(texts, PLANS, [12] * len(PLANS), samplings))
    llm = new_llm(llama)
    rows = [new_row(llm, *case) for case in cases]
    for row in rows:
        llm.loop.submit(row)
    take_steps(llm, rows)
    for row, case in zip(rows, cases):
        assert_equal(row, alone(new_llm(llama), *case))
        assert row.finish_reason == "length"
        assert bool(row.composed) == case[1].startswith("snapkv"), row.composed
        if not case[1].startswith("sketch"):  # over pages of 16 the compiled core rounds their queries
            assert_equal(row, alone(new_llm(llama, "composed"), *case))
    assert sum(len(group._rows) for group in llm.loop._model._groups) == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_row_that_cannot_join_ends_alone(deterministic: bool, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [tokens(alone(new_llm(llama, deterministic=deterministic), text_of(size), QUEST)) for size in (100, 150)]
    llm = new_llm(llama, deterministic=deterministic)
    rows = [new_row(llm, text_of(size), QUEST) for size in (100, 120, 150)]
    need, joined = PoolSession.need, list[int]()

    def failing(session: PoolSession, num_pages: int) -> None:
        joined.append(num_pages)
        if len(joined) == 2:
            raise MemoryError("no room")
        need(session, num_pages)

    monkeypatch.setattr(PoolSession, "need", failing)
    for row in rows:
        llm.loop.submit(row)
    take_steps(llm, rows)
    assert isinstance(rows[1].error, MemoryError)
    assert [tokens(row) for row in rows[::2]] == expected
    assert not any(group.rows for group in llm.loop._model._groups)  # type: ignore[attr-defined]


def test_histories_of_joining_and_cancelling_change_no_other_row(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single, known = new_llm(llama), dict[tuple[Any, ...], Row]()
    for seed in range(HISTORIES):
        rng = random.Random(seed)
        monkeypatch.setattr(pauses, "PAUSE_S", rng.choice([0.0, 1.0]))
        monkeypatch.setattr(captured_rows, "MOVE_STEPS", rng.choice([1, 512]))
        monkeypatch.setattr(captured_rows, "LAUNCHED_AHEAD", rng.choice([1, 2, 3]))
        monkeypatch.setattr(schedule, "PLACED_STEPS", rng.choice([1, 4, 16]))
        llm, keep_tokens = new_llm(llama), rng.choice([0, 1024])
        llm.loop = type(llm.loop)(llm.loop._model, llm.loop.grid, max_rows=rng.choice([2, 8]), keep_tokens=keep_tokens)
        for row, case in history(llm, rng):
            if case not in known:
                known[case] = alone(single, *case)
            assert_equal(row, known[case])


def test_steps_go_on_while_a_row_joins_and_are_made_anew_when_the_pool_moves(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    assign = Slots.assign

    def watched(slots: Slots, rows: Any, steps: int) -> None:
        made.append(len(rows))
        assign(slots, rows, steps)

    monkeypatch.setattr(Slots, "assign", watched)
    llm, moved = new_llm(llama), 0
    rows = [new_row(llm, text_of(500), QUEST, 40)]
    llm.loop.submit(rows[0])
    while len(tokens(rows[0])) < 8:
        llm.loop.step()
    before, keys = llm.loop.pages.kv.moves, weakref.ref(llm.loop.pages.kv.layers[0].keys)
    assert made.count(1) == 1
    rows.append(new_row(llm, text_of(900), QUEST, 10))
    llm.loop.submit(rows[1])
    take_steps(llm, rows)
    moved = llm.loop.pages.kv.moves - before
    assert moved > 0
    assert keys() is None, "for a while there were two pools"
    assert made[-1] in (1, 2)
    assert 2 in made
    for row, text, count in zip(rows, (text_of(500), text_of(900)), (40, 10)):
        assert_equal(row, alone(new_llm(llama, "composed"), text, QUEST, count))


@pytest.mark.parametrize("where", ["run", "read"])
def test_a_step_that_fails_is_taken_again(where: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, failures = new_llm(llama), [ValueError("broken")]
    rows = [new_row(llm, text_of(300 + 40 * number), QUEST, 20) for number in range(3)]
    for row in rows:
        llm.loop.submit(row)
    while not all(len(tokens(row)) > 5 for row in rows):
        llm.loop.step()
    owner, name = (Slots, "run") if where == "run" else (captured_rows.CapturedRows, "_read")
    original = getattr(owner, name)

    def fail(*arguments: Any) -> Any:
        result = original(*arguments)
        if failures:
            raise failures.pop()
        return result

    monkeypatch.setattr(owner, name, fail)
    take_steps(llm, rows)
    for number, row in enumerate(rows):
        assert row.error is None
        assert tokens(row) == tokens(alone(new_llm(llama, "composed"), text_of(300 + 40 * number), QUEST, 20))


def test_what_a_client_chooses_itself_is_fed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server repeats tokens that it sent before its engine was restarted, whatever the steps would choose now."""

    def forced(llm: LLM) -> Row:
        row = new_row(llm, text_of(400), QUEST, 20)
        take = row.output.take

        def chosen(logits: Any, probe_s: float) -> Any:
            token, reason = take(logits, probe_s)
            return (token + 1 if len(tokens(row)) in (4, 5, 9) else token), reason

        row.output.take = chosen  # type: ignore[method-assign]
        llm.loop.submit(row)
        take_steps(llm, [row])
        return row

    captured, composed = forced(new_llm(llama)), forced(new_llm(llama, "composed"))
    assert captured.composed == ""
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
