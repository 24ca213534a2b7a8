"""Modules of packed weights in the places of plain ones."""

import copy
import io

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from models.gguf_files import pack_model
from models.tiny import tiny
from refusals import refused

from kvsift import native
from kvsift.models.forward_pass import ForwardPass
from kvsift.models.fused_step import FusedStep
from kvsift.models.hf.adapter import origin_of
from kvsift.models.hf.unwrap import device_of_inputs
from kvsift.models.packed_linear import PackedEmbedding, PackedLinear, can_stay_packed
from kvsift.models.projection import Projection
from kvsift.types import Origin

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled core is missing")
IDS = torch.arange(3, 60).view(1, -1)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_a_packed_model_is_copied_saved_and_cast() -> None:
    model = pack_model(tiny("Qwen2"), Kind.Q4_1)
    expected = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(logits(torch.load(file, weights_only=False)), expected)
    plain = tiny("Qwen2", seed=9)
    plain.load_state_dict(model.state_dict())  # has the expanded weights
    assert (logits(plain) - expected).norm() < 0.03 * expected.norm()
    narrow = logits(model.to(torch.bfloat16))
    assert narrow.dtype == torch.bfloat16
    assert (narrow - expected).norm() < 0.05 * expected.norm()
    assert torch.equal(logits(model.to("cpu").float()), logits(model))


def test_what_packed_weights_do_not_do_is_refused() -> None:
    model = pack_model(tiny("Llama"), Kind.Q8_0)
    linear = model.lm_head
    assert isinstance(linear, PackedLinear)
    x = torch.randn(2, linear.in_features)
    with refused("invalid_tensor"):
        linear(x.requires_grad_())
    with refused("invalid_tensor: torch.float16"):
        linear(x.detach().half())
    with refused("unsupported_device"):
        model.to("meta")
    assert not can_stay_packed(torch.device("cuda"), torch.bfloat16)
    assert not can_stay_packed(torch.device("cpu"), torch.float16)


def test_tied_weights_are_held_once_and_tell_the_model_from_others() -> None:
    plain = tiny("Llama", tie_word_embeddings=True)
    model = pack_model(copy.deepcopy(plain), Kind.Q8_0)
    embedding, head = model.model.embed_tokens, model.lm_head
    assert isinstance(embedding, PackedEmbedding)
    assert head.matrix is embedding.matrix
    assert device_of_inputs(model) == torch.device("cpu")
    expanded = copy.deepcopy(plain)
    expanded.load_state_dict(model.state_dict())
    packed_origin, origin = origin_of(model), origin_of(expanded)
    assert isinstance(packed_origin, Origin)
    assert isinstance(origin, Origin)
    assert packed_origin.name == origin.name
    assert torch.equal(packed_origin.sample(), origin.sample())


def test_projections_of_packed_layers_have_the_bits_of_the_layers() -> None:
    layer = pack_model(tiny("Qwen2"), Kind.Q4_0).model.layers[0]
    attention = layer.self_attn
    x = torch.randn(70, attention.q_proj.in_features)
    joined = Projection.of(attention.q_proj, attention.k_proj, attention.v_proj)
    assert joined.keeps_bits
    assert torch.equal(joined(x), torch.cat([attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)], 1))
    mixed = Projection.of(attention.q_proj, torch.nn.Linear(x.shape[1], 8))
    assert mixed(x).shape == (70, attention.q_proj.out_features + 8)
    assert not mixed.in_core


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_packed_model_answers_in_kvsift_as_in_transformers(dtype: torch.dtype) -> None:
    from kvsift.models.hf.sparse import feeding, make_cache

    model = pack_model(tiny("Qwen3").to(dtype), Kind.Q4_1)
    cache = make_cache(model, "dense")
    with torch.inference_mode(), feeding(cache, "prefill"):
        found = ForwardPass(FusedStep(model)).prefill(IDS[0], cache, "prefill")[0, 0]
    expected = logits(model)[0, -1]
    assert (found - expected).norm() < (0.05 if dtype == torch.bfloat16 else 0.02) * expected.norm()
