"""KV in host memory: a device that holds no more than what is always visible. ``test_offload`` has its answers."""

import threading
from pathlib import Path

import pytest
from engine.apart import DEVICES, llm
from engine.loop_sequences import pinned_caches
from engine.tiny_directory import text_of

from kvsift import native
from kvsift.indexes.graph import GraphIndex
from kvsift.stores.resident import SLACK_TOKENS
from kvsift.stores.split import SplitStore


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> None:
    """Where a test says so."""


@pytest.mark.parametrize("device", DEVICES)
def test_the_device_holds_sinks_window_and_some_slack(device: str, directory: Path) -> None:
    model = llm(directory, device, "split", chunk_size=512)
    document = model.read(text_of(1500))
    document.ask("How many sacks?", max_new_tokens=40)
    [cache] = pinned_caches(model)
    for attention in cache.attentions[1:]:
        store = attention.store
        assert isinstance(store, SplitStore)
        assert store.keys.device.type == "cpu"
        per_token = 2 * store.shape.num_kv_heads * store.shape.head_dim * 4
        assert 0 < store.num_device_bytes <= (16 + 32 + 16 + SLACK_TOKENS) * per_token


@pytest.mark.skipif(not native.available(), reason="the compiled core is missing")
def test_an_answer_says_what_attended_on_the_host(directory: Path) -> None:
    answer = llm(directory, "cpu", "split").generate(text_of(600), max_new_tokens=4)
    assert native.level() in answer.host


@pytest.mark.skipif(not native.available(), reason="the compiled core is missing")
def test_layers_build_while_those_above_read_the_end_of_the_prompt(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = "retrieval_attention:index=graph:samples=256:budget=120:sinks=16:window=32:dense_layers=0"
    model, built_in = llm(directory, "cpu", "split", chunk_size=512), []
    build = GraphIndex.build.__func__  # type: ignore[attr-defined]

    def recorded(cls: type, *given: object, **how: object) -> GraphIndex:
        built_in.append(threading.current_thread())
        return build(cls, *given, **how)  # type: ignore[no-any-return]

    monkeypatch.setattr(GraphIndex, "build", classmethod(recorded))
    expected = model.generate(text_of(1500), plan=plan, max_new_tokens=20)
    [engine] = {*built_in}  # host and device are one
    assert engine.name == "kvsift engine"
    monkeypatch.setattr(SplitStore, "is_remote", True)
    answer = model.generate(text_of(1500), plan=plan, max_new_tokens=20)
    assert len(built_in) == 4
    assert len({*built_in[2:], engine}) == 2
    assert answer.token_ids == expected.token_ids
    one, other = (
        [{key: value for key, value in part.items() if "seconds" not in key} for part in each.index[2][0]["indexes"]]
        for each in (expected, answer)
    )
    assert one == other, "the same index, wherever it was built"
