"""Prompt chunks by fused steps: the logits and the cache of the same model under transformers, whatever the plan."""

from typing import Any

import pytest
import torch
from models.tiny import tiny

from kvsift import native
from kvsift.methods.base import Phase
from kvsift.models.forward_pass import ForwardPass
from kvsift.models.fused_step import FusedStep
from kvsift.models.hf.sparse import SparseCache, feeding, make_cache

PLANS = [
    "dense",
    "prefill=quoka:budget=96:chunk=64:window=8:dense_layers=none,decode=quest:budget=112:dense_layers=none",
    "prefill=critiprefill:budget=160:segment=64:window=8:dense_layers=none",
]
CHUNKS = [128, 192, 50]


def read(model: Any, plan: str, fused: bool, phase: Phase = "prefill") -> tuple[list[torch.Tensor], SparseCache]:
    """Logits behind each chunk."""
    cache = make_cache(model, plan, probe_every=0)
    forward_pass = ForwardPass(FusedStep(model)) if fused else None
    generator, found = torch.Generator().manual_seed(5), []
    with torch.inference_mode(), feeding(cache, phase):
        for size in CHUNKS:
            ids = torch.randint(3, model.config.vocab_size, (size,), generator=generator)
            if forward_pass is not None:
                found.append(forward_pass.prefill(ids, cache, phase))
            else:
                found.append(model(input_ids=ids[None], past_key_values=cache, logits_to_keep=1).logits)
    return found, cache


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("plan", PLANS)
def test_chunks_give_the_logits_and_the_cache_of_transformers(family: str, plan: str) -> None:
    model = tiny(family)
    (expected, slow), (found, fast) = (read(model, plan, fused) for fused in (False, True))
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)
    assert fast.get_seq_length() == slow.get_seq_length() == sum(CHUNKS)
    for one, other in zip(fast.attentions, slow.attentions, strict=True):
        torch.testing.assert_close(one.store.reader(0).keys(), other.store.reader(0).keys(), rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(one.store.reader(0).values(), other.store.reader(0).values(), rtol=1e-4, atol=2e-5)
    counted = [cache.run.report()["phases"]["prefill"] for cache in (fast, slow)]
    for key in ("queries", "visible_tokens", "sparse_queries", "density"):
        assert counted[0][key] == counted[1][key]
    assert (counted[0]["density"] < 1) == (plan != "dense")


def test_tokens_fed_as_generated_ones_are_answered_so() -> None:
    model = tiny("Llama")
    plan = "decode=quest:budget=48:window=8:page_size=8:dense_layers=none"
    (expected, slow), (found, fast) = (read(model, plan, fused, "decode") for fused in (False, True))
    torch.testing.assert_close(found[-1], expected[-1], rtol=1e-4, atol=2e-5)
    for cache in (slow, fast):
        assert cache.run.report()["phases"]["decode"]["queries"] == sum(CHUNKS) * len(cache.layers)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_several_sequences_in_one_pass_have_the_bits_that_each_has_alone(
    family: str, dtype: torch.dtype
) -> None:
    model = tiny(family).to(dtype)
    forward_pass, plans = (
        ForwardPass(FusedStep(model)),
        ["dense", "quest:budget=48:window=8:page_size=8", "dense", "sketch:budget=64:window=8"],
    )

    def after_prompts() -> list[SparseCache]:
        caches = [make_cache(model, plan, probe_every=0) for plan in plans]
        for number, cache in enumerate(caches):
            forward_pass.prefill(torch.arange(3, 100 + 31 * number) % 60, cache, "prefill")
        return caches

    alone, together = after_prompts(), after_prompts()
    tokens = torch.tensor([5, 6, 7, 8])
    for _ in range(3):
        found = forward_pass.decode(tokens, together)
        for number, cache in enumerate(alone):
            assert torch.equal(forward_pass.prefill(tokens[number : number + 1], cache, "decode")[0], found[number])
        tokens = found[:, 0].argmax(1)
    assert forward_pass.joins
    assert [cache.get_seq_length() for cache in together] == [cache.get_seq_length() for cache in alone]


def test_products_that_the_core_does_not_take_join_no_sequences() -> None:
    assert ForwardPass(FusedStep(tiny("Llama"))).joins == native.available()
    assert not ForwardPass(FusedStep(tiny("Llama").half())).joins
