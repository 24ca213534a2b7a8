"""What an answer says about itself: times without what is not the method's, counters that can be worked out by hand."""

import time
from pathlib import Path

import pytest
from engine.tiny_directory import text_of
from refusals import refused

from kvsift import LLM
from kvsift.models.hf.model_directory import ModelDirectory
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import parse_plan

TEXT = text_of(600)
QUEST = "quest:budget=128:window=16:dense_layers=none"
LAYERS, KV_BYTES_PER_TOKEN = 3, 2 * 2 * 16 * 4  # keys and values of 2 heads of 16 float32, in one layer


@pytest.fixture(scope="module")
def llm(llama: Path) -> LLM:
    return LLM(llama, QUEST)


def test_times_are_those_that_passed(llm: LLM) -> None:
    llm.load()
    started = time.perf_counter()
    answer = llm.generate(TEXT, max_new_tokens=12)
    passed = time.perf_counter() - started
    assert 0 < answer.ttft_s < passed
    assert len(answer.itl_s) == 11
    assert min(answer.itl_s) > 0
    assert answer.tpot_s == pytest.approx(sum(answer.itl_s) / 11)
    assert answer.ttft_s + sum(answer.itl_s) < passed


def test_loading_the_weights_is_not_in_the_time_to_the_first_token(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = ModelDirectory.load
    pause = 1.5  # far above what a tiny prompt takes

    def slowly(*args: object) -> object:
        time.sleep(pause)
        return load(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelDirectory, "load", slowly)
    assert LLM(llama).generate(TEXT, max_new_tokens=1).ttft_s < pause
    document = LLM(llama).read(TEXT)
    assert document.ask("Why?", max_new_tokens=1).ttft_s < pause
    assert 0 < document.read_s < pause


def test_probing_is_not_in_the_times(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pause = 0.1

    def probe(*args: object) -> tuple[float, float]:
        time.sleep(pause)
        return 1.0, 1.0

    for path in ("layer.sparse_attention", "models.native_step"):
        monkeypatch.setattr(f"kvsift.{path}.probe", probe)
    answer = LLM(llama, QUEST, probe_every=1).generate(TEXT, max_new_tokens=6)
    assert answer.decode("recovery") == 1.0
    assert min(answer.itl_s) < pause * LAYERS


def test_without_probes_there_is_no_recovery_and_no_recall(llama: Path) -> None:
    answer = LLM(llama, QUEST, probe_every=0).generate(TEXT, max_new_tokens=20)
    assert answer.decode("recovery") is answer.decode("recall") is None


def test_an_unknown_counter_is_refused_by_name(llm: LLM) -> None:
    with refused("unknown_name: 'densty'; did you mean 'density'?"):
        llm.generate(TEXT, max_new_tokens=2).decode("densty")


def test_kv_bytes_are_those_of_the_pools(llm: LLM) -> None:
    def held(plan: str) -> int:
        document = llm.read(TEXT)
        answer = document.ask("Why?", plan=plan, max_new_tokens=4)
        stores = [layer.attention.store for layer in document.prefill(parse_plan(plan)).layers]
        pools = [pool for store in stores for pool in (store.keys, store.values, *store.summaries.values())]
        assert answer.kv_bytes == sum(pool.numel() * pool.element_size() for pool in pools)
        return answer.kv_bytes

    dense, quest = held("dense"), held(QUEST)
    needed = llm.directory.kv_bytes_per_token(llm.dtype) * (1 + len(TEXT))
    assert llm.directory.kv_bytes_per_token(llm.dtype) == LAYERS * KV_BYTES_PER_TOKEN
    assert needed < dense < 3 * needed
    assert quest == dense * 17 // 16  # two rows of summary for sixteen keys and sixteen values


def test_the_plan_is_named_as_it_was_resolved(llm: LLM) -> None:
    answer = llm.generate(TEXT, max_new_tokens=1)
    assert answer.plan == QUEST
    assert parse_plan(answer.plan) == llm.plan != Plan()
