"""Dropping for good: the answers of hiding, with memory that really falls, and clear words about what it rules out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from contracts.checks import ALL_CHECKS
from contracts.harness import SHAPE, Case, Check, Runner, assert_same_answer, cases, draw_tokens, examples, small
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from kvsift.methods.base import Method
from kvsift.methods.keydiff import KeyDiff
from kvsift.methods.tova import TOVA
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import parse_plan
from kvsift.stores.evicting import EvictingStore
from kvsift.types import Rope

DROPPING: list[tuple[str, dict[str, Any]]] = [
    ("h2o", {}),
    ("h2o", {"mode": "oneshot"}),
    ("h2o", {"mode": "decode_only", "recent": 0.0}),
    ("snapkv", {}),
    ("snapkv", {"pooling": "max"}),
    ("tova", {}),
    ("keydiff", {}),
    ("streaming_llm", {}),
]
IDS = [":".join([name, *(f"{key}={value}" for key, value in knobs.items())]) for name, knobs in DROPPING]
CONTRACTED = {name: (name, knobs) for name, knobs in DROPPING if name == "streaming_llm" or not knobs}
# A roll-back behind what was dropped is refused, and so is KV in host memory; tests below.
GOING_BACK = {
    "a_rolled_back_sequence_answers_as_if_nothing_had_been",
    "messages_between_layers_stay_in_their_sequence_and_pass",
    "placements_do_not_change_the_answer",
    "summaries_do_not_depend_on_how_they_were_built",
}


def evicting(name: str, knobs: dict[str, Any]) -> Callable[[], Method]:
    return small(name, evict=True, **knobs)


def hiding(name: str, knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[], Method]:
    """The same method over a store that frees nothing. Some that do not drop choose anew when they only hide."""
    if name in ("keydiff", "streaming_llm"):
        monkeypatch.setattr(Plan, "evicts_in", lambda plan, layer: False)
        return evicting(name, knobs)
    return small(name, **knobs)


@pytest.mark.parametrize(("name", "knobs"), DROPPING, ids=IDS)
def test_answers_are_those_of_hiding(name: str, knobs: dict[str, Any]) -> None:
    dropped = []

    @examples(20)
    @given(case=cases(evicting(name, knobs)(), "decode"), at_once=st.booleans())
    def holds(case: Case, at_once: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            hidden = Runner(Plan(decode=Rule(hiding(name, knobs, patch)(), case.budget)))
        freed = Runner(Plan(decode=Rule(evicting(name, knobs)(), case.budget)))
        assert isinstance(freed.store, EvictingStore)
        assert not isinstance(hidden.store, EvictingStore)
        cuts = [] if at_once else range(case.prompt, case.length)
        expected, answer = (each.feed_all(case.tokens, case.prompt, cuts) for each in (hidden, freed))
        assert_same_answer(answer, expected, "freeing changed the answer")
        for key in ("visible_tokens", "sparse_queries", "kv_bytes_read"):
            assert getattr(freed.stats.phase("decode"), key) == getattr(hidden.stats.phase("decode"), key)
        dropped.append(freed.store.num_stored(0) < case.length)

    holds()
    assert sum(dropped) > 5


PREFILLING = [("h2o", {}), ("h2o", {"mode": "oneshot"}), ("keydiff", {}), ("streaming_llm", {})]


@pytest.mark.parametrize(("name", "knobs"), PREFILLING, ids=["h2o", "h2o:oneshot", "keydiff", "streaming_llm"])
def test_a_prompt_that_is_dropped_while_it_is_read_is_answered_as_one_that_is_hidden(
    name: str, knobs: dict[str, Any]
) -> None:
    dropped = []

    @examples(12)
    @given(case=cases(evicting(name, knobs)(), "prefill"), steps=st.integers(0, 70), data=st.data())
    def holds(case: Case, steps: int, data: st.DataObject) -> None:
        rule = Rule(evicting(name, knobs)(), case.budget)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Plan, "evicts_in", lambda plan, layer: False)  # the same memory of what was dropped
            hidden = Runner(Plan(rule, rule))
        freed = Runner(Plan(rule, rule))
        tokens, size = draw_tokens(case.prompt + steps, case.seed), rule.method.segment_size
        chunk = size * data.draw(st.integers(1, 3))
        cuts = [*range(chunk, case.prompt, chunk), *range(case.prompt, tokens.length)]
        expected, answer = (each.feed_all(tokens, case.prompt, cuts) for each in (hidden, freed))
        assert_same_answer(answer, expected, "freeing changed the answer")
        for phase in ("prefill", "decode"):
            for key in ("visible_tokens", "sparse_queries", "kv_bytes_read"):
                assert getattr(freed.stats.phase(phase), key) == getattr(hidden.stats.phase(phase), key)
        dropped.append(freed.store.num_stored(0) < tokens.length)

    holds()
    assert sum(dropped) > 3


@pytest.mark.parametrize("spec", ["h2o:budget=64:window=16", "keydiff:budget=64:window=16", "streaming_llm:budget=64"])
def test_reading_takes_no_more_memory_than_budget_and_chunk(spec: str) -> None:
    rule = f"{spec}:sinks=2:dense_layers=none:evict=true"
    runner = Runner(parse_plan(f"both={rule}"), num_rows=2)
    tokens, per_token, chunk = draw_tokens(4096, 0), 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 4, 128
    for start in range(0, 4096, chunk):
        runner.feed(tokens.part(start, start + chunk), None)
        assert runner.store.num_stored(0) <= 64 + chunk
        spare = 64 * 16 if start == 0 else 0  # pages, as long as the row has them
        assert runner.store.num_bytes <= (64 + 2 * chunk + 64 + spare) * (per_token + 2 * 8)
    runner.feed(draw_tokens(1, 1), tokens.part(0, chunk), decode_tokens=1)
    assert runner.store.num_stored(0) == 64
    assert runner.store.lengths == [4097, 128]


def test_keydiff_reads_block_by_block_and_keeps_what_is_least_like_the_rest() -> None:
    """The paper's algorithm in plain Python: blocks of 128 tokens, before each of which the cache is cut to budget."""
    tokens, budget, block = draw_tokens(700, 3), 50, 128
    rule = f"keydiff:evict=true:chunk={block}:budget={budget}:sinks=0:window=1:dense_layers=none"
    runner = Runner(parse_plan(f"both={rule}"))
    runner.feed(tokens)
    for head in range(SHAPE.num_kv_heads):
        left: list[int] = []
        for start in range(0, 700, block):
            if len(left) > budget - 1:  # the first query of a block sees itself too
                keys = torch.nn.functional.normalize(tokens.keys[head, left], dim=-1)
                likeness = keys @ torch.nn.functional.normalize(keys.mean(0), dim=0)
                left = sorted(left[i] for i in likeness.argsort()[: budget - 1].tolist())
            left += range(start, min(start + block, 700))
        held = runner.store.reader(0).keys()[head]
        assert torch.equal(held, tokens.keys[head, left])


@pytest.mark.parametrize("check", [c for c in ALL_CHECKS if c.__name__ not in GOING_BACK], ids=lambda c: c.__name__)
@pytest.mark.parametrize(("name", "knobs"), CONTRACTED.values(), ids=CONTRACTED)
@pytest.mark.usefixtures("fewer_examples")
def test_contracts_hold(name: str, knobs: dict[str, Any], check: Check) -> None:
    check(evicting(name, knobs), "decode")


BUDGET = Budget(tokens=64, sinks=2, window=16, dense_layers=())


@pytest.mark.parametrize("spec", ["h2o", "snapkv:queries=8", "tova", "keydiff", "streaming_llm"])
def test_memory_falls_to_the_budget(spec: str) -> None:
    window = "" if spec == "streaming_llm" else ":window=16"
    plan = parse_plan(f"decode={spec}:evict=true:budget=64:sinks=2{window}:dense_layers=none")
    runner, tokens = Runner(plan, num_rows=2), draw_tokens(2000, 0)
    runner.feed(tokens, tokens.part(0, 1500))
    whole, per_token = runner.store.num_bytes, 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 4
    assert whole >= 3500 * per_token
    for step in range(70):
        token = draw_tokens(1, step)
        runner.feed(token, token, decode_tokens=1)
        held = [runner.store.num_stored(row) for row in range(2)]
        assert held == [64, 64]
        assert runner.store.num_bytes <= 2 * (64 + 2 * 64) * per_token + 2 * 2 * 64 * 8
    assert runner.store.lengths == [2070, 1570]
    assert float(runner.stats.phase("decode").visible_tokens) == 2 * 70 * 64


def test_streaming_in_cache_positions_frees_too() -> None:
    shape = SHAPE._replace(rope=Rope(10000 ** (-torch.arange(4) / 4)))
    tokens, outputs = draw_tokens(90, 0), []
    for evict in ("false", "true"):
        plan = parse_plan(f"decode=streaming_llm:positions=cache:evict={evict}:budget=20:sinks=3")
        runner = Runner(plan, shape=shape)
        outputs.append(runner.feed_all(tokens, 70, range(70, 90)))
    assert_same_answer(outputs[1], outputs[0], "freeing changed the answer")
    assert isinstance(runner.store, EvictingStore)
    assert runner.store.num_stored(0) == 20


def test_dense_layers_keep_everything() -> None:
    plan = Plan(decode=Rule(TOVA(evict=True), replace(BUDGET, dense_layers=(2,))))
    runner = Runner(plan)
    assert SHAPE.layer == 2
    assert not isinstance(runner.store, EvictingStore)
    runner.feed(draw_tokens(100, 0))
    runner.feed(draw_tokens(1, 1), decode_tokens=1)
    runner.crop(0, 50)


def test_what_was_missed_is_not_known() -> None:
    plan = Plan(decode=Rule(TOVA(evict=True), BUDGET))
    runner = Runner(plan)
    runner.stats.probe_every = 1
    runner.feed_all(draw_tokens(100, 0), 90, range(90, 100))
    report = runner.stats.phase("decode").report()
    assert report["sparse_queries"] == 10
    assert report["recall"] is None
    assert report["recovery"] is None


def after_dropping() -> Runner:
    runner = Runner(parse_plan("decode=snapkv:evict=true:budget=64:window=16:dense_layers=none"))
    runner.feed_all(draw_tokens(100, 0), 95, range(95, 100))
    return runner


def test_another_prompt_is_refused_once_something_is_gone() -> None:
    with refused("evicted_tokens"):
        after_dropping().feed(draw_tokens(3, 1))


RULE = "h2o:evict=true:budget=64:window=16:dense_layers=none"


def test_a_marked_point_is_come_back_to_though_prefill_has_dropped() -> None:
    tokens, plan = draw_tokens(400, 0), parse_plan(f"both={RULE}")
    runner, alone = Runner(plan), Runner(plan)
    for each in (runner, alone):
        each.feed(tokens.part(0, 300))
    runner.attention.checkpoint()
    expected = alone.feed_all(tokens, 330, [330, *range(330, 400)], start=300)
    for extra in (5, 500):
        assert runner.attention.store.can_crop(0, 300)
        runner.feed_all(draw_tokens(300 + extra, 1), 320, [320], start=300)
        assert not runner.attention.store.can_crop(0, 301)
        runner.crop(0, 300)
    outputs = runner.feed_all(tokens, 330, [330, *range(330, 400)], start=300)
    assert_same_answer(outputs, expected, "a roll-back left a trace")
    assert runner.store.num_stored(0) == alone.store.num_stored(0) == 64
    assert runner.store.num_bytes > alone.store.num_bytes  # what was marked is held once more


def test_another_prompt_is_read_where_prompts_are_dropped_too() -> None:
    tokens, plan = draw_tokens(700, 0), parse_plan(f"both={RULE}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "evicts_in", lambda plan, layer: False)
        hidden = Runner(plan)
    freed, outputs = Runner(plan), []
    for runner in (hidden, freed):
        first = runner.feed_all(tokens.part(0, 410), 400, range(400, 410))
        second = runner.feed(tokens.part(410, 690))[0]  # beyond a multiple of the segment size
        outputs.append(torch.cat([first, second, *runner.feed(tokens.part(690, 700), decode_tokens=10)], 1))
    assert_same_answer(outputs[1], outputs[0], "freeing changed the answer")
    assert freed.store.num_stored(0) == 64


def test_another_plan_is_refused_once_something_is_gone() -> None:
    with refused("evicted_tokens"):
        after_dropping().attention.replan(Plan())


def test_a_plan_that_frees_may_take_over_a_cache() -> None:
    tokens = draw_tokens(100, 0)
    runner = Runner(Plan())
    runner.feed(tokens.part(0, 95))
    del runner.store.append  # the harness's own, which would go on writing to the old store
    runner.attention.replan(Plan(decode=Rule(KeyDiff(evict=True), BUDGET)))
    alone = Runner(Plan(decode=Rule(KeyDiff(evict=True), BUDGET)))
    expected = alone.feed_all(tokens, 95, range(95, 100))[:, 95:]
    outputs = [runner.feed(tokens.part(i, i + 1), decode_tokens=1)[0] for i in range(95, 100)]
    assert_same_answer(torch.cat(outputs, 1), expected, "taking over changed the answer")
    assert isinstance(runner.attention.store, EvictingStore)
    assert runner.attention.store.num_stored(0) == 64


def test_what_a_plan_missed_is_known_though_another_one_could_have_dropped_it() -> None:
    runner = Runner(parse_plan("keydiff:evict=true:budget=500:window=16:dense_layers=none"))
    runner.stats.probe_every = 1
    runner.feed_all(draw_tokens(100, 0), 95, range(95, 100))
    runner.attention.replan(parse_plan("quest:budget=64:window=16:dense_layers=none"))
    runner.feed(draw_tokens(1, 1), decode_tokens=1)
    assert not runner.attention.store.evicts, "it need not evict any more"
    assert runner.stats.phase("decode").report()["recall"] is not None
