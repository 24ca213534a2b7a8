"""Caches that cannot hold pages, or hold what kvsift has not seen, are refused by name."""

from typing import Any

import pytest
import torch
from models.tiny import SPARSE, empty_cache, greedy, left_alone, logits, prompt, tiny
from refusals import refused
from transformers import Cache, DynamicCache, GenerationConfig, QuantizedCache, StaticCache

import kvsift


class HalfBitCache(QuantizedCache):
    """A quantized cache without the packages that real ones need."""

    def __init__(self) -> None:
        Cache.__init__(self, layers=[])


def offloaded(config: Any) -> DynamicCache:
    return DynamicCache(config=config, offloading=True)


CACHES = {
    "static": (lambda config: StaticCache(config=config, max_cache_len=64), "unsupported_call: StaticCache"),
    "quantized": (lambda config: HalfBitCache(), "unsupported_call: HalfBitCache"),
    "offloaded": (offloaded, "unsupported_call: DynamicCache with offloading"),
}


@pytest.mark.parametrize(("make", "reason"), CACHES.values(), ids=CACHES)
def test_a_cache_that_cannot_hold_pages_is_refused(make: Any, reason: str) -> None:
    model = tiny()
    with left_alone(model), kvsift.sparse(model, SPARSE), refused(reason):
        logits(model, prompt(20), past_key_values=make(model.config))


@pytest.mark.parametrize("kind", ["static", "offloaded"])
@pytest.mark.parametrize(
    ("given_in", "remedy"),
    [
        ("a generation config", "leave it out"),
        ("the model's generation config", "set model.generation_config.cache_implementation = None"),
    ],
)
def test_a_configured_cache_that_cannot_hold_pages_is_refused(kind: str, given_in: str, remedy: str) -> None:
    model = tiny()
    config = GenerationConfig(cache_implementation=kind, max_new_tokens=4, do_sample=False, pad_token_id=0)
    options = {"generation_config": config}
    if given_in == "the model's generation config":
        model.generation_config, options = config, {}
    with kvsift.sparse(model, SPARSE), refused(f"unsupported_call: {kind}"):
        model.generate(prompt(20), **options)


def test_a_cache_that_was_filled_without_kvsift_is_refused() -> None:
    model = tiny()
    cache = empty_cache(model)
    logits(model, prompt(20), past_key_values=cache)
    with kvsift.sparse(model, SPARSE), refused("unsupported_call"):
        logits(model, prompt(5), past_key_values=cache)
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("made_with_config", [True, False])
def test_a_fresh_dynamic_cache_is_not_refused(made_with_config: bool) -> None:
    model = tiny()
    cache = empty_cache(model) if made_with_config else DynamicCache()
    with kvsift.sparse(model, SPARSE) as run:
        expected = greedy(model, prompt())
        assert torch.equal(greedy(model, prompt(), past_key_values=cache), expected)
    assert run.report()["phases"]["decode"]["queries"] == 2 * 2 * 9  # twice, in two layers


def test_a_cache_of_ours_is_refused_by_a_model_that_was_given_back() -> None:
    model = tiny()
    with kvsift.sparse(model, SPARSE):
        cache = empty_cache(model)
        greedy(model, prompt(), past_key_values=cache)
    assert any(type(layer).__name__ == "SparseLayer" for layer in cache.layers)
    with refused("unsupported_call: 'eager'"):
        logits(model, prompt(5), past_key_values=cache)


@pytest.mark.parametrize(("cached", "given"), [(3, 1), (1, 3)])
def test_a_batch_of_another_size_than_the_cache_is_refused_before_anything_is_stored(cached: int, given: int) -> None:
    model = tiny()
    cache = kvsift.make_cache(model, SPARSE)
    logits(model, prompt(20).repeat(cached, 1), past_key_values=cache)
    with refused(f"unsupported_call: {cached}"):
        logits(model, prompt(1).repeat(given, 1), past_key_values=cache)
    assert [layer.attention.store.lengths for layer in cache.layers] == [[20] * cached] * 2
