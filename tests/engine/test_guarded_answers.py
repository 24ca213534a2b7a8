"""Answers under a guard: a budget that recovers too little doubles, on both decode paths alike, and answers say it."""

from pathlib import Path
from typing import Any

import pytest
from ends import set_ends
from engine.loop_sequences import alone, assert_equal, new_llm, together
from engine.tiny_directory import text_of
from refusals import refused
from turns import in_turns

from kvsift import LLM, Sampling
from kvsift.api.answer import Answer
from kvsift.plan.syntax import parse_plan

REST = "window=16:dense_layers=0"
QUEST = f"quest:budget=128:{REST}:min_recovery=0.9"
TEXTS = [text_of(600), text_of(301), text_of(44), text_of(450)[::-1]]
COUNTERS = (
    "queries", "visible_tokens", "sparse_queries", "kv_bytes_dense", "kv_bytes_to_select", "recall"
)  # fmt: skip


def told(answer: Answer) -> list[tuple[Any, ...]]:
    return [(event["token"], event["from"], event["to"]) for event in answer.guard]


def assert_same(one: Answer, other: Answer) -> None:
    assert one.token_ids == other.token_ids
    assert told(one) == told(other)
    for mine, its in zip(one.guard, other.guard):
        assert mine["recovery"] == pytest.approx(its["recovery"], abs=1e-5)
        assert mine["lowest_layer"] == its["lowest_layer"]
    assert [one.decode(key) for key in COUNTERS] == [other.decode(key) for key in COUNTERS]
    assert [seq["sparse_queries"] for seq in one.stats["layers"]] == [
        seq["sparse_queries"] for seq in other.stats["layers"]
    ]


@pytest.fixture(autouse=True)
def no_answer_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ends(monkeypatch)


def test_a_bad_selection_widens_to_dense_and_a_good_one_does_not(llama: Path) -> None:
    guard = f"{REST}:min_recovery=0.6"
    llm = LLM(llama)
    bad = llm.generate(TEXTS[0], plan=f"random:budget=128:{guard}", max_new_tokens=24)
    assert told(bad) == [
        (3, "budget=128", "budget=256"), (5, "budget=256", "budget=512"), (7, "budget=512", "dense")
    ][: len(bad.guard)]  # fmt: skip
    assert len(bad.guard) >= 2
    assert all(event["lowest"] <= event["recovery"] < event["min_recovery"] == 0.6 for event in bad.guard)
    assert bad.stats["guard"][0]["position"] == bad.prompt_tokens + 1
    good = llm.generate(TEXTS[0], plan=f"oracle_tokens:budget=256:{guard}", max_new_tokens=24)
    assert good.guard == []
    assert good.decode("recovery") > 0.6
    strict = f"random:budget=128:{REST}:min_recovery=1.0"
    dense = llm.generate(TEXTS[0], plan=strict, max_new_tokens=24)
    assert told(dense)[-1] == (7, "budget=512", "dense")
    assert dense.decode("sparse_queries") == 6 * 2, "six steps of two layers"


@pytest.mark.parametrize("path", ["eager", "composed"])
def test_token_counts_those_before_the_wider_budget(path: str, llama: Path) -> None:
    llm = LLM(llama, QUEST, path=path)

    def visible(num_new: int) -> float:
        """Of the last step, in a sparse layer."""
        sums = []
        for count in (num_new - 1, num_new):
            seqs = llm.generate(TEXTS[0], max_new_tokens=count).stats["layers"]
            seq = next(seq for seq in seqs if (seq["layer"], seq["phase"]) == (2, "decode"))
            sums.append(seq["visible_tokens"] * seq["queries"])
        return sums[1] - sums[0]

    first = llm.generate(TEXTS[0], max_new_tokens=5).guard[0]["token"]
    assert first == 3
    assert visible(first) <= 128 < visible(first + 1) <= 256
    assert visible(first + 1) > 240


GUARDED = (
    QUEST,
    f"sketch:budget=64:{REST}:page_size=8:min_recovery=0.9",  # pages of 16: the compiled core rounds queries
    f"quest:budget=128:{REST}:min_recovery=0.5",
    f"quest:budget=128:{REST}:heads=query:score_by=mean_std:min_recovery=0.7",
    "quest:ratio=0.2:window=16:dense_layers=none:min_recovery=0.8",
    f"prefill=streaming_llm:budget=128,decode={QUEST}",
    f"{QUEST}:min_context=310",
)


@pytest.mark.parametrize(("plan", "probe_every"), in_turns(GUARDED, [4, 1, 16])[:7])
def test_captured_sequences_widen_as_they_do_alone_and_composed(plan: str, probe_every: int, llama: Path) -> None:
    eager, composed = (LLM(llama, plan, path=path, probe_every=probe_every) for path in ("eager", "composed"))
    together = eager.generate(TEXTS, max_new_tokens=30)
    assert {answer.path for answer in together} == {"eager"}
    assert any(answer.guard for answer in together)
    assert len({len(answer.guard) for answer in together}) > 1
    for text, answer in zip(TEXTS, together):
        alone = composed.generate(text, max_new_tokens=30)
        assert_same(answer, alone)
        if "heads=query" not in plan:  # whose lists the composed path reads once per KV head
            assert answer.decode("kv_bytes_attended") == alone.decode("kv_bytes_attended")
    assert_same(together[0], eager.generate(TEXTS[0], max_new_tokens=30))


def test_steps_are_counted_under_the_budget_that_they_had(llama: Path) -> None:
    text = text_of(254)  # its first step has a context of 256, which the next budget would show whole
    one, other = (LLM(llama, QUEST, path=path).generate(text, max_new_tokens=8) for path in ("eager", "composed"))
    assert one.guard[0]["to"] == "budget=256"
    assert_same(one, other)


@pytest.mark.parametrize("max_new_tokens", [3, 4])
def test_a_widening_that_no_token_follows_is_none(max_new_tokens: int, llama: Path) -> None:
    eager, composed = (LLM(llama, QUEST, path=path) for path in ("eager", "composed"))
    for text, answer in zip(TEXTS, eager.generate(TEXTS, max_new_tokens=max_new_tokens)):
        alone = composed.generate(text, max_new_tokens=max_new_tokens)
        assert_same(answer, alone)
        assert bool(answer.guard) == (max_new_tokens > 3 and len(text) > 100)


@pytest.mark.parametrize("last", [3, 4])
def test_sequences_that_end_around_a_widening_count_as_they_do_alone(
    last: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, composed = (LLM(llama, QUEST, path=path) for path in ("eager", "composed"))
    free = eager.generate(TEXTS, max_new_tokens=12)
    set_ends(monkeypatch, {free[0].token_ids[last]})
    found = eager.generate(TEXTS, max_new_tokens=12)
    assert len(found[0].token_ids) <= last
    for text, answer in zip(TEXTS, found):
        assert_same(answer, composed.generate(text, max_new_tokens=12))


def test_a_sequence_that_stops_sooner_widens_no_more(llama: Path) -> None:
    plain = QUEST.rpartition(":")[0]  # a sequence that makes no other move to larger slots
    eager, composed = (new_llm(llama, path, dense_below=0, probe_every=4) for path in ("eager", "composed"))
    for count in range(2, 7):
        cases = [(TEXTS[0], QUEST, count), (TEXTS[1], plain, 13)]
        for seq, case in zip(together(eager, cases), cases):
            assert_equal(seq, alone(composed, *case))


def test_samples_and_steps_go_on_where_slots_were_changed(llama: Path) -> None:
    sampling = [Sampling(0.9, 0.9, seed) for seed in range(len(TEXTS))]
    eager, composed = (LLM(llama, QUEST, path=path, dense_below=320) for path in ("eager", "composed"))  # type: ignore[arg-type]
    for one, other in zip(*(llm.generate(TEXTS, max_new_tokens=60, sampling=sampling) for llm in (eager, composed))):
        assert_same(one, other)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_question_begins_with_the_budget_of_the_plan(phase: Any, llama: Path) -> None:
    fast, slow = (LLM(llama, QUEST, path=path).read(TEXTS[0] * 2) for path in ("eager", "composed"))
    first = [document.ask("How many sacks?", max_new_tokens=12, question_phase=phase) for document in (fast, slow)]
    assert_same(*first)
    assert first[0].guard[0]["from"] == "budget=128"
    assert (first[0].guard[0]["token"] == 0) == (phase == "decode"), "the question's own tokens have widened it"
    plain = QUEST.rpartition(":")[0]
    for document in (fast, slow):
        other = document.ask("Which mill?", plan=plain, max_new_tokens=12, question_phase=phase)
        assert other.guard == []
        again = document.ask("How many sacks?", max_new_tokens=12, question_phase=phase)
        assert_same(again, first[0])
        third = document.ask("How many sacks?", max_new_tokens=12, question_phase=phase)
        assert_same(third, first[0])


@pytest.mark.parametrize("placement", ["split", "offload:device_cache=64", "host"])
def test_budgets_double_wherever_keys_and_values_are(placement: str, llama: Path) -> None:
    beside, apart = (LLM(llama, QUEST, placement=place, dtype="float32") for place in ("device", placement))
    one, other = (llm.generate(TEXTS[0], max_new_tokens=24) for llm in (beside, apart))
    assert other.token_ids == one.token_ids
    assert told(other) == told(one)
    assert len(one.guard) >= 3
    assert [other.decode(key) for key in ("visible_tokens", "sparse_queries")] == [
        one.decode(key) for key in ("visible_tokens", "sparse_queries")
    ]


@pytest.mark.usefixtures("no_weights")
def test_without_probes_a_guard_is_refused_before_anything_is_loaded(llama: Path) -> None:
    with refused("unsupported_plan: probe_every=0 takes none"):
        LLM(llama, QUEST, probe_every=0)
    llm = LLM(llama, probe_every=0)
    for call in (llm.generate, lambda text, **options: llm.read(text).ask("Why?", **options)):
        with refused("unsupported_plan: probe_every=0 takes none"):
            call(TEXTS[0], plan=QUEST)


def test_the_answer_is_ready_for_json(llama: Path) -> None:
    answer = LLM(llama, QUEST).generate(TEXTS[0], max_new_tokens=8)
    assert answer.as_dict()["guard"] == answer.guard != []
    assert answer.plan == QUEST == str(parse_plan(answer.plan))
    assert "row" not in answer.guard[0]
