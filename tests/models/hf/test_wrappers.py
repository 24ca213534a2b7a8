"""Models in wrappers, and copies of models: what is sifted is the model that runs."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from models.tiny import COVERING, SPARSE, covered, greedy, left_alone, logits, prompt, take_over, tiny
from refusals import refused
from torch import nn

import kvsift


def with_lora(model: Any) -> Any:
    import peft  # takes a second and a half, in each process that collects tests

    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).eval()


WRAPPERS = {
    "a PEFT model": with_lora,
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "data parallelism": nn.DataParallel,
}


@pytest.mark.parametrize("wrapper", ["a PEFT model", "torch.compile"])
def test_generate_of_a_wrapped_model_is_sifted(wrapper: str) -> None:
    wrapped = WRAPPERS[wrapper](tiny())
    with kvsift.sparse(wrapped, SPARSE, strict=True) as run:
        wrapped.generate(input_ids=prompt(), max_new_tokens=10, do_sample=False)
    assert run.report()["phases"]["decode"]["sparse_queries"] == 9 * 2


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_forward_call_of_a_wrapped_model_answers_as_the_model(wrapper: str) -> None:
    model = tiny()
    wrapped = WRAPPERS[wrapper](model)
    expected = logits(wrapped, prompt(40))
    with covered(wrapped) as run:
        torch.testing.assert_close(logits(wrapped, prompt(40)), expected, atol=2e-5, rtol=1e-4)
    assert run.report()["phases"]["prefill"]["queries"] == 40 * 2


def test_a_model_with_offloaded_weights_is_sifted() -> None:
    expected, model = greedy(tiny(), prompt()), cpu_offload(tiny())
    with covered(model):
        assert torch.equal(greedy(model, prompt()), expected)


@pytest.mark.parametrize("way", ["strict", "plain"])
def test_a_block_that_saw_no_query_says_so(way: str) -> None:
    model, other = tiny(), tiny(seed=2)
    if way == "plain":
        with pytest.warns(UserWarning, match="attended no query"), kvsift.sparse(model, SPARSE):
            greedy(other, prompt())
        return
    with pytest.raises(kvsift.NothingSkipped, match="attended no query"), kvsift.sparse(model, SPARSE, strict=True):
        greedy(other, prompt())


@pytest.mark.parametrize("model", ["Qwen/Qwen3-4B", None, nn.Linear(2, 2)])
def test_what_is_no_model_of_transformers_is_refused(model: Any) -> None:
    with refused("unsupported_model"), kvsift.sparse(model, SPARSE):
        pass
    with refused("unsupported_model"):
        kvsift.make_cache(model, SPARSE)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": saved}


@pytest.mark.parametrize("plan", [SPARSE, "infinigen:budget=48:window=8:dense_layers=none"])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_model_answers_with_its_own_weights(way: str, plan: str) -> None:
    model = tiny()
    greedy(model, prompt(), past_key_values=kvsift.make_cache(model, plan))
    other = COPIES[way](model)
    with torch.no_grad():
        other.lm_head.weight.neg_()
        model.model.norm.weight.mul_(0.5)  # greedy tokens do not change by it
    expected = tiny()
    with torch.no_grad():
        expected.lm_head.weight.neg_()
    assert torch.equal(greedy(other, prompt()), greedy(expected, prompt()))
    assert not torch.equal(greedy(other, prompt()), greedy(model, prompt()))
    with kvsift.sparse(other, plan, strict=True) as run:
        greedy(other, prompt())
    assert run.report()["phases"]["decode"]["queries"] == 9 * 2


def test_a_copy_made_in_a_block_is_outside_of_it_and_takes_one_of_its_own() -> None:
    model = tiny()
    expected = greedy(model, prompt())
    with kvsift.sparse(model, SPARSE) as run:
        sifted, other = greedy(model, prompt()), copy.deepcopy(model)
        assert torch.equal(greedy(other, prompt()), expected)
        with kvsift.sparse(other, SPARSE) as its_run:
            assert torch.equal(greedy(other, prompt()), sifted)
    assert run.report()["phases"]["decode"]["queries"] == its_run.report()["phases"]["decode"]["queries"] == 9 * 2


@pytest.mark.parametrize("way", ["make_cache", "sparse"])
def test_attention_that_was_changed_since_is_taken_again(way: str) -> None:
    model = tiny()
    take_over(model, way)
    model.set_attn_implementation("sdpa")
    with kvsift.sparse(model, SPARSE, strict=True) as run:
        greedy(model, prompt())
    assert run.report()["phases"]["decode"]["queries"] == 9 * 2


def test_attention_that_is_changed_inside_the_block_is_named() -> None:
    model = tiny()
    with left_alone(model), kvsift.sparse(model, COVERING):
        model.set_attn_implementation("sdpa")
        with refused("unsupported_call: 'sdpa'"):
            logits(model, prompt(20))
