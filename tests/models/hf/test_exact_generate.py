"""A budget that covers the context changes nothing: generate() gives eager attention's tokens, however it is asked."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from models.tiny import (
    CACHED,
    VERSION,
    WITH_SLIDING_LAYERS,
    covered,
    drafting,
    empty_cache,
    greedy,
    prompt,
    ragged,
    tiny,
)
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel
from turns import in_turns

import kvsift

cached = pytest.mark.parametrize("family", CACHED)


def repeated(model: PreTrainedModel, **options: Any) -> Tensor:
    return greedy(model, prompt(40).repeat(1, 3), **options)  # a text that repeats itself: prompt lookup finds drafts


def padded(model: PreTrainedModel, **options: Any) -> Tensor:
    return greedy(model, **ragged(100, 61, 97), **options)


def sampled(model: PreTrainedModel) -> Tensor:
    options = {"max_new_tokens": 10, "do_sample": True, "temperature": 0.8, "top_k": 20, "num_return_sequences": 2}
    torch.manual_seed(7)
    return model.generate(**ragged(70, 50), **options)


def ending_in_padding(model: PreTrainedModel, *lengths: int, **options: Any) -> Tensor:
    """generate() goes on from the last column, which sees the real tokens before it."""
    batch = ragged(*lengths, side="right")
    batch["attention_mask"][0, 20:] = 0
    return greedy(model, **batch, **options)


WAYS: dict[str, Callable[[Any], Tensor]] = {
    "alone": repeated,
    "a padded batch": padded,
    "beams": partial(repeated, num_beams=3),
    "prefill chunks": partial(repeated, prefill_chunk_size=32),
    "beams over prefill chunks": partial(repeated, num_beams=2, prefill_chunk_size=48),
    "prompt lookup": partial(repeated, prompt_lookup_num_tokens=4),
    "beams of a padded batch": partial(padded, num_beams=3),
    "prefill chunks of a padded batch": partial(padded, prefill_chunk_size=32),
    "samples": sampled,
    "drafts of its twin": lambda model: greedy(model, prompt(100), assistant_model=drafting(deepcopy(model))),
    "drafts of a stranger": lambda model: greedy(model, prompt(100), assistant_model=drafting(tiny(seed=5))),
    "a row that ends in padding": lambda model: ending_in_padding(model, 30),
    "rows that end in padding": lambda model: ending_in_padding(model, 30, 41, 22),
    "prefill chunks of rows that end in padding": lambda model: ending_in_padding(model, 30, 41, prefill_chunk_size=8),
}


@pytest.mark.parametrize(("way", "family"), in_turns(WAYS, CACHED))
def test_tokens_equal_eager_attention(way: str, family: str) -> None:
    if way == "drafts of its twin" and family in WITH_SLIDING_LAYERS and VERSION < (5, 23):
        pytest.skip("before 5.23 transformers fails itself when an assistant with sliding layers takes drafts back")
    model, call = tiny(family), WAYS[way]
    expected = call(model)
    with covered(model):
        assert torch.equal(call(model), expected)


def test_classifier_free_guidance_answers_as_stock() -> None:
    """Its unconditional half is a call without a cache, inside of generate()."""
    model = tiny()
    expected = greedy(model, prompt(), guidance_scale=1.5)
    with covered(model) as run:
        assert torch.equal(greedy(model, prompt(), guidance_scale=1.5), expected)
    assert run.report()["phases"]["decode"]["queries"] == 2 * 9 * 2


@cached
def test_second_turn_on_a_kept_cache_equals_eager_attention_over_everything(family: str) -> None:
    model = tiny(family)
    first = torch.cat([prompt(80), greedy(model, prompt(80))], 1)
    second = torch.cat([first, prompt(30, seed=3)], 1)
    expected = greedy(model, second)
    with covered(model):
        cache = empty_cache(model)
        greedy(model, prompt(80), past_key_values=cache)
        assert cache.get_seq_length() == 89  # the last token was never fed
        assert torch.equal(greedy(model, second, past_key_values=cache), expected)


@cached
def test_second_turn_of_a_padded_batch_on_an_explicit_cache_equals_eager_attention(family: str) -> None:
    model = tiny(family)
    batch = ragged(60, 45)
    first = torch.cat([batch["input_ids"], greedy(model, **batch)], 1)
    second = torch.cat([first, prompt(20, seed=3).expand(2, -1)], 1)
    mask = torch.cat([batch["attention_mask"], torch.ones(2, 30, dtype=torch.long)], 1)
    expected = greedy(model, second, attention_mask=mask)
    cache = kvsift.make_cache(model, "quest:budget=4096")
    greedy(model, **batch, past_key_values=cache)
    assert torch.equal(greedy(model, second, attention_mask=mask, past_key_values=cache), expected)


@pytest.mark.parametrize("told", [True, False])  # by logits_to_keep, which not every model takes, how many drafts come
@pytest.mark.parametrize("length", [30, 20, 1])  # of the prompt without its padding
def test_drafts_after_a_row_that_ends_in_padding_answer_as_stock(
    length: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token is that of the last column before the drafts, which sees the real tokens before it."""
    monkeypatch.setattr(LlamaForCausalLM, "_supports_logits_to_keep", lambda self: told)
    model = tiny()
    batch = ragged(31, side="right")
    batch["attention_mask"][0, length:] = 0
    expected = greedy(model, **batch)
    with covered(model):
        assert torch.equal(greedy(model, **batch, assistant_model=drafting(tiny())), expected)
        assert torch.equal(greedy(model, **batch, prompt_lookup_num_tokens=4), expected)
