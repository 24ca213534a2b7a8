"""What an answer says about itself: times without what is not the method's, counters that can be worked out by hand."""

import time
from pathlib import Path

import pytest
from engine.tiny_directory import text_of

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


def test_one_token_has_no_time_between_tokens(llm: LLM) -> None:
    assert llm.generate(TEXT, max_new_tokens=1).tpot_s is None


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


def test_dense_reads_every_cached_token_in_every_step(llm: LLM) -> None:
    answer = llm.generate(TEXT, plan="dense", max_new_tokens=5)
    contexts = [answer.prompt_tokens + step for step in range(1, 5)]
    assert answer.decode("queries") == 4 * LAYERS
    assert answer.decode("density") == 1
    assert answer.decode("visible_tokens") == sum(contexts) / 4
    assert (
        answer.decode("kv_bytes_read")
        == answer.decode("kv_bytes_dense")
        == (LAYERS * KV_BYTES_PER_TOKEN * sum(contexts))
    )
    assert answer.stats["phases"]["prefill"]["queries"] == answer.prompt_tokens * LAYERS


def test_a_sparse_plan_counts_what_it_saw_and_read(llm: LLM) -> None:
    answer = llm.generate(TEXT, max_new_tokens=5)
    assert 112 < answer.decode("visible_tokens") <= 128  # the budget, less what rounding to pages leaves
    assert answer.decode("density") == pytest.approx(answer.decode("visible_tokens") / (answer.prompt_tokens + 2.5))
    attended, chosen_by = answer.decode("kv_bytes_attended"), answer.decode("kv_bytes_to_select")
    assert answer.decode("kv_bytes_read") == attended + chosen_by
    assert attended <= 4 * LAYERS * KV_BYTES_PER_TOKEN * 128
    num_pages = answer.prompt_tokens // 16
    assert 0.8 < chosen_by / (4 * LAYERS * KV_BYTES_PER_TOKEN * num_pages) <= 1  # a minimum and a maximum per page
    assert 0 < answer.decode("select_s") < sum(answer.itl_s)


def test_dense_layers_are_counted_as_dense(llm: LLM) -> None:
    answer = llm.generate(TEXT, plan="quest:budget=128:window=16:dense_layers=0+2", max_new_tokens=3)
    density = {seq["layer"]: seq["density"] for seq in answer.stats["layers"] if seq["phase"] == "decode"}
    assert density[0] == density[2] == 1 > density[1]
    assert answer.decode("density") == pytest.approx(sum(density.values()) / 3)


def test_without_probes_there_is_no_recovery_and_no_recall(llama: Path) -> None:
    answer = LLM(llama, QUEST, probe_every=0).generate(TEXT, max_new_tokens=20)
    assert answer.decode("recovery") is answer.decode("recall") is None


@pytest.mark.parametrize("probe_every", [1, 3, 100])
def test_probes_do_not_change_the_tokens(llama: Path, probe_every: int) -> None:
    probed = LLM(llama, QUEST, probe_every=probe_every).generate(TEXT, max_new_tokens=10)
    assert 0 < probed.decode("recovery") <= 1
    assert 0 <= probed.decode("recall") <= 1
    assert probed.token_ids == LLM(llama, QUEST, probe_every=0).generate(TEXT, max_new_tokens=10).token_ids


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


def test_the_peak_of_the_process_holds_the_cache(llm: LLM) -> None:
    answer = llm.generate(TEXT, max_new_tokens=1)
    assert answer.peak_memory_bytes > answer.kv_bytes > 0


def test_the_plan_is_named_as_it_was_resolved(llm: LLM) -> None:
    answer = llm.generate(TEXT, max_new_tokens=1)
    assert answer.plan == QUEST
    assert parse_plan(answer.plan) == llm.plan != Plan()
