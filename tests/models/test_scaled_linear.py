"""Modules of 8-bit weights in the places of plain ones, and what joins them."""

import copy
import io

import pytest
import torch
from kernels.conftest import needs_triton
from models.tiny import prompt, tiny
from torch import Tensor, nn

from kvsift.kernels.linear import linear_triton
from kvsift.kernels.scaled_weight import FP8, ScaledStack, ScaledWeight
from kvsift.models.fused_step import FusedStep
from kvsift.models.native_step import NativeStep
from kvsift.models.projection import Projection
from kvsift.models.quantized import put_weights
from kvsift.models.scaled_linear import ScaledExperts, ScaledLinear
from kvsift.plan.capabilities import reason

CPU, IN = torch.device("cpu"), 192
NORM = (torch.rand(IN) + 0.5, 1e-5)


def layers(*outs: int, kind: str = "output", bias: bool = False) -> list[ScaledLinear]:
    """Linear layers whose scales differ by much."""
    torch.manual_seed(0)
    made = []
    for out in outs:
        block, ins = (1, IN) if kind == "output" else (128, 128)
        scales = torch.rand(-(-out // block), -(-IN // ins)) + 0.01
        weight = ScaledWeight(torch.randn(out, IN).to(FP8), scales, block, ins)
        made.append(ScaledLinear(weight, nn.Parameter(torch.randn(out)) if bias else None))
    return made


def one_by_one(modules: list[ScaledLinear], x: Tensor) -> Tensor:
    return torch.cat([module(x) for module in modules], 1)


def test_a_rounded_model_is_copied_saved_and_cast() -> None:
    model = tiny("Qwen2").requires_grad_(False)
    plain = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module is not model.lm_head:
            put_weights(model, {f"{name}.weight": ScaledWeight.of(module.weight)})
    expected = model(prompt(20)).logits
    assert 0 < (expected - plain(prompt(20)).logits).norm() < 0.1 * expected.norm()
    assert torch.equal(copy.deepcopy(model)(prompt(20)).logits, expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(prompt(20)).logits, expected)
    narrow = model.to(torch.bfloat16)
    assert narrow.model.layers[0].mlp.up_proj.scales.dtype == torch.float32
    found = narrow(prompt(20)).logits
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert torch.equal(model.to("cpu").float()(prompt(20)).logits, model(prompt(20)).logits)


@pytest.mark.parametrize("kind", ["output", "block"])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_one_input_are_one_product(kind: str, bias: bool) -> None:
    modules, x = layers(256, 64, 192, kind=kind, bias=bias), torch.randn(3, IN)
    expected = one_by_one(modules, x)
    joined = Projection.of(*modules)
    assert isinstance(joined.weight, ScaledWeight)
    assert joined.weight.outs == (1 if kind == "output" else 64)
    torch.testing.assert_close(joined(x), expected)
    torch.testing.assert_close(one_by_one(modules, x), expected)
    for name in ("values", "scales"):
        assert len({getattr(module, name).untyped_storage().data_ptr() for module in modules}) == 1
    again = Projection.of(*modules).weight
    assert isinstance(again, ScaledWeight)
    assert again.values.data_ptr() == joined.weight.values.data_ptr()
    assert again.scales.data_ptr() == joined.weight.scales.data_ptr()


@needs_triton
@pytest.mark.parametrize("kind", ["output", "block"])
def test_the_twin_takes_what_was_joined(kind: str) -> None:
    modules, x = layers(96, 32, 40, kind=kind), torch.randn(2, IN).half()
    expected = one_by_one(modules, x.float())
    joined = Projection.of(*modules).weight
    assert isinstance(joined, ScaledWeight)
    for rows in (1, 2):
        found = linear_triton(x[:rows], joined).float()
        assert (found - expected[:rows]).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("kind", ["output", "block"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [2, 40])
def test_gate_and_up_are_multiplied(rows: int, bias: bool, kind: str) -> None:
    modules, x = layers(96, 96, kind=kind, bias=bias), torch.randn(rows, IN)
    normal = NORM[0] * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM[1])
    expected = nn.functional.silu(modules[0](normal)) * modules[1](normal)
    torch.testing.assert_close(Projection.of(*modules)(x, NORM, gated=True), expected, rtol=1e-4, atol=1e-2)


def test_a_residual_is_added() -> None:
    modules, x = layers(64, kind="block", bias=True), torch.randn(3, IN)
    residual = torch.randn(3, 64)
    torch.testing.assert_close(Projection.of(*modules).add_to(residual.clone(), x), residual + modules[0](x))


def test_layers_of_several_kinds_are_called_one_by_one() -> None:
    x, (by_output, by_block) = torch.randn(3, IN), (layers(64, kind=kind)[0] for kind in ("output", "block"))
    plain = nn.Linear(IN, 8, bias=False)
    for modules in ((by_output, by_block), (by_output, plain)):
        joined = Projection.of(*modules)
        assert joined.weight is None
        assert not joined.keeps_bits
        assert torch.equal(joined(x), torch.cat([module(x) for module in modules], 1))


def test_the_core_takes_no_step_of_eight_bits() -> None:
    model = tiny("Llama").requires_grad_(False)
    module = model.model.layers[0].mlp.down_proj
    put_weights(model, {"model.layers.0.mlp.down_proj.weight": ScaledWeight.of(module.weight)})
    step = FusedStep(model)
    assert not step.keeps_bits
    assert reason(step, NativeStep.of_weights) == "the core does not multiply with its weights"


def test_experts_may_have_8_bits_in_one_of_their_weights() -> None:
    model = tiny("Qwen3Moe")
    experts = model.model.layers[0].mlp.experts
    down = experts.down_proj.detach().clone()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    put_weights(model, {name: ScaledStack.of(experts.gate_up_proj.detach())})
    assert isinstance(experts.gate_up_proj, ScaledExperts)
    assert torch.equal(experts.down_proj, down)
