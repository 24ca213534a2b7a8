"""A budget that covers the context changes nothing: generate() gives eager attention's tokens, however it is asked."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from models.tiny import (
    CACHED,
    FAMILIES,
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
from transformers import LlamaForCausalLM

import kvsift

cached = pytest.mark.parametrize("family", CACHED)
WAYS = {
    "alone": {},
    "beams": {"num_beams": 3},
    "prefill chunks": {"prefill_chunk_size": 32},
    "beams over prefill chunks": {"num_beams": 2, "prefill_chunk_size": 48},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
}


def families_and(*ways: str) -> pytest.MarkDecorator:
    """Every family in the first way, and those that a cache can tell apart in the others."""
    pairs = [(family, way) for family in FAMILIES for way in ways if way == ways[0] or family in CACHED]
    return pytest.mark.parametrize(("family", "way"), pairs)


@families_and(*WAYS)
def test_tokens_equal_eager_attention(family: str, way: str) -> None:
    model = tiny(family)
    ids = prompt(40).repeat(1, 3)  # a text that repeats itself: prompt lookup finds drafts
    expected = greedy(model, ids, **WAYS[way])
    with covered(model):
        assert torch.equal(greedy(model, ids, **WAYS[way]), expected)


@families_and("alone", "beams", "prefill chunks")
def test_tokens_of_a_left_padded_batch_equal_eager_attention(family: str, way: str) -> None:
    model = tiny(family)
    batch = ragged(100, 61, 97)
    expected = greedy(model, **batch, **WAYS[way])
    with covered(model):
        assert torch.equal(greedy(model, **batch, **WAYS[way]), expected)


@cached
def test_samples_with_one_seed_equal_eager_attention(family: str) -> None:
    model = tiny(family)
    options = {"max_new_tokens": 10, "do_sample": True, "temperature": 0.8, "top_k": 20, "num_return_sequences": 2}
    torch.manual_seed(7)
    expected = model.generate(**ragged(70, 50), **options)
    with covered(model):
        torch.manual_seed(7)
        assert torch.equal(model.generate(**ragged(70, 50), **options), expected)


ASSISTED = [
    (family, assistant)
    for assistant in ("its twin", "a stranger")
    for family in CACHED
    # before 5.23 an assistant with sliding layers fails in transformers itself, when it takes drafts back
    if assistant == "a stranger" or VERSION >= (5, 23) or family not in WITH_SLIDING_LAYERS
]


@pytest.mark.parametrize(("family", "assistant"), ASSISTED)
def test_assisted_tokens_equal_eager_attention(family: str, assistant: str) -> None:
    model = tiny(family)
    drafter = drafting(deepcopy(model) if assistant == "its twin" else tiny(seed=5))  # all right, or few
    expected = greedy(model, prompt(100))
    with covered(model):
        assert torch.equal(greedy(model, prompt(100), assistant_model=drafter), expected)


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


@cached
@pytest.mark.parametrize("lengths", [(30,), (30, 41, 22)])
def test_rows_that_end_in_padding_answer_as_stock(family: str, lengths: tuple[int, ...]) -> None:
    """generate() goes on from the last column, which sees the real tokens before it."""
    model = tiny(family)
    batch = ragged(*lengths, side="right")
    batch["attention_mask"][0, 20:] = 0
    expected = greedy(model, **batch)
    with covered(model):
        assert torch.equal(greedy(model, **batch), expected)
        assert torch.equal(greedy(model, **batch, prefill_chunk_size=8), expected)


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


def test_classifier_free_guidance_answers_as_stock() -> None:
    """Its unconditional half is a call without a cache, inside of generate()."""
    model = tiny()
    expected = greedy(model, prompt(), guidance_scale=1.5)
    with covered(model) as run:
        assert torch.equal(greedy(model, prompt(), guidance_scale=1.5), expected)
    assert run.report()["phases"]["decode"]["queries"] == 2 * 9 * 2
