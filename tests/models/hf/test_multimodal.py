"""A model that also sees: its vision tower looks both ways and is left so, its language model runs under the plan."""

import pytest
import torch
from models.tiny import COVERING, SIZES, SPARSE, assert_sparse, covered, greedy, left_alone, prompt, randomised
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MllamaForCausalLM,
    PreTrainedModel,
)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

import kvsift

IMAGE = 95  # token that stands for a patch


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(1)
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    text = LlamaConfig(**SIZES)
    return randomised(
        LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE))
    )


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    """An image of 16 patches, then 150 words."""
    words = prompt().masked_fill(prompt() == IMAGE, 1)
    ids = torch.cat([torch.full((1, 16), IMAGE), words], 1)
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def test_a_picture_is_seen_as_it_is_without_kvsift(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    with torch.no_grad():
        expected = model(**inputs).logits
        with covered(model):
            torch.testing.assert_close(model(**inputs).logits, expected, atol=2e-5, rtol=1e-4)


def test_a_covering_budget_gives_the_tokens_of_eager_attention(
    model: PreTrainedModel, inputs: dict[str, Tensor]
) -> None:
    expected = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    cache = kvsift.make_cache(model, COVERING)
    assert torch.equal(model.generate(**inputs, past_key_values=cache, max_new_tokens=10, do_sample=False), expected)


def test_the_language_model_runs_under_the_plan(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    with kvsift.sparse(model, SPARSE) as run:
        whole = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    assert_sparse(run)
    assert {row["layer"] for row in run.report()["layers"]} == {0, 1}
    cache = kvsift.make_cache(model, SPARSE)
    assert torch.equal(model.generate(**inputs, past_key_values=cache, max_new_tokens=10, do_sample=False), whole)


def test_every_part_gets_its_own_attention_back(model: PreTrainedModel) -> None:
    model.set_attn_implementation({"": "eager", "text_config": "eager", "vision_config": "sdpa"})
    with left_alone(model), kvsift.sparse(model, SPARSE):
        assert model.config.text_config._attn_implementation == "kvsift"
    assert model.config.vision_config._attn_implementation == "sdpa"


def test_layers_that_attend_a_picture_stay_the_model_s_own() -> None:
    """Llama 3.2 Vision: some layers attend to the picture, the others to the text."""
    torch.manual_seed(1)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    config = MllamaTextConfig(
        **{**SIZES, "num_hidden_layers": 4, "bos_token_id": 1, "head_dim": 8}, cross_attention_layers=[1, 3], **rope
    )
    model, picture = randomised(MllamaForCausalLM(config)), torch.randn(1, 16, 32)
    for name, parameter in model.named_parameters():
        if "gate" in name:
            parameter.data.fill_(0.7)

    def answers() -> list[Tensor]:
        with torch.no_grad():
            output = model(prompt(60), cross_attention_states=picture, cross_attention_mask=torch.zeros(1, 1, 60, 16))
            later = model(prompt(1, 2), past_key_values=output.past_key_values)
            return [output.logits, later.logits, greedy(model, prompt(60))]

    expected = answers()
    with covered(model) as run:
        found = answers()
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
    assert {row["layer"] for row in run.report()["layers"]} == {0, 2}
