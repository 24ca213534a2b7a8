"""After the block, however it ends, the model is exactly what it was: attention, hooks, generate and all."""

from typing import Any

import pytest
import torch
from models.tiny import SPARSE, greedy, left_alone, logits, prompt, tiny
from torch import nn
from transformers import DbrxConfig, DbrxForCausalLM

import kvsift


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_after_the_block_the_model_is_as_before(attention: str) -> None:
    model = tiny()
    model.set_attn_implementation(attention)
    expected = greedy(model, prompt())
    with left_alone(model), kvsift.sparse(model, SPARSE):
        assert model.config._attn_implementation == "kvsift"
        greedy(model, prompt())
    assert torch.equal(greedy(model, prompt()), expected)


@pytest.mark.parametrize("moment", ["in the block", "in the forward pass", "in generate"])
def test_after_an_exception_the_model_is_as_before(moment: str) -> None:
    model = tiny()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    run = {
        "in the block": fail,
        "in the forward pass": lambda: logits(model, prompt() + 1000),  # no such tokens
        "in generate": lambda: greedy(model, prompt(), logits_processor=[fail]),
    }[moment]
    with left_alone(model), pytest.raises((KeyboardInterrupt, IndexError)), kvsift.sparse(model, SPARSE):
        run()


def test_an_exception_in_generate_does_not_make_later_forward_passes_decode() -> None:
    model = tiny()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with kvsift.sparse(model, SPARSE) as run:
        with pytest.raises(KeyboardInterrupt):
            greedy(model, prompt(), logits_processor=[fail])
        run.stats.clear()
        logits(model, prompt())
    assert run.report()["phases"]["decode"]["queries"] == 0


def test_a_generate_of_one_s_own_is_used_and_comes_back() -> None:
    model = tiny()
    original, calls = model.generate, []

    def generate(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    model.generate = generate
    with left_alone(model), kvsift.sparse(model, SPARSE):
        greedy(model, prompt())
    assert len(calls) == 1
    assert model.generate is generate


def test_hooks_of_one_s_own_stay_and_see_the_call() -> None:
    model, seen = tiny(), []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    with left_alone(model), kvsift.sparse(model, SPARSE):
        logits(model, prompt(20))
    assert any("input_ids" in kwargs for kwargs in seen)


def test_a_configuration_inside_that_names_no_attention_function_names_none_afterwards() -> None:
    """Dbrx has two; a block on it ended in an error of transformers, which takes no None."""
    attention = {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}
    experts = {"ffn_hidden_size": 32, "hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1}
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 96, "max_seq_len": 64, "pad_token_id": 0}
    model = DbrxForCausalLM(DbrxConfig(**sizes, attn_config=attention, ffn_config=experts)).eval()
    before = [config._attn_implementation for config in (model.config, model.config.attn_config)]
    expected = greedy(model, prompt(20))
    with kvsift.sparse(model, "dense"):
        assert torch.equal(greedy(model, prompt(20)), expected)
    assert [config._attn_implementation for config in (model.config, model.config.attn_config)] == before
    assert before[1] is None


def test_a_model_in_training_stays_there_module_by_module() -> None:
    model = tiny().train()
    model.model.layers[0].eval()
    with left_alone(model), kvsift.sparse(model, SPARSE):
        assert model.training
        assert not model.model.layers[0].training


def test_trying_a_model_out_takes_nothing_from_the_random_numbers() -> None:
    model = tiny()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    kvsift.make_cache(model, SPARSE)
    assert torch.equal(torch.rand(3), expected)


def test_an_explicit_cache_outlives_a_block_on_the_same_model() -> None:
    model = tiny()
    outside = kvsift.make_cache(model, SPARSE)
    text = torch.cat([prompt(), greedy(model, prompt(), past_key_values=outside)], 1)
    with kvsift.sparse(model, "dense"):
        inside = kvsift.make_cache(model, SPARSE)
        assert torch.equal(greedy(model, prompt(), past_key_values=inside), text[:, 150:])
    following = torch.cat([text, prompt(20, seed=3)], 1)
    assert torch.equal(
        greedy(model, following, past_key_values=outside), greedy(model, following, past_key_values=inside)
    )


def test_without_a_cache_of_ours_a_model_that_make_cache_touched_is_dense() -> None:
    model = tiny()
    expected = greedy(model, prompt()), greedy(model, prompt(), use_cache=False), greedy(model, prompt(), num_beams=3)
    cache = kvsift.make_cache(model, SPARSE)
    found = greedy(model, prompt()), greedy(model, prompt(), use_cache=False), greedy(model, prompt(), num_beams=3)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    assert cache.stats.phase("decode").queries == 0


def test_two_models_run_side_by_side() -> None:
    models = tiny(), tiny("Qwen3")
    expected = []
    for model in models:
        with kvsift.sparse(model, SPARSE):
            expected.append(greedy(model, prompt()))
    first, second = models
    with left_alone(first), left_alone(second), kvsift.sparse(first, SPARSE), kvsift.sparse(second, SPARSE):
        found = [greedy(model, prompt()) for model in models]
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_a_module_that_wraps_the_model_reaches_it() -> None:
    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.model(*args, **kwargs)

    model = tiny()
    with kvsift.sparse(model, SPARSE) as run, torch.no_grad():
        Wrapper(model)(prompt(20))
    assert run.report()["phases"]["prefill"]["queries"] == 40
