"""Weights of few bits: what codes in groups stand for, how plain weights are rounded, what takes their places."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.conftest import needs_triton
from models.quantized_files import stay_everywhere
from models.tiny import tiny
from torch import nn

from kvsift import native
from kvsift.kernels.int4_weight import Int4Weight
from kvsift.kernels.linear import linear_triton
from kvsift.kernels.scaled_weight import ScaledWeight
from kvsift.models.fused_step import FusedStep
from kvsift.models.packed_linear import PackedLinear
from kvsift.models.quantized import GroupedCodes, round_linears
from kvsift.models.scaled_linear import ScaledLinear
from kvsift.native.packed import packed_product

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 96}
needs_core = pytest.mark.skipif(not native.available(), reason="the compiled core is missing")


def drawn(bits: int, num_out: int, num_groups: int, ins: int, has_zeros: bool, seed: int = 0) -> GroupedCodes:
    torch.manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (num_out, num_groups * ins), dtype=torch.uint8)
    scales = (torch.rand(num_out, num_groups) * 0.01 + 1e-4).bfloat16()
    zeros = torch.randint(0, (1 << bits) + 1, scales.shape, dtype=torch.int16)  # one more: GPTQ adds 1
    return GroupedCodes(codes, scales, zeros if has_zeros else None, bits)


@needs_core
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zeros", [False, True])
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 9), num_out=st.integers(1, 40), num_groups=st.integers(1, 5), seed=st.integers(0, 99),
    ins=st.sampled_from([32, 64, 128]),
)  # fmt: skip
def test_packed_products_are_as_near_to_the_expanded_weights_as_inputs_in_8_bits(
    has_zeros: bool, bits: int, rows: int, num_out: int, num_groups: int, ins: int, seed: int
) -> None:
    codes = drawn(bits, num_out, num_groups, ins, has_zeros, seed)
    matrix, exact = codes.packed(), codes.expanded(torch.float64)
    assert matrix.affine == has_zeros
    own = matrix.rows(torch.arange(num_out), torch.float32).double()
    minima = 2.0**-11 * (1 << bits - 1) * codes.scales.double().repeat_interleave(ins, 1)  # in float16
    assert ((own - exact).abs() <= (1.001 * minima if has_zeros else 1e-6 * exact.abs())).all()
    x = torch.randn(rows, exact.shape[1]).double()
    steps = (x.unflatten(1, (-1, 32)).abs().amax(2) / 254).repeat_interleave(32, 1)  # halves
    bound = 1.001 * (steps @ own.abs().T + x.abs() @ (own - exact).abs().T) + 1e-5 * (x.abs() @ own.abs().T)
    assert ((packed_product(x.float(), [matrix]).double() - x @ exact.T).abs() <= bound).all()


@pytest.mark.parametrize("has_zeros", [False, True])
def test_codes_stand_for_multiples_of_the_scale_of_their_group(has_zeros: bool) -> None:
    codes = drawn(4, 24, 3, 64, has_zeros)
    zeros = torch.full((24, 3), 8) if codes.zeros is None else codes.zeros
    exact = (codes.codes.double() - zeros.repeat_interleave(64, 1)) * codes.scales.double().repeat_interleave(64, 1)
    assert torch.equal(codes.expanded(torch.float64), exact)
    order = torch.randperm(192)
    groups = torch.arange(192) // 64
    mixed = GroupedCodes(codes.codes[:, order], codes.scales, codes.zeros, 4, groups[order])
    assert torch.equal(mixed.expanded(torch.float64), exact[:, order])


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_rounded_to_the_nearest_multiple(bits: int) -> None:
    weight = torch.randn(16, 96) * 0.02
    weight[3, :32], weight[4] = 0, weight[4].abs()
    codes = GroupedCodes.of(weight, bits)
    assert (codes.zeros is None) == (bits == 8)
    error = (codes.expanded(torch.float32) - weight).abs().unflatten(1, (-1, 32))
    assert (error <= 0.51 * codes.scales.float().unsqueeze(2) + 1e-7).all()  # of scales in float16 the ends stick out
    spread = weight.amax(1) - weight.amin(1) if bits == 4 else 2 * weight.abs().amax(1)
    assert (codes.scales.amax(1) <= 1.001 * spread / ((1 << bits) - 2) + 1e-7).all()
    assert torch.equal(codes.expanded(torch.float32)[3, :32], weight[3, :32])


@needs_triton
@pytest.mark.parametrize("rows", [1, 5])
def test_rounded_weights_are_multiplied_by_the_kernels_of_a_gpu(rows: int) -> None:
    weight = torch.randn(40, 192) * 0.02
    codes = GroupedCodes.of(weight, 4)
    held, x = Int4Weight.of(codes.codes, codes.scales, codes.zeros.to(torch.uint8), 32), torch.randn(rows, 192)  # type: ignore[union-attr]
    assert torch.equal(held.expanded(torch.float32), codes.expanded(torch.float32))
    expected = x @ codes.expanded(torch.float32).T
    assert (linear_triton(x.half(), held).float() - expected).norm() < 2e-3 * expected.norm()


@needs_core
@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_rounded_layers_stay_packed_on_a_cpu(quantize: str) -> None:
    model = tiny("Qwen2", **SIZES).requires_grad_(False)
    plain = copy.deepcopy(model)
    round_linears(model, CPU, torch.float32, quantize)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert len(layers) == 7 * model.config.num_hidden_layers
    assert type(model.lm_head) is nn.Linear
    for name, module in layers.items():
        own = plain.get_submodule(name)
        rounded = GroupedCodes.of(own.weight, int(quantize[3:])).expanded(torch.float32)
        torch.testing.assert_close(module.weight, rounded, rtol=0, atol=float(2**-11 * rounded.abs().max()))
        assert module.bias is own.bias is None or torch.equal(module.bias, own.bias)
    expanded = copy.deepcopy(plain)
    round_linears(expanded, CPU, torch.float16, quantize)  # of which packed products take no rows
    assert type(expanded.model.layers[0].mlp.up_proj) is nn.Linear


def test_all_linear_layers_but_the_head_are_rounded() -> None:
    model = tiny("Llama").requires_grad_(False)
    plain = copy.deepcopy(model)
    round_linears(model, CPU, torch.float32, "fp8")
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight)
    before, after = (each.model.layers[1].mlp.up_proj.weight for each in (plain, model))
    assert torch.equal(after, ScaledWeight.of(before).expanded(torch.float32))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("stays", [False, True])
def test_a_head_is_rounded_beside_the_embedding_that_it_was_tied_to(
    stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stay_everywhere(monkeypatch, stays)
    model = tiny("Llama", tie_word_embeddings=True).requires_grad_(False)
    embedding = model.model.embed_tokens.weight.clone()
    round_linears(model, CPU, torch.float32, "fp8_head")
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    head, rounded = model.lm_head.weight, ScaledWeight.of(embedding).expanded(torch.float32)
    assert isinstance(model.lm_head, ScaledLinear) == stays
    assert torch.equal(head.expanded(torch.float32) if stays else head, rounded)
    x = torch.randn(2, embedding.shape[1])
    torch.testing.assert_close(FusedStep(model).head(x), x @ rounded.T)
