"""Answers whose memory falls to the budget: the same text, fewer bytes, and what cannot be asked any more."""

from pathlib import Path

import pytest
import torch
from engine.loop_sequences import pinned_caches
from engine.tiny_directory import text_of
from models.tiny import tiny
from refusals import refused

import kvsift
from kvsift import LLM
from kvsift.engine.memory import predict_bytes
from kvsift.models.hf.model_directory import ModelDirectory

SPECS = ["h2o", "snapkv:queries=16", "tova", "keydiff", "streaming_llm"]
BUDGET = "budget=96:sinks=4:dense_layers=0"


def llm(directory: Path, spec: str) -> LLM:
    return LLM(directory, f"decode={spec}:{BUDGET}", device="cpu", dtype="float32", probe_every=1)


@pytest.mark.parametrize("spec", SPECS)
def test_the_text_is_the_same_and_the_bytes_fall(spec: str, llama: Path) -> None:
    hidden, freed = (
        llm(llama, f"{spec}:evict={evict}").generate(text_of(3000), max_new_tokens=30) for evict in ("false", "true")
    )
    if spec != "keydiff":  # which chooses anew when it only hides
        assert freed.token_ids == hidden.token_ids
    assert freed.decode("visible_tokens") == hidden.decode("visible_tokens")
    # two of three layers, of two KV heads of 16 numbers, hold 96 tokens, room for 64 and what is yet to be dropped
    per_token = 2 * 2 * 16 * 4
    assert hidden.kv_bytes > 3 * 3000 * per_token
    assert freed.kv_bytes < hidden.kv_bytes / 3 + 2 * (96 + 2 * 64) * per_token
    assert (hidden.decode("recall") is None, freed.decode("recall")) == (False, None)


def test_a_document_that_was_dropped_is_read_again_for_the_next_question(llama: Path) -> None:
    models, caches = [llm(llama, f"snapkv:evict={evict}") for evict in ("true", "false")], []
    freed, hidden = (model.read(text_of(1200)) for model in models)
    for question in ("How many sacks?", "Which mill?", "How many sacks?"):
        one, other = (document.ask(question, max_new_tokens=8) for document in (freed, hidden))
        assert one.token_ids == other.token_ids
        assert one.kv_bytes < other.kv_bytes
        caches.append([cache for model in models for cache in pinned_caches(model)])
    assert len({id(cache) for cache, _ in caches}) == 3
    assert len({id(cache) for _, cache in caches}) == 1


PREFILLING = ["h2o", "keydiff", "streaming_llm"]


def throughout(spec: str) -> str:
    return f"both={spec}:{BUDGET}:evict=true"


@pytest.mark.parametrize("spec", PREFILLING)
def test_a_document_that_was_dropped_while_it_was_read_is_read_once(spec: str, llama: Path) -> None:
    model, other = (LLM(llama, throughout(spec), device="cpu", dtype="float32", chunk_size=256) for _ in range(2))
    document, caches = model.read(text_of(3000)), []
    for question in ("How many sacks?", "Which mill?", "How many sacks?"):
        answer = document.ask(question, max_new_tokens=40)
        fresh = other.read(text_of(3000)).ask(question, max_new_tokens=40)
        assert answer.token_ids == fresh.token_ids
        caches += pinned_caches(model)
        # one of three layers is dense; the others hold the budget, and what was left when the document was read
        assert answer.kv_bytes < (3000 + 2 * 64 * 16 + 2 * (2 * 96 + 256 + 3 * 64) * 2) * 2 * 2 * 16 * 4
    assert len({id(cache) for cache in caches}) == 1
    assert document.read_stats["phases"]["prefill"]["visible_tokens"] < (1500 + 2 * (96 + 128)) / 3 + 1
    assert answer.decode("recall") is None


@pytest.mark.parametrize("spec", PREFILLING)
def test_beams_and_batches_drop_while_they_read(spec: str) -> None:
    """A prompt that comes in one call, sequences of two lengths, three beams: as each sequence alone."""
    model = tiny(num_hidden_layers=3)
    ids = torch.randint(3, 90, (2, 700), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    rule = f"{spec}:evict=true:budget=60:dense_layers=0" + ("" if spec == "streaming_llm" else ":window=8")
    with kvsift.sparse(model, f"both={rule}") as run:
        both = model.generate(ids, attention_mask=mask, num_beams=3, max_new_tokens=12, do_sample=False)
    assert run.stats.phase("prefill").report()["density"] < 0.8  # a layer is dense, and segments see their own tokens
    with kvsift.sparse(model, f"both={rule}"):
        alone = model.generate(ids[1:, 37:], num_beams=3, max_new_tokens=12, do_sample=False)
    assert torch.equal(both[1:, 37:], alone)


def test_memory_is_asked_for_what_a_plan_holds_while_it_reads(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = "h2o:budget=96:sinks=4:dense_layers=none:evict=true"
    freeing, hiding = f"both={rule}", f"decode={rule}"
    given = {"device": "cpu", "dtype": "float32", "chunk_size": 64}
    needs = predict_bytes(ModelDirectory.check(llama), torch.device("cpu"), torch.float32, 1000, 64)
    monkeypatch.setattr("kvsift.engine.memory.available_bytes", lambda device: needs)
    with refused("not_enough_memory"):
        LLM(llama, hiding, **given).generate(text_of(3000), max_new_tokens=2)
    assert LLM(llama, freeing, **given).generate(text_of(3000), max_new_tokens=2).token_ids
    with refused("not_enough_memory"):
        LLM(llama, freeing, **given).generate(text_of(3000), plan=hiding, max_new_tokens=2)


def test_a_cache_says_why_it_cannot_go_back(llama: Path) -> None:
    model = llm(llama, "snapkv:evict=true")
    cache = model.new_cache(model.plan, 300)
    model.feed(cache, [5] * 200)
    cache.mark()
    model.feed(cache, [6], phase="decode")
    assert not cache.can_rewind
    with refused("evicted_tokens"):
        cache.rewind()
    assert cache.get_seq_length() == 201


@pytest.mark.parametrize("spec", ["h2o", "snapkv:queries=8", "tova"])
def test_beams_and_batches_free_as_well(spec: str) -> None:
    model = tiny(num_hidden_layers=3)
    ids = torch.randint(3, 90, (2, 150), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    outputs = []
    for evict in ("false", "true"):
        with kvsift.sparse(model, f"{spec}:evict={evict}:budget=60:window=8:dense_layers=0"):
            outputs.append(model.generate(ids, attention_mask=mask, num_beams=3, max_new_tokens=12, do_sample=False))
    assert torch.equal(outputs[0], outputs[1])


def test_drafts_are_refused_since_they_may_have_to_be_taken_back() -> None:
    model = tiny()
    ids = torch.tensor([5, 6, 7, 8] * 40).unsqueeze(0)
    plan = "tova:evict=true:budget=60:window=8:dense_layers=none"
    with kvsift.sparse(model, plan), refused("evicted_tokens"):
        model.generate(ids, prompt_lookup_num_tokens=4, max_new_tokens=30, do_sample=False)


@pytest.mark.parametrize("path", ["composed", "eager"])
@pytest.mark.parametrize("knobs", ["dense_layers=0", "page_size=32"])
def test_a_plan_that_evicts_and_one_that_does_not_take_turns_while_nothing_is_evicted(
    path: str, knobs: str, llama: Path
) -> None:
    text, evicting = text_of(500), "h2o:budget=4000:evict=true:dense_layers=0"
    other = f"quest:budget=128:window=32:{knobs}"
    expected = {plan: LLM(llama, plan, path=path).read(text).ask("Which mill?", max_new_tokens=8).token_ids
                for plan in (evicting, other)}  # fmt: skip
    document = LLM(llama, evicting, path=path).read(text)
    for plan in (evicting, other, evicting, other):
        assert document.ask("Which mill?", plan=plan, max_new_tokens=8).token_ids == expected[plan], plan
