"""Run statistics: bytes, recall and recovery against their definitions, exact however long a run is."""

import json
from typing import Any

import pytest
import torch
from contracts.harness import SHAPE, Runner, Tokens, draw_tokens, revealing_tokens

from kvsift.layer.accounting import RunStats, SharedStats, Tally, _add
from kvsift.layer.sparse_attention import SparseAttention
from kvsift.methods.base import Method, Phase
from kvsift.methods.oracle import OracleTokens
from kvsift.methods.quest import Quest
from kvsift.methods.streaming_llm import StreamingLLM
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.types import Chunk

BUDGET = Budget(tokens=24, sinks=4, window=4, dense_layers=())
PER_TOKEN = 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 4  # bytes of a key and a value in float32


def one_step(method: Method | None, tokens: Tokens, budget: Budget = BUDGET, shape: object = SHAPE) -> RunStats:
    stats = RunStats(probe_every=1)
    plan = Plan() if method is None else Plan(decode=Rule(method, budget))
    attention = SparseAttention(shape, plan, 1, torch.empty(0), stats)  # type: ignore[arg-type]
    prompt = tokens.length - 1
    attention.attend(Chunk(*(tensor[None] for tensor in tokens.part(0, prompt)), [prompt]))
    attention.attend(Chunk(*(tensor[None] for tensor in tokens.part(prompt)), [1]), 1)
    return stats


def test_a_dense_run_reads_and_shows_everything() -> None:
    report = one_step(None, draw_tokens(61, 0)).report()["phases"]
    assert report["decode"]["queries"] == 1
    assert report["decode"]["visible_tokens"] == 61
    assert report["decode"]["density"] == 1
    assert report["decode"]["sparse_queries"] == 0
    assert report["decode"]["kv_bytes_read"] == report["decode"]["kv_bytes_dense"] == 61 * PER_TOKEN
    assert report["decode"]["recall"] is None
    assert report["prefill"]["visible_tokens"] == 61 / 2 == (1 + 60) / 2
    assert report["prefill"]["density"] == 1


def test_a_step_reads_what_it_shows_and_what_it_scores() -> None:
    report = one_step(Quest(page_size=4), draw_tokens(61, 0)).report()["phases"]["decode"]
    visible = 4 + 5 + 3 * 4  # sinks, the window rounded up to pages, and the pages that still fit in 24
    assert report["visible_tokens"] == visible
    assert report["density"] == visible / 61
    assert report["kv_bytes_attended"] == visible * PER_TOKEN
    num_candidates, width = 13, 2 * SHAPE.head_dim
    assert report["kv_bytes_to_select"] == num_candidates * width * SHAPE.num_kv_heads * 4
    assert report["kv_bytes_read"] == report["kv_bytes_attended"] + report["kv_bytes_to_select"]
    assert report["kv_bytes_dense"] == 61 * PER_TOKEN
    assert report["sparse_queries"] == 1
    assert report["select_s"] > 0


def test_heads_that_choose_for_themselves_fetch_for_themselves() -> None:
    report = one_step(Quest(page_size=4, heads="query"), draw_tokens(61, 0)).report()["phases"]["decode"]
    assert report["visible_tokens"] == 21
    assert report["kv_bytes_attended"] == (9 + 2 * 12) * PER_TOKEN  # two query heads per KV head


@pytest.mark.parametrize("method", [Quest(page_size=4), OracleTokens(heads="query"), StreamingLLM()], ids=str)
def test_recall_and_recovery_are_those_of_exact_attention(method: Method) -> None:
    shape, tokens = revealing_tokens(61, 3)
    budget = BUDGET if method.traits.selects else Budget(tokens=24, dense_layers=())
    runner = Runner(Plan(decode=Rule(method, budget)), shape=shape)
    seen = runner.feed_all(tokens, 60, [60])[:, -1] > 0
    weights = (tokens.queries[:, -1:] @ tokens.keys.repeat_interleave(2, 0).mT * shape.scale).squeeze(1).softmax(-1)
    top = weights.topk(10).indices
    report = one_step(method, tokens, budget, shape).report()["phases"]["decode"]
    assert report["recall"] == pytest.approx(float(seen.gather(1, top).float().mean()))
    assert report["recovery"] == pytest.approx(float((weights * seen).sum(-1).mean()), rel=1e-5)


def test_probes_come_every_so_many_sparse_steps_and_can_be_turned_off() -> None:
    for every, expected in [(0, 0), (1, 10), (4, 3), (16, 1)]:
        runner = Runner(Plan(decode=Rule(Quest(page_size=4), BUDGET)))
        runner.stats.probe_every = every
        runner.feed_all(draw_tokens(70, 0), 60, range(60, 70))
        assert runner.stats.phase("decode").probes == expected
        assert (runner.stats.probe_s > 0) == (expected > 0)


@pytest.mark.parametrize(
    ("plan", "phase"),
    [
        (Plan(decode=Rule(Quest(page_size=4), BUDGET)), "decode"),
        (Plan(prefill=Rule(StreamingLLM(), Budget(tokens=5, dense_layers=()))), "prefill"),
    ],
)
def test_counts_stay_exact_in_runs_of_any_length(plan: Plan, phase: Phase) -> None:
    """2^30 visible tokens are 32 layers of a 32K prompt at a budget of 1024; float32 counts in steps of 128 there."""
    runner, fresh = Runner(plan), Runner(plan)
    runner.stats.tally(SHAPE.layer, phase).visible_tokens += 2**30
    for each in (runner, fresh):
        each.feed_all(draw_tokens(61, 0), 50, range(50, 61))
    found, expected = (float(each.stats.phase(phase).visible_tokens) for each in (runner, fresh))
    assert found - 2**30 == expected


def test_a_phase_that_skipped_nothing_is_known() -> None:
    assert not RunStats().skipped_nothing("decode")  # nothing ran
    assert one_step(None, draw_tokens(61, 0)).skipped_nothing("decode")
    assert one_step(Quest(page_size=4), draw_tokens(20, 0)).skipped_nothing("decode")  # budget above context
    assert not one_step(Quest(page_size=4), draw_tokens(61, 0)).skipped_nothing("decode")
    assert one_step(Quest(page_size=4), draw_tokens(61, 0)).skipped_nothing("prefill")


def test_a_report_sums_layers_and_is_ready_for_json() -> None:
    stats = RunStats()
    for layer, phase in [(3, "decode"), (1, "decode"), (1, "prefill")]:
        tally = stats.tally(layer, phase)  # type: ignore[arg-type]
        tally.queries, tally.context_tokens = 2, 100
        tally.visible_tokens = torch.tensor(30.0 * layer)
    report = json.loads(json.dumps(stats.report()))
    assert [(row["layer"], row["phase"]) for row in report["layers"]] == [(1, "decode"), (1, "prefill"), (3, "decode")]
    assert report["phases"]["decode"]["visible_tokens"] == (30 + 90) / 4
    assert report["phases"]["decode"]["density"] == 120 / 200
    assert stats.tallies[1, "decode"].queries == 2, "summing must not change the layers"
    stats.clear()
    assert stats.report()["layers"] == []
    assert stats.report()["phases"]["decode"]["density"] is None


def test_the_names_of_counters_are_those_of_stored_results() -> None:
    numbers = (2, 100, 30.0, 1, 1, 0.25, 640.0, 64.0, 1600.0, 320, 8, 4, 0.5, 2, 1.5, 1.25)
    assert Tally(*numbers).report() == {
        "queries": 2, "visible_tokens": 15.0, "density": 0.3, "sparse_queries": 1, "estimated_share": 0.25,
        "kv_bytes_read": 704, "kv_bytes_attended": 640, "kv_bytes_to_select": 64, "kv_bytes_dense": 1600,
        "kv_bytes_copied": 320, "device_cache_hits": 0.5, "select_s": 0.5, "recall": 0.75, "recovery": 0.625,
    }  # fmt: skip
    assert list(RunStats().report()) == ["phases", "layers", "guard"]
    assert list(RunStats().report()["phases"]) == ["prefill", "decode"]


def test_tallies_add_field_by_field() -> None:
    one, two = (
        Tally(queries=1, visible_tokens=2.0, probes=1, recall=0.5),
        Tally(queries=3, visible_tokens=torch.tensor(4)),
    )
    one.add(two)
    assert (one.queries, float(one.visible_tokens), one.probes, one.recall) == (4, 6.0, 1, 0.5)


def test_a_cache_that_another_thread_frees_meanwhile_stays_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cache:
        pass

    shared, caches = SharedStats(), [Cache(), Cache()]
    for cache in caches:
        shared.open(cache).tally(0, "decode").queries = 1

    def add_slowly(*args: Any) -> None:
        caches.clear()
        _add(*args)

    monkeypatch.setattr("kvsift.layer.accounting._add", add_slowly)
    del cache, caches[1]
    shared.open(shared)
    shared.open(shared)
    assert shared.phase("decode").queries == 2
