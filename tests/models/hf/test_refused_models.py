"""Models whose attention cannot be taken over are named, with the reason, before anything runs, and stay usable."""

import pytest
import torch
from models.tiny import SIZES, SPARSE, left_alone, prompt, randomised, take_over, tiny
from refusals import refused
from torch import nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import kvsift

HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2}
SMALL = {"vocab_size": 96, "hidden_size": 32}
NO_INTERFACE = "does not use transformers' attention interface"


def bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(**SMALL, n_layer=2, n_head=2))


def falcon() -> PreTrainedModel:
    return FalconForCausalLM(FalconConfig(**SMALL, **HEADS))


def deepseek() -> PreTrainedModel:
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SMALL, **HEADS, intermediate_size=32, n_routed_experts=8))


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(vocab_size=96, d_model=32, num_layers=2, num_heads=2, d_ff=32))


def mamba() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(**SMALL, num_hidden_layers=2))


def bert() -> PreTrainedModel:
    return BertLMHeadModel(BertConfig(**SMALL, **HEADS, intermediate_size=32))


def bart() -> PreTrainedModel:
    return BartForCausalLM(BartConfig(vocab_size=96, d_model=32, decoder_layers=2, decoder_attention_heads=2))


def gemma_both_ways() -> PreTrainedModel:
    """As inside PaliGemma, whose prompt is bidirectional, with sdpa even without a mask."""
    return GemmaForCausalLM(GemmaConfig(**SIZES, use_bidirectional_attention=True))


def sliding_mistral() -> PreTrainedModel:
    return tiny("Mistral", sliding_window=16)


REFUSED = {
    bloom: ("BloomForCausalLM", NO_INTERFACE),
    falcon: ("FalconForCausalLM", NO_INTERFACE),
    deepseek: ("DeepseekV3ForCausalLM", "multi-head latent attention"),
    t5: ("T5ForConditionalGeneration", "encoder-decoder"),
    mamba: ("MambaForCausalLM", "no full-attention layer"),
    bert: ("BertLMHeadModel", "of an encoder, or cross-attention"),
    bart: ("BartForCausalLM", "of an encoder, or cross-attention"),
    gemma_both_ways: ("GemmaForCausalLM", "its attention is bidirectional"),
    sliding_mistral: ("MistralForCausalLM", "no full-attention layer (it attends through sliding windows)"),
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
@pytest.mark.parametrize("way", ["sparse", "make_cache"])
def test_a_refusal_names_the_model_and_the_reason_and_leaves_it_as_it_was(make: object, way: str) -> None:
    model, (name, reason) = make().eval(), REFUSED[make]
    with left_alone(model), pytest.raises(kvsift.InputError) as refusal:
        take_over(model, way)
    assert name in str(refusal.value)
    assert reason in str(refusal.value)


def test_a_model_whose_layers_bypass_the_interface_is_refused() -> None:
    class Private(nn.Module):
        """Attention of its own that keeps its tokens in the cache and reads them there."""

        def __init__(self, attention: nn.Module) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
            heads = hidden_states.unflatten(-1, (2, 16)).transpose(1, 2)
            kwargs["past_key_values"].update(heads, heads, self.attention.layer_idx)
            return hidden_states, None

    model = tiny()
    model.model.layers[1].self_attn = Private(model.model.layers[1].self_attn)
    with left_alone(model), refused("unsupported_model: [1]"):
        kvsift.make_cache(model, SPARSE)


def test_a_model_that_fails_by_itself_is_refused_with_its_own_error() -> None:
    model = tiny()
    model.model.layers[0].mlp = nn.Linear(7, 7)
    with left_alone(model), refused("unsupported_model: LlamaForCausalLM"):
        kvsift.make_cache(model, SPARSE)


def test_a_model_with_absolute_positions_is_not_refused() -> None:
    model = randomised(GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, bos_token_id=None)))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(prompt(), **options)
    with kvsift.sparse(model, SPARSE.replace("budget=48", "budget=152")):
        assert torch.equal(model.generate(prompt(), **options), expected)
