"""Captured steps over KV in host memory: the tokens and counters of the same steps over KV beside the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.apart import GPU, llm
from engine.loop_sequences import pinned_caches
from engine.tiny_directory import text_of
from kvsift_lab.bench.random_models import random_model
from kvsift_lab.bench.split_measure import measure_captured
from refusals import refused

from kvsift import LLM
from kvsift.api.answer import Answer
from kvsift.plan.placement import Placement
from kvsift.plan.syntax import parse_plan
from kvsift.stores import transfers
from kvsift.stores.offload import OffloadStore

SKETCH = "sketch:budget=96:window=32:dense_layers=none"
PLANS = [
    SKETCH,
    "sketch:budget=128:window=16:bits=2:page_size=8:rest=false:dense_layers=1",
    "quest:budget=256:window=32:dense_layers=0",
    "quest:budget=256:window=32:score_by=minmax_fp8:dense_layers=none",
]
TEXTS = [text_of(700), text_of(401), text_of(44), text_of(590)[::-1]]
COUNTERS = ("visible_tokens", "density", "sparse_queries", "kv_bytes_read", "recall", "estimated_share")
DEVICES = ["cpu", GPU]  # a CPU runs the steps of graphs one by one
QUESTIONS = ("How many sacks?", "Which of the mills grinds the least corn in a day?", "How many sacks?")


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> None:
    """Where a test says so."""


def pair(directory: Path, device: str, dtype: str = "float32", **options: Any) -> tuple[LLM, LLM]:
    """KV beside the model, and in host memory."""
    options = {"path": "eager" if device == "cpu" else "captured", "dense_below": 0, "chunk_size": 512, **options}
    beside, apart = (llm(directory, device, place, dtype=dtype, **options) for place in ("device", "offload"))
    return beside, apart


def assert_equal(beside: Answer, apart: Answer) -> None:
    assert apart.path == beside.path
    assert apart.path in ("captured", "eager")
    assert apart.token_ids == beside.token_ids
    for key in COUNTERS:  # shares are summed by atomic additions, in any order and to 2^-24 each
        one, other = beside.decode(key), apart.decode(key)
        assert other == (one if one is None else pytest.approx(one, rel=1e-5, abs=1e-8)), key


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("plan", PLANS)
def test_sequences_of_a_batch_answer_as_with_kv_beside_the_model(plan: str, device: str, directory: Path) -> None:
    models = pair(directory, device)
    for texts in (TEXTS, TEXTS[:1:-1]):  # the second time in pools that are there, and fewer sequences in another order
        for one, other in zip(*(model.generate(texts, plan=plan, max_new_tokens=20) for model in models)):
            assert_equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_questions_of_one_document(phase: Any, device: str, directory: Path) -> None:
    documents = [model.read(text_of(700), plan=SKETCH) for model in pair(directory, device)]
    for number, question in enumerate(QUESTIONS):
        for turn, plan in enumerate((SKETCH, PLANS[2], SKETCH)):  # plans change back and forth
            long = number == turn == 1  # takes pools that grow
            options: dict[str, Any] = {"max_new_tokens": 400 if long else 12, "question_phase": phase}
            assert_equal(*(document.ask(question, plan=plan, **options) for document in documents))


@pytest.mark.parametrize("device", DEVICES)
def test_sequences_that_begin_dense_get_their_summaries_late(device: str, directory: Path) -> None:
    models = pair(directory, device, dense_below=710)
    for text in (text_of(700), text_of(301)):
        assert_equal(*(model.generate(text, plan=SKETCH, max_new_tokens=40) for model in models))


@pytest.mark.parametrize("device", DEVICES)
def test_a_document_that_was_left_answers_as_a_new_one(device: str, directory: Path) -> None:
    _, apart = pair(directory, device)
    document = apart.read(text_of(700), plan=SKETCH)
    expected = document.ask(QUESTIONS[0], max_new_tokens=20).token_ids

    def leave(piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        document.ask(QUESTIONS[1], max_new_tokens=40, on_text=leave)
    assert document.ask(QUESTIONS[0], max_new_tokens=20).token_ids == expected


@pytest.mark.parametrize("device", DEVICES)
def test_summaries_are_on_the_device_and_the_rest_is_not(device: str, directory: Path) -> None:
    _, apart = pair(directory, device)
    document = apart.read(text_of(1500), plan=SKETCH)
    answer = document.ask(QUESTIONS[0], max_new_tokens=20)
    [cache] = pinned_caches(apart)
    sketches = 0
    for attention in cache.attentions:
        store = attention.store
        assert isinstance(store, OffloadStore)
        assert store.keys.device.type == "cpu"
        assert store.pools().keys.device.type == device
        (seqs,) = store.summaries.values()
        assert seqs.device.type == device
        sketches += seqs.numel()
    assert cache.num_device_bytes == sketches
    read, over_the_bus = answer.decode("kv_bytes_attended"), answer.decode("kv_bytes_copied")
    assert over_the_bus == (read if device == "cuda" else 0), "nothing is between a CPU and its memory"


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_captured_is_composed_and_says_so(device: str, directory: Path) -> None:
    options = {"path": "eager" if device == "cpu" else "auto"}
    model = llm(directory, device, "offload", **options)
    assert "a dense step reads all of them" in model.generate(TEXTS[2], plan="dense", max_new_tokens=2).path
    assert "oracle_tokens" in model.generate(TEXTS[2], plan="oracle_tokens:budget=128", max_new_tokens=2).path
    packed = llm(directory, device, "offload:host_values=int8", **options)
    assert "host_values=int8" in packed.generate(TEXTS[2], plan=SKETCH, max_new_tokens=2).path


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("plan", PLANS)
def test_the_same_kv_gives_the_same_tokens_in_bfloat16(plan: str) -> None:
    model = random_model("tiny", torch.device("cuda"), torch.bfloat16)
    beside, apart = (
        measure_captured(model, parse_plan(plan), 5000, Placement(place), steps=64) for place in ("device", "offload")
    )
    assert apart["tokens"] == beside["tokens"]
    assert apart["visible_tokens"] == beside["visible_tokens"]
    assert apart["kv_bytes_on_device"] < beside["kv_bytes_on_device"] / 4
    assert min(apart["bus_bytes"], apart["copy_rate"], apart["gather_rate"]) > 0
    assert beside["bus_bytes"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_reads_and_writes_locked_host_memory() -> None:
    device = torch.device("cuda")
    tensor = transfers.pinned_empty(torch.empty(0, dtype=torch.bfloat16), (3, 1000, 7), device)
    assert tensor.is_pinned()
    tensor.fill_(2)
    view = transfers.mapped(tensor, device)
    assert (view.is_cuda, view.shape, view.dtype) == (True, tensor.shape, tensor.dtype)
    view[1] += 1
    torch.cuda.synchronize()
    assert bool((tensor[1] == 3).all())
    assert bool((tensor[::2] == 2).all())
    del tensor
    assert float(view.float().sum()) == 7000 * (2 + 3 + 2), "the view keeps the memory"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_memory_that_cannot_be_locked_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_locked", lambda *given: None)
    _, apart = pair(directory, "cuda")
    with refused("not_enough_memory: path='composed'"):
        apart.generate(TEXTS[0], plan=SKETCH, max_new_tokens=4)
    assert llm(directory, "cuda", "offload", path="composed").generate(TEXTS[2], plan=SKETCH, max_new_tokens=4).text
