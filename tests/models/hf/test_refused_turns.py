"""Calls that transformers itself would answer wrongly on a filled cache are refused; the cache goes on unharmed."""

from typing import Any

import pytest
import torch
from models.tiny import SPARSE, VERSION, greedy, logits, prompt, tiny
from refusals import refused
from transformers import GenerationConfig

import kvsift
from kvsift.models.hf.layer import SparseLayer
from kvsift.models.hf.sparse import SparseCache


@pytest.mark.skipif(VERSION >= (5, 21), reason="fixed in transformers")
@pytest.mark.parametrize("given", ["as an argument", "by position", "in the model's generation config"])
def test_chunked_prefill_of_a_filled_cache_is_refused_where_transformers_is_wrong(given: str) -> None:
    model = tiny()
    cache = kvsift.make_cache(model, SPARSE)
    text = torch.cat([prompt(100), greedy(model, prompt(100), past_key_values=cache)], 1)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    arguments: list[Any] = [text]
    if given == "as an argument":
        options["prefill_chunk_size"] = 4
    elif given == "by position":
        arguments.append(GenerationConfig(prefill_chunk_size=4, **options))
        options = {}
    else:
        model.generation_config.prefill_chunk_size = 4
    with refused("unsupported_call: prefill_chunk_size"):
        model.generate(*arguments, past_key_values=cache, **options)
    assert cache.get_seq_length() == 109


@pytest.mark.parametrize("drafts", ["prompt lookup", "an assistant"])
def test_drafts_on_a_filled_cache_are_refused_because_transformers_feeds_the_text_again(drafts: str) -> None:
    model = tiny()
    cache = kvsift.make_cache(model, SPARSE)
    text = torch.cat([prompt(100), greedy(model, prompt(100), past_key_values=cache), prompt(20, seed=3)], 1)
    options = {"prompt_lookup_num_tokens": 3} if drafts == "prompt lookup" else {"assistant_model": tiny(seed=5)}
    with refused("unsupported_call"):
        greedy(model, text, past_key_values=cache, **options)
    assert cache.get_seq_length() == 109
    assert greedy(model, text, past_key_values=cache).shape == (1, 10)


@pytest.mark.parametrize("length", [60, 100, 109])
@pytest.mark.parametrize("given", ["ids", "embeddings"])
def test_a_prompt_that_is_no_longer_than_the_cache_is_refused(length: int, given: str) -> None:
    model = tiny()
    cache = kvsift.make_cache(model, SPARSE)
    text = torch.cat([prompt(100), greedy(model, prompt(100), past_key_values=cache)], 1)
    options: dict[str, Any] = {"past_key_values": cache, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    options |= {"input_ids": text[:, :length]}
    if given == "embeddings":
        options |= {"input_ids": None, "inputs_embeds": model.get_input_embeddings()(text[:, :length]).detach()}
    with refused(f"unsupported_call: {length}"):
        model.generate(**options)
    assert cache.get_seq_length() == 109
    assert greedy(model, text, past_key_values=cache).shape == (1, 10)


def test_a_cache_goes_on_after_a_pass_that_recorded_gradients() -> None:
    model = tiny()
    cache = kvsift.make_cache(model, SPARSE)
    with torch.enable_grad(), refused("unsupported_call"):
        model(prompt(100), past_key_values=cache)
    assert cache.get_seq_length() == 0
    expected = greedy(model, prompt(), past_key_values=kvsift.make_cache(model, SPARSE))
    assert torch.equal(greedy(model, prompt(), past_key_values=cache), expected)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("before", [0, 100])
def test_a_cache_that_a_pass_left_half_filled_is_refused(
    place: int, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    cache = kvsift.make_cache(model, SPARSE)
    if before:
        logits(model, prompt(before), past_key_values=cache)
    attend = SparseLayer.attend

    def interrupted(layer: SparseLayer, *args: Any, **kwargs: Any) -> Any:
        if layer.layer == place:
            raise KeyboardInterrupt
        return attend(layer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(SparseLayer, "attend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            logits(model, prompt()[:, before:], past_key_values=cache)
    with refused("unsupported_call"):
        logits(model, prompt()[:, before:], past_key_values=cache)
    cache.reset()
    expected = greedy(model, prompt(), past_key_values=kvsift.make_cache(model, SPARSE))
    assert torch.equal(greedy(model, prompt(), past_key_values=cache), expected)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])  # in Gemma3 a sliding layer comes first
def test_refused_calls_leave_a_cache_that_still_answers(family: str) -> None:
    model = tiny(family)
    cache = kvsift.make_cache(model, SPARSE)
    logits(model, prompt(140), past_key_values=cache)
    for options in ({"attention_mask": torch.zeros(1, 1, 10, 150)}, {"attention_mask": torch.zeros(1, 150)}):
        with pytest.raises(kvsift.InputError):
            logits(model, prompt()[:, 140:], past_key_values=cache, **options)
    assert isinstance(cache, SparseCache)
    expected = greedy(model, prompt(), past_key_values=kvsift.make_cache(model, SPARSE))
    assert torch.equal(greedy(model, prompt(), past_key_values=cache), expected)
