"""What a layer would ask of the input of the layer below: by the model's own modules, in decode, for those who ask."""

from typing import Any

import pytest
import torch
from models.tiny import FAMILIES, greedy, left_alone, logits, prompt, tiny
from refusals import refused
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvsift
from kvsift.models.hf.foresight import Foresight, attentions_of, foreseen
from kvsift.models.hf.layer import SparseLayer

PLAN = "infinigen:alpha=0.5:partial=0.5:budget=60:window=8:dense_layers=none"
families = pytest.mark.parametrize("family", FAMILIES)
Asked = dict[int, list[tuple[Tensor, Tensor | None]]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What every layer of ours was asked in every pass, and what had been foreseen."""
    found: Asked = {}
    attend = SparseLayer.attend

    def spying(self: SparseLayer, shape: Any, queries: Tensor, *rest: Any) -> Tensor:
        found.setdefault(self.layer, []).append((queries, self.foreseen))
        return attend(self, shape, queries, *rest)

    monkeypatch.setattr(SparseLayer, "attend", spying)
    return found


@families
def test_of_its_own_input_a_layer_foresees_its_own_queries(family: str, asked: Asked) -> None:
    """Norms, biases, positions and fused weights included."""
    model, own = tiny(family, num_hidden_layers=2), {}

    def before(attention: nn.Module, args: Any, kwargs: Any) -> None:
        own[attention.layer_idx] = foreseen(attention, kwargs["hidden_states"], args, kwargs)

    assert len(attentions_of(model)) == 2
    with kvsift.sparse(model, PLAN), torch.no_grad():
        asked.clear()
        handles = [each.register_forward_pre_hook(before, with_kwargs=True) for each in attentions_of(model)]
        logits(model, prompt(40))
        for handle in handles:
            handle.remove()
    for layer, passes in asked.items():
        torch.testing.assert_close(own[layer], passes[0][0])


def test_what_is_foreseen_is_this_layer_s_query_of_the_input_below(asked: Asked) -> None:
    model, inputs, angles = tiny(num_hidden_layers=3), {}, {}

    def before(attention: nn.Module, args: Any, kwargs: Any) -> None:
        inputs[attention.layer_idx] = kwargs["hidden_states"]
        angles[attention.layer_idx] = kwargs["position_embeddings"]

    for each in attentions_of(model):
        each.register_forward_pre_hook(before, with_kwargs=True)
    with kvsift.sparse(model, PLAN), torch.no_grad():
        cache = kvsift.make_cache(model, PLAN)
        logits(model, prompt(40), past_key_values=cache)
        asked.clear()
        logits(model, prompt(1, seed=5), past_key_values=cache)
        assert asked[0][0][1] is None, "nothing lies below the first layer"
        for layer in (1, 2):
            attention = model.model.layers[layer].self_attn
            queries = attention.q_proj(inputs[layer - 1]).unflatten(-1, (4, 16)).transpose(1, 2)
            expected = apply_rotary_pos_emb(queries, queries, *angles[layer])[0]
            torch.testing.assert_close(asked[layer][0][1], expected)
            assert not torch.allclose(asked[layer][0][0], expected)


def test_nothing_is_foreseen_for_prompts_or_for_plans_that_do_not_ask(asked: Asked) -> None:
    model = tiny()
    with kvsift.sparse(model, PLAN):
        logits(model, prompt(40))
    with kvsift.sparse(model, "quest:budget=48:page_size=8:window=8:dense_layers=none"):
        greedy(model, prompt(), num_new=2)
    assert all(foreseen is None for passes in asked.values() for _, foreseen in passes)


@families
def test_every_family_generates(family: str, asked: Asked) -> None:
    model = tiny(family, num_hidden_layers=2)
    with left_alone(model), kvsift.sparse(model, PLAN) as run:
        first = greedy(model, prompt(), num_new=6)
        assert torch.equal(greedy(model, prompt(), num_new=6), first)
    assert run.report()["phases"]["decode"]["density"] < 0.6
    assert asked[1][-1][1] is not None


def test_the_choice_is_that_of_what_was_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it a layer's own query, other tokens would be seen."""
    model, ids = tiny(num_hidden_layers=3), prompt()
    with kvsift.sparse(model, PLAN), torch.no_grad():
        caches = [kvsift.make_cache(model, PLAN) for _ in range(2)]
        for cache in caches:
            logits(model, ids, past_key_values=cache)
        true = logits(model, prompt(1, seed=5), past_key_values=caches[0])
        of_itself = lambda attention, hidden, args, kwargs: foreseen(attention, kwargs["hidden_states"], args, kwargs)  # noqa: E731
        monkeypatch.setattr("kvsift.models.hf.foresight.foreseen", of_itself)
        own = logits(model, prompt(1, seed=5), past_key_values=caches[1])
    assert not torch.allclose(true, own)


def test_where_nothing_is_foreseen_the_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than answered by a query that nobody foresaw."""
    model = tiny()
    monkeypatch.setattr(Foresight, "_before_attention", lambda *_: None)
    with kvsift.sparse(model, PLAN), refused("unsupported_model"):
        greedy(model, prompt())


def test_a_model_without_known_attentions_is_refused() -> None:
    with refused("unsupported_model"):
        Foresight(nn.Sequential(nn.Linear(2, 2)))
