"""The guard in transformers' generate(): each row has its own, which goes with the row wherever it is copied or cut."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from models.tiny import SPARSE, greedy, logits, prompt, ragged, tiny
from refusals import refused
from torch import Tensor

import kvsift
from kvsift.models.hf.sparse import SparseCache

GUARDED = f"{SPARSE}:min_recovery=0.75"  # 48 tokens of 150 recover about half
LENGTHS = (150, 60, 100, 40)


def told(report: dict[str, Any], row: int | None = None) -> list[tuple[str, str, float]]:
    events = [event for event in report["guard"] if row is None or event["row"] == row]
    return [(event["from"], event["to"], round(event["recovery"], 5)) for event in events]


def test_only_the_rows_that_need_it_widen_and_each_answers_as_it_does_alone() -> None:
    model = tiny()
    with kvsift.sparse(model, GUARDED) as run:
        together = greedy(model, **ragged(*LENGTHS))
    widened = {event["row"] for event in run.report()["guard"]}
    assert 0 < len(widened) < len(LENGTHS)
    for row, length in enumerate(LENGTHS):
        with kvsift.sparse(model, GUARDED) as alone:
            assert torch.equal(greedy(model, prompt(length, seed=row))[0], together[row])
        assert told(alone.report()) == told(run.report(), row)
        if row not in widened:
            with kvsift.sparse(model, SPARSE):
                assert torch.equal(greedy(model, prompt(length, seed=row))[0], together[row])


def test_a_guard_that_never_acts_changes_nothing_and_says_nothing() -> None:
    model = tiny()
    with kvsift.sparse(model, f"{SPARSE}:min_recovery=0.01") as calm, torch.no_grad():
        guarded = greedy(model, prompt())
    with kvsift.sparse(model, SPARSE) as plain:
        assert torch.equal(greedy(model, prompt()), guarded)
    assert calm.report()["guard"] == plain.report()["guard"] == []
    assert calm.report()["phases"] == {
        phase: {**row, "select_s": calm.report()["phases"][phase]["select_s"]}
        for phase, row in plain.report()["phases"].items()
    }


def stepped(model: Any, cache: SparseCache, tokens: Tensor) -> Tensor:
    """Logits after each of some tokens, which are fed one by one."""
    steps = [logits(model, token[:, None], past_key_values=cache) for token in tokens.unbind(1)]
    return torch.cat(steps, 1)


def guarded_cache(model: Any, plan: str = GUARDED) -> SparseCache:
    cache = kvsift.make_cache(model, plan)
    logits(model, prompt(), past_key_values=cache)
    return cache


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_tokens_that_were_cropped_leave_no_trace_in_the_budget(cut: int) -> None:
    model, tokens = tiny(), prompt(8, seed=7)
    whole, cropped = guarded_cache(model), guarded_cache(model)
    expected = stepped(model, whole, tokens)
    assert len(told(whole.run.report())) >= 2
    stepped(model, cropped, tokens[:, :cut])
    stepped(model, cropped, prompt(6, seed=8))
    cropped.crop(-6)
    assert torch.equal(stepped(model, cropped, tokens[:, cut:]), expected[:, cut:])


def test_a_new_turn_begins_with_the_budget_of_the_plan() -> None:
    model, turn = tiny(), prompt(20, seed=4)
    cache, plain = guarded_cache(model), guarded_cache(model, SPARSE)
    for each in (cache, plain):
        stepped(model, each, prompt(5, seed=3))
    before = len(told(cache.run.report()))
    assert before
    for each in (cache, plain):
        logits(model, turn, past_key_values=each)
    stats = [each.run.stats.tally(1, "decode") for each in (cache, plain)]
    seen = [float(tally.visible_tokens) for tally in stats]
    for each in (cache, plain):
        stepped(model, each, prompt(1, seed=5))
    narrow = [float(tally.visible_tokens) - first for tally, first in zip(stats, seen)]
    assert narrow[0] == narrow[1] <= 48
    stepped(model, cache, prompt(4, seed=6))
    assert told(cache.run.report())[before][:2] == ("budget=48", "budget=96")


def test_rows_take_their_guards_with_them() -> None:
    model, tokens = tiny(), prompt(8, seed=7)
    cache = kvsift.make_cache(model, GUARDED)
    pair = torch.cat([prompt(), prompt(seed=1)])
    logits(model, pair, past_key_values=cache)
    steps = torch.cat([tokens, prompt(8, seed=9)])
    first = stepped(model, cache, steps[:, :3])
    cache.batch_select_indices(torch.tensor([1, 0, 0]))
    rest = stepped(model, cache, steps[[1, 0, 0], 3:])
    for row, source in enumerate([1, 0, 0]):
        alone = kvsift.make_cache(model, GUARDED)
        logits(model, pair[[source]], past_key_values=alone)
        expected = stepped(model, alone, steps[[source]])
        torch.testing.assert_close(torch.cat([first[[source]], rest[[row]]], 1), expected, atol=1e-5, rtol=1e-5)
        assert told(cache.run.report(), row)[-1] == told(alone.run.report())[-1]


def test_a_copy_of_a_cache_goes_on_with_its_own_guard() -> None:
    model, tokens = tiny(), prompt(8, seed=7)
    expected = stepped(model, guarded_cache(model), tokens)
    cache = guarded_cache(model)
    stepped(model, cache, tokens[:, :3])
    other = copy.deepcopy(cache)
    for each in (cache, other):
        assert all(layer.attention.guards is each.run.guards for layer in each.layers)
        assert torch.equal(stepped(model, each, tokens[:, 3:]), expected[:, 3:])


def test_another_plan_begins_anew() -> None:
    model, tokens = tiny(), prompt(8, seed=7)
    cache = guarded_cache(model)
    stepped(model, cache, tokens)
    cache.crop(-8)
    cache.replan(GUARDED.replace("budget=48", "budget=64"))
    stepped(model, cache, tokens)
    assert told(cache.run.report())[0][:2] == ("budget=64", "budget=128")
    with refused("unsupported_plan: probe_every=0 takes none"):
        kvsift.make_cache(model, SPARSE, probe_every=0).replan(GUARDED)


def test_threads_widen_alone_and_report_together() -> None:
    model, prompts = tiny(), [prompt(150), prompt(60, 1), prompt(140, 2)]
    with kvsift.sparse(model, GUARDED) as alone:
        expected = [greedy(model, ids) for ids in prompts]
    with kvsift.sparse(model, GUARDED) as run, ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda ids: greedy(model, ids), prompts))
    assert all(torch.equal(one, other) for one, other in zip(expected, answers))
    assert sorted(told(run.report())) == sorted(told(alone.report())) != []
    run.stats.clear()
    assert run.report()["guard"] == []


def test_beams_widen_as_their_rows_do() -> None:
    model = tiny()
    with kvsift.sparse(model, GUARDED) as run:
        found = greedy(model, prompt(), num_beams=3)
        assert torch.equal(greedy(model, prompt(), num_beams=3), found)
    assert run.report()["guard"]


def test_what_a_guard_cannot_follow_is_refused() -> None:
    model = tiny()
    for make in (kvsift.make_cache, lambda *given, **options: kvsift.sparse(*given, **options).__enter__()):
        with refused("unsupported_plan: probe_every=0 takes none"):
            make(model, GUARDED, probe_every=0)
    with kvsift.sparse(model, GUARDED), refused("unsupported_call"):
        greedy(model, prompt().repeat(1, 2), prompt_lookup_num_tokens=3)
