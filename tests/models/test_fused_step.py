"""Which models take fused steps, and what joining their weights leaves of them."""

from typing import Any

import pytest
import torch
from models.tiny import tiny
from torch import nn

from kvsift.models.captured_step import NO_STEP
from kvsift.models.fused_step import FusedStep
from kvsift.models.hf.forward_step import kind_of_step
from kvsift.models.projection import Projection
from kvsift.plan.capabilities import reason

ROPE = {"rope_theta": 1e4, "factor": 4.0}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
GEMMA = {**WINDOWS, "hidden_size_per_layer_input": 0}
DELTA = {"layer_types": ["linear_attention", "full_attention"]}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 512}


def linears(*outs: int, bias: bool = False, kind: type[nn.Linear] = nn.Linear) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [kind(8, out, bias=bias) for out in outs]


class Quantised(nn.Linear):
    """Stands in for a layer whose weight is no plain matrix."""


@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_one_input_are_one_product(bias: bool) -> None:
    layers, x = linears(6, 4, 4, bias=bias), torch.randn(3, 8)
    expected = torch.cat([layer(x) for layer in layers], 1)
    joined = Projection.of(*layers)
    assert torch.allclose(joined(x), expected)
    assert torch.allclose(torch.cat([layer(x) for layer in layers], 1), expected)
    storages = {layer.weight.untyped_storage().data_ptr() for layer in layers}
    assert storages == {joined.weight.untyped_storage().data_ptr()}


def test_joining_twice_moves_nothing() -> None:
    layers = linears(6, 4)
    first, second = Projection.of(*layers), Projection.of(*layers)
    assert first.weight.data_ptr() == second.weight.data_ptr()
    assert torch.equal(first.weight, second.weight)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [nn.Linear, Quantised])
def test_gate_and_up_are_multiplied(bias: bool, kind: type[nn.Linear]) -> None:
    layers, x, norm = linears(6, 6, bias=bias, kind=kind), torch.randn(3, 8), (torch.rand(8), 1e-6)
    normal = norm[0] * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm[1])
    expected = nn.functional.silu(layers[0](normal)) * layers[1](normal)
    assert torch.allclose(Projection.of(*layers)(x, norm, gated=True), expected, atol=1e-6)


def test_other_kinds_of_layers_are_called_as_they_are() -> None:
    plain, special = linears(6)[0], linears(4, kind=Quantised)[0]
    before, x, residual = plain.weight.data_ptr(), torch.randn(3, 8), torch.randn(3, 10)
    mixed = Projection.of(plain, special)
    assert mixed.weight is None
    assert plain.weight.data_ptr() == before
    assert torch.allclose(mixed(x, residual=residual), residual + torch.cat([plain(x), special(x)], 1))


@pytest.mark.parametrize(
    ("family", "changes"),
    [(family, {}) for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral", "Glm4Moe", "GptOss")]
    + [("Qwen3_5", DELTA), ("Gemma2", {}), ("Gemma3", {}), ("Gemma4", GEMMA), ("Ministral", WINDOWS)]
    + [("Ministral3", {"sliding_window": None})],
)
def test_llama_like_models_are_taken(family: str, changes: dict[str, Any]) -> None:
    assert kind_of_step(tiny(family, **changes)) == ("fused", [])
    assert reason(tiny(family, **changes), NO_STEP) is None


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("Phi3", {}, "none of the architectures"),
        ("GptOss", {"layer_types": ["sliding_attention"] * 2}, "without full attention"),
        ("Glm4Moe", {"n_group": 2, "topk_group": 1}, "chosen in groups"),
        ("Mixtral", {"sliding_window": 64}, "without full attention"),
        ("Mistral", {"sliding_window": 64}, "without full attention"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "without full attention"),
        ("Llama", {"hidden_act": "gelu"}, "uses gelu, neither silu nor gelu_pytorch_tanh"),
        ("Gemma4", {**GEMMA, "hidden_size_per_layer_input": 8}, "an embedding of its own (8 numbers"),
        (
            "Gemma4",
            {**GEMMA, "num_hidden_layers": 4, "layer_types": WINDOWS["layer_types"] * 2, "num_kv_shared_layers": 2},
            "2 of its layers attend what others have stored",
        ),
        (
            "Gemma4",
            {**GEMMA, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
            "experts beside an MLP",
        ),
        ("Mixtral", {"hidden_act": "gelu_pytorch_tanh"}, "experts are gated by silu alone"),
        ("Qwen3_5", {"layer_types": ["linear_attention"] * 2}, "without full attention"),
        ("Qwen3_5", {**DELTA, "linear_value_head_dim": 160}, "linear heads of 160 numbers"),
        ("Llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic"}}, "changes its angles"),
        ("Llama", {"rope_parameters": {**ROPE, **LONG, "rope_type": "longrope"}}, "changes its angles"),
    ],
)
def test_others_are_not_and_say_why(family: str, changes: dict[str, Any], says: str) -> None:
    _, against = kind_of_step(tiny(family, **changes))
    assert says in against[0]


@pytest.mark.parametrize("family", ["Phi3", "Olmo2"])
def test_their_own_forward_is_a_step(family: str) -> None:
    assert kind_of_step(tiny(family))[0] == "own"


def test_norms_of_another_dtype_are_named() -> None:
    model = tiny("GptOss").half()  # as transformers loads it in float16
    model.model.norm.float()
    assert kind_of_step(model) == ("own", ["its norms are torch.float32, and its other weights torch.float16"])


@pytest.mark.parametrize(("family", "repeats"), [("Llama", 1), ("GptOss", 2)])
def test_angles_are_the_model_s_own(family: str, repeats: int) -> None:
    model = tiny(family, rope_parameters={**ROPE, "rope_type": "yarn"})
    angles = FusedStep(model).angles(100)[1:]  # of lengths
    cos, sin = model.model.rotary_emb(torch.empty(0), torch.arange(100)[None])
    assert torch.equal(angles[:, 0], cos[0].repeat(1, repeats))
    assert torch.equal(angles[:, 1], sin[0].repeat(1, repeats))


def test_layers_that_look_for_outliers_are_named() -> None:
    class Linear8bitLt(nn.Linear):
        state = type("State", (), {"threshold": 6.0})

    model = tiny()
    model.model.layers[0].mlp.down_proj = Linear8bitLt(32, 32, bias=False)
    assert "int8" in str(reason(model, NO_STEP))
    Linear8bitLt.state.threshold = 0.0  # type: ignore[attr-defined]
    assert reason(model, NO_STEP) is None
