"""Threads that run one model in one block, or one cache after another: each conversation has a state of its own."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from time import sleep
from typing import Any

import pytest
import torch
from models.tiny import SPARSE, greedy, logits, prompt, tiny
from refusals import refused
from torch import Tensor

import kvsift
from kvsift.models.hf.adapter import Adapter
from kvsift.models.hf.foresight import Foresight

PLANS = [
    SPARSE,
    f"prefill=quoka:budget=64:chunk=16:window=8:dense_layers=none,decode={SPARSE}",
    "infinigen:budget=48:window=8:dense_layers=none",
    "retrieval_attention:budget=48:sinks=4:window=8:dense_layers=none",
]


def together(tasks: list[Callable[[], Tensor]], rounds: int) -> list[list[Tensor]]:
    """What every task answers, round by round, in a thread of its own."""
    start = Barrier(len(tasks))

    def run(task: Callable[[], Tensor]) -> list[Tensor]:
        start.wait()
        return [task() for _ in range(rounds)]

    with ThreadPoolExecutor(len(tasks)) as threads:
        return list(threads.map(run, tasks))


@pytest.mark.parametrize("plan", PLANS)
def test_three_threads_that_generate_in_one_block_get_the_answers_they_get_alone(plan: str) -> None:
    model, prompts = tiny(num_hidden_layers=3), [prompt(20, 1), prompt(200, 2), prompt(100, 3)]
    with kvsift.sparse(model, plan) as alone:
        expected = [greedy(model, ids) for ids in prompts]
    with kvsift.sparse(model, plan) as run:
        answers = together([lambda ids=ids: greedy(model, ids) for ids in prompts], rounds=3)
    for mine, answer in zip(expected, answers):
        assert all(torch.equal(mine, each) for each in answer)
    for phase in ("prefill", "decode"):
        one, three = (each.report()["phases"][phase] for each in (alone, run))
        assert three["queries"] == 3 * one["queries"]
        assert three["visible_tokens"] == pytest.approx(one["visible_tokens"])


def test_a_forward_pass_of_one_thread_is_no_decode_step_because_another_generates() -> None:
    model = tiny()
    with kvsift.sparse(model, SPARSE) as run:
        together([lambda: greedy(model, prompt(60), 30), lambda: logits(model, prompt(80, 2))], rounds=4)
    assert run.report()["phases"]["decode"]["queries"] == 4 * 29 * 2


def test_counters_of_caches_that_are_gone_stay_in_the_report() -> None:
    model = tiny()
    with kvsift.sparse(model, SPARSE) as run:
        for seed in range(3):
            greedy(model, prompt(60, seed))
    assert run.report()["phases"]["decode"]["queries"] == 3 * 9 * 2


def test_a_copy_of_a_cache_is_counted_by_its_block_and_goes_on_alone() -> None:
    model = tiny()
    with kvsift.sparse(model, SPARSE) as run, torch.no_grad():
        first = model(input_ids=prompt(100), use_cache=True).past_key_values
        second = copy.deepcopy(first)
        answers = [logits(model, prompt(1, 5), past_key_values=cache) for cache in (first, second)]
    assert torch.equal(*answers)
    assert run.report()["phases"]["prefill"]["queries"] == 100 * 2
    assert run.report()["phases"]["decode"]["queries"] == 2 * 2


def test_a_block_that_is_entered_as_the_one_of_another_thread_ends_never_runs_the_model_unsifted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, attach = tiny(), Adapter.attach
    entered, leave, left = Event(), Event(), Event()

    def attach_slowly(model: Any) -> Adapter:
        adapter = attach(model)
        leave.set()
        left.wait(0.3)
        return adapter

    def run_another_block() -> None:
        with kvsift.sparse(model, SPARSE):
            entered.set()
            leave.wait()
        left.set()

    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(run_another_block)
        entered.wait()
        monkeypatch.setattr(Adapter, "attach", attach_slowly)
        with refused("unavailable"), kvsift.sparse(model, SPARSE, strict=True):
            greedy(model, prompt())
        other.result()
    assert "_kvsift" not in model.__dict__


def test_threads_that_begin_together_watch_every_attention_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watched twice, a layer would foresee the queries of its own input instead of the one below."""
    model, made = tiny(), []

    def slowly(model: Any) -> Foresight:
        made.append(model)
        sleep(0.1)
        return Foresight(model)

    monkeypatch.setattr("kvsift.models.hf.adapter.Foresight", slowly)
    with kvsift.sparse(model, PLANS[2]):
        together([lambda: greedy(model, prompt())] * 2, rounds=1)
    assert len(made) == 1
