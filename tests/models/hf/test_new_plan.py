"""Another plan over a context that is cached already, as a budget sweep does."""

import pytest
import torch
from models.tiny import SPARSE, fed, greedy, logits, prompt, tiny
from refusals import refused

import kvsift

QUESTION = prompt(25, seed=4)


@pytest.mark.parametrize(
    "plan",
    [
        "quest:budget=80:page_size=8:window=8:dense_layers=none",
        "quest:budget=64:page_size=16:window=8:dense_layers=none",  # pages of another size: the store is rebuilt
        "quest:budget=48:page_size=8:window=8:dense_layers=none:score_by=centroid_radius",
        "streaming_llm:budget=40:dense_layers=none",
        "oracle_tokens:budget=40:window=8:dense_layers=none",
        "dense",
    ],
)
def test_a_new_plan_over_a_kept_context_is_that_plan_from_the_start(plan: str) -> None:
    model = tiny()
    text = torch.cat([prompt(), QUESTION], 1)
    fresh = kvsift.make_cache(model, plan)
    logits(model, prompt(), past_key_values=fresh)
    cache = fed(model, prompt())
    cache.replan(plan)
    assert torch.equal(greedy(model, text, past_key_values=cache), greedy(model, text, past_key_values=fresh))
    assert cache.run.report()["plan"] == fresh.run.report()["plan"]


def test_a_plan_that_is_refused_leaves_the_old_one() -> None:
    model = tiny()
    cache = fed(model, prompt())
    before = cache.run.report()
    with refused("unknown_name: 'qest'; did you mean 'quest'?"):
        cache.replan("qest:budget=64")
    assert cache.run.report() == before


def test_a_layer_that_the_model_lacks_is_refused_before_anything_runs() -> None:
    model, plan, says = tiny(), "less_is_more:correction=12", "invalid_value: correction=12"
    implementation = model.config._attn_implementation
    with refused(says):
        kvsift.make_cache(model, plan)
    assert model.config._attn_implementation == implementation
    cache = fed(model, prompt())
    before = cache.run.report()
    with refused(says):
        cache.replan(plan)
    assert cache.run.report() == before


def test_bytes_of_a_cache_cover_keys_and_values_of_what_it_holds() -> None:
    model = tiny()
    cache = kvsift.make_cache(model, SPARSE)
    assert cache.num_bytes == 0
    logits(model, prompt(), past_key_values=cache)
    assert cache.num_bytes >= 150 * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, KV heads, head_dim, float32
