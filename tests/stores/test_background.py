"""Work on the host beside the device's: in another thread, with the same answer, and nothing lost on the way."""

import gc
import threading
from typing import Any

import pytest
import torch
from contracts.harness import Runner, Tokens, answers, assert_same_answer, draw_tokens

from kvsift.methods.oracle import OracleTokens
from kvsift.methods.quest import Quest
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.stores.background import new_thread, submit
from kvsift.stores.split import SplitStore

BUDGET = Budget(tokens=24, sinks=4, window=8, dense_layers=())
PLAN = Plan(decode=Rule(Quest(page_size=4), BUDGET))


class Disturbed(Exception):
    """Something went wrong in the other thread."""


def fail() -> None:
    raise Disturbed


def test_it_is_one_other_thread_in_the_callers_mode() -> None:
    here = threading.get_ident()
    with torch.inference_mode():
        runs = [submit(lambda: (threading.get_ident(), torch.is_inference_mode_enabled())) for _ in range(2)]
    one, other = (run.result() for run in runs)
    assert one == other
    assert one[0] != here
    assert one[1]
    assert not submit(torch.is_inference_mode_enabled).result()
    with pytest.raises(Disturbed):
        submit(fail).result()


@pytest.mark.parametrize("method", [Quest(page_size=4), OracleTokens()], ids=["pages", "tokens"])
def test_the_device_may_be_given_its_part_while_the_host_attends(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, tokens, threads = Plan(decode=Rule(method, BUDGET)), draw_tokens(90, 0), set()
    expected = answers(plan, tokens, 80)
    near = SplitStore._attend_near

    def recorded(*given: Any) -> Any:
        threads.add(threading.get_ident())
        return near(*given)

    monkeypatch.setattr(SplitStore, "_attend_near", recorded)
    monkeypatch.setattr(SplitStore, "at_once", True)
    assert_same_answer(answers(plan, tokens, 80, placement="split"), expected, "another answer beside the device")
    assert threads == {submit(threading.get_ident).result()}


@pytest.mark.parametrize("side", ["_attend_selected", "_attend_near"])
def test_what_fails_on_either_side_fails_the_step(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SplitStore, "at_once", True)
    monkeypatch.setattr(SplitStore, side, lambda *given: fail())
    runner = Runner(PLAN, placement="split")
    runner.feed(draw_tokens(80, 0))
    with pytest.raises(Disturbed):
        runner.feed(draw_tokens(1, 1), decode_tokens=1)


class Prepared(Quest):
    """Remembers in which thread it was prepared, over how many candidates."""

    def prepare(self, state: Any, shape: Any, candidates: Any, reader: Any, limit: Any) -> None:
        seen.append((threading.get_ident(), candidates.count))
        if candidates.count > 30:
            fail()


seen: list[tuple[int, int]] = []


def prepared_runner(*chunks: Tokens) -> Runner:
    seen.clear()
    runner = Runner(Plan(decode=Rule(Prepared(page_size=4), BUDGET)), placement="split")
    for chunk in chunks[:-1]:
        runner.feed(chunk)
    runner.attention.prepare_after_next(new_thread())
    runner.feed(chunks[-1])
    return runner


def test_a_layer_prepares_as_soon_as_the_last_chunk_is_there() -> None:
    tokens = draw_tokens(90, 0)
    runner = prepared_runner(tokens.part(0, 40), tokens.part(40, 80))
    runner.attention.prepare()
    runner.attention.prepare()
    assert [thread == threading.get_ident() for thread, _ in seen] == [False, True], "then nothing was under way"
    output = runner.feed_all(tokens, 80, range(80, 90), start=80)
    assert_same_answer(output, answers(PLAN, tokens, 80, [40, *range(80, 90)])[:, 80:], "preparing changed the answer")


def test_what_fails_then_is_said_by_whoever_needs_the_layer_next() -> None:
    for use in (
        lambda runner: runner.attention.prepare(),
        lambda runner: runner.feed(draw_tokens(1, 1), decode_tokens=1),
        lambda runner: runner.attention.crop(0, 5),
        lambda runner: runner.attention.replan(PLAN),
    ):
        runner = prepared_runner(draw_tokens(200, 0))
        with pytest.raises(Disturbed):
            use(runner)


def test_a_thread_ends_when_nobody_can_give_it_more() -> None:
    thread = new_thread()
    worker = submit(threading.current_thread, thread).result()
    assert worker.is_alive()
    del thread
    gc.collect()
    worker.join(timeout=10)
    assert not worker.is_alive()


def test_where_host_and_device_are_one_nothing_is_done_submit() -> None:
    assert not Runner(PLAN, placement="split").attention.store.is_remote
    assert not Runner(PLAN).attention.store.is_remote
