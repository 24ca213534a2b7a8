"""Weights of 8-bit floats: as near to the exact product as the expanded weights, with scales of any kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels.conftest import DEVICE, DTYPES, needs_triton
from kernels.paged_cases import distance
from torch import Tensor

from kvsift.kernels.gated_linear import gated_linear, gated_linear_reference, gated_linear_triton
from kvsift.kernels.linear import linear, linear_reference, linear_triton
from kvsift.kernels.scaled_weight import (
    FP8,
    ScaledWeight,
    expand_reference,
    expand_triton,
    full_product,
    keeps_fp8,
    round_rows_reference,
    round_rows_triton,
    rounds_rows,
    shared_outs,
)
from kvsift.kernels.skinny_product import Tiling, choose_scaled_tiling, in_registers, on_tensor_cores, takes_weight

SHORT = [dtype for dtype in DTYPES if dtype != torch.float32]
CASES = [  # (rows, out, in, tiling)
    (1, 32, 512, in_registers(4, 1, 2)),  # everything fits
    (1, 37, 304, in_registers(8, 1, 1)),  # outputs and inputs that stick out of the last tile
    (1, 3, 40, in_registers(4, 1, 2)),  # less than a tile
    (3, 40, 96, on_tensor_cores(16, 32, 4, 3)),
    (16, 21, 50, on_tensor_cores(16, 32, 4, 2)),
    (32, 140, 200, on_tensor_cores(32, 64, 4, 3)),
]
SIZES = [(40, 300), (33, 256), (200, 140)]
if DEVICE == "cuda":
    SIZES += [(4096, 4096), (6144, 4096), (1000, 14336), (28672, 4096)]
BLOCK = 128
KINDS = ["output", "block"]


def scaled(num_out: int, num_in: int, kind: str) -> ScaledWeight:
    """Random values of all sizes, those below the smallest normal one among them, and scales that differ by much."""
    torch.manual_seed(num_out + num_in)
    values = (torch.randn(num_out, num_in) * 2.0 ** torch.randint(-9, 4, (num_out, num_in))).to(FP8)
    outs, ins = (1, num_in) if kind == "output" else (BLOCK, BLOCK)
    scales = torch.rand(-(-num_out // outs), -(-num_in // ins)) / num_in**0.5 + 1e-3
    return ScaledWeight(values.to(DEVICE), scales.to(DEVICE), outs, ins)


def draw(rows: int, weight: ScaledWeight, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    num_out, num_in = weight.shape
    x = torch.randn(rows, num_in)
    x[:, 0] *= 30  # residual streams have such channels
    bias, residual, norm = torch.randn(num_out), torch.randn(rows, num_out), torch.rand(num_in) + 0.5
    x, bias, residual, norm = (t.to(DEVICE, dtype) for t in (x, bias, residual, norm))
    return x, {"bias": bias, "residual": residual, "norm": (norm, 1e-5)}


def exactly(x: Tensor, weight: ScaledWeight, how: dict[str, Any]) -> Tensor:
    """Everything in float64."""
    x = x.double()
    if "norm" in how:
        norm, eps = how["norm"]
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()
    product = x @ expand_reference(weight, torch.float64).T
    return product + sum(how[name].double() for name in ("bias", "residual") if name in how)


def check(twin: Tensor, x: Tensor, weight: ScaledWeight, how: dict[str, Any]) -> None:
    exact, own = exactly(x, weight, how), linear_reference(x, weight, **how)
    assert twin.dtype == x.dtype
    assert distance(twin, exact) <= 2 * max(distance(own, exact), torch.finfo(torch.float32).eps * float(exact.norm()))


def within(tiling: Tiling, kind: str) -> Tiling:
    """The tiling, in blocks of inputs with one scale."""
    return tiling._replace(ins=min(tiling.ins, BLOCK)) if tiling.dot and kind == "block" else tiling


@needs_triton
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [(), ("norm", "bias", "residual")], ids=str)
@pytest.mark.parametrize(("rows", "num_out", "num_in", "tiling"), CASES)
def test_the_twin_is_as_near_to_the_exact_product_as_expanded_weights(
    rows: int, num_out: int, num_in: int, tiling: Tiling, fused: tuple[str, ...], kind: str, dtype: torch.dtype
) -> None:
    weight = scaled(num_out, num_in, kind)
    x, how = draw(rows, weight, dtype)
    how = {name: how[name] for name in fused}
    check(linear_triton(x, weight, tiling=within(tiling, kind), **how), x, weight, how)


@needs_triton
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 32), st.integers(1, 150), st.integers(1, 300), st.sampled_from(KINDS))
def test_the_chosen_tilings_are_right_for_any_size(rows: int, num_out: int, num_in: int, kind: str) -> None:
    weight = scaled(num_out, num_in, kind)
    x, how = draw(rows, weight, SHORT[0])
    check(linear_triton(x, weight, **how), x, weight, how)


@needs_triton
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5, 20])
@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
def test_gates_are_multiplied_by_their_own_scales(
    num_out: int, num_in: int, rows: int, kind: str, dtype: torch.dtype
) -> None:
    inter = num_out // 2 // BLOCK * BLOCK or num_out
    weight = scaled(2 * inter, num_in, kind)
    weight = weight.finer(shared_outs([scaled(inter, num_in, kind), weight]))
    x, how = draw(rows, weight, dtype)
    found = gated_linear_triton(x, weight, norm=how["norm"])
    gate, up = exactly(x, weight, {"norm": how["norm"]}).chunk(2, -1)
    exact, own = torch.nn.functional.silu(gate) * up, gated_linear_reference(x, weight, norm=how["norm"])
    assert distance(found, exact) <= 2 * distance(own, exact)


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
def test_a_steady_row_has_the_same_bits_beside_any_others(num_out: int, num_in: int, kind: str) -> None:
    weight = scaled(num_out, num_in, kind)
    x, how = draw(32, weight, SHORT[0])
    residual = how.pop("residual")
    together = linear_triton(x, weight, residual=residual, steady=True, **how)
    for rows in (1, 5, 16, 17):
        some = linear_triton(x[:rows], weight, residual=residual[:rows], steady=True, **how)
        assert torch.equal(some, together[:rows]), rows


@needs_triton
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
def test_expanded_weights_are_rounded_once(num_out: int, num_in: int, kind: str, dtype: torch.dtype) -> None:
    weight = scaled(num_out, num_in, kind)
    exact = expand_reference(weight, torch.float64)
    assert torch.equal(expand_triton(weight, dtype), expand_reference(weight, dtype))
    assert torch.equal(expand_reference(weight, dtype), exact.float().to(dtype))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_rounded_to_the_nearest_numbers_below_their_largest(dtype: torch.dtype) -> None:
    x = torch.randn(5, 100).to(DEVICE, dtype)
    x[1], x[2, 3], x[3] = 0, 1000, 1e-7
    values, scales = round_rows_triton(x)
    expected, of = round_rows_reference(x)
    assert torch.equal(scales, of)
    powers = torch.frexp(expected.float()).mantissa.abs() == 0.5
    right = (values.float() == expected.float()) | (
        powers & (DEVICE == "cpu")
    )  # the interpreter loses a carry to these
    assert right.all()
    error = (expected.float() * of - x.float()).abs()
    assert (error <= x.float().abs() / 16 + scales * 2.0**-10).all()  # half a step of 3 bits, or of the smallest one
    assert values[2, 3].float() == 448
    assert not values[1].float().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_any_rows_and_dtype_are_answered(rows: int, kind: str, dtype: torch.dtype) -> None:
    weight = scaled(24, 64, kind)
    x, how = draw(rows, weight, dtype)
    found, gates = (
        linear(x, weight, **how),
        gated_linear(x, weight.finer(4), norm=how["norm"]) if kind == "block" else None,
    )
    check(found, x, weight, how)
    if gates is not None:
        own = gated_linear_reference(x, weight, norm=how["norm"])
        torch.testing.assert_close(gates, own, rtol=0.02, atol=0.05)


def test_weights_are_rounded_with_a_scale_for_each_output() -> None:
    weight = torch.randn(6, 32)
    weight[2] = 0
    rounded = ScaledWeight.of(weight)
    assert rounded.by_output
    assert rounded.scales.shape == (6, 1)
    error = (rounded.expanded(torch.float32) - weight).abs()
    assert (error <= weight.abs() / 16 + rounded.scales * 2.0**-10).all()


def test_blocks_are_shared_by_as_many_outputs_as_joined_weights_allow() -> None:
    first, second = scaled(192, 64, "block"), scaled(130, 64, "block")
    outs = shared_outs([first, second])
    assert outs == 64
    finer = first.finer(outs)
    assert finer.scales.shape == (3, 1)
    assert torch.equal(finer.expanded(torch.float32), first.expanded(torch.float32))
    assert shared_outs([second]) == BLOCK
    assert shared_outs([scaled(192, 64, "output"), scaled(8, 64, "output")]) == 1


def test_eight_bits_need_a_gpu_that_converts_them_and_rows_of_16_bits() -> None:
    assert not keeps_fp8(torch.device("cpu"), torch.bfloat16)
    assert takes_weight(scaled(8, 64, "output"), torch.bfloat16)
    assert not takes_weight(scaled(8, 64, "output"), torch.float32)
    odd = ScaledWeight(torch.zeros(8, 64).to(FP8), torch.ones(8, 2), 1, 32)
    assert not takes_weight(odd, torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 16, 32])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 64), (4096, 14336), (6144, 4096), (28672, 4096)])
def test_tiles_are_powers_of_two_within_a_block(num_out: int, num_in: int, rows: int, steady: bool, kind: str) -> None:
    outs, ins = (1, num_in) if kind == "output" else (BLOCK, BLOCK)
    scales = torch.empty(-(-num_out // outs), -(-num_in // ins))
    tiling = choose_scaled_tiling(
        ScaledWeight(torch.empty(num_out, num_in, dtype=FP8), scales, outs, ins), rows, steady
    )
    assert tiling.dot == (rows > 1 or steady)
    for number in (tiling.outs, tiling.ins, tiling.num_warps, tiling.depth if not tiling.dot else 1):
        assert number & (number - 1) == 0
    assert scales.shape[1] == 1 or not tiling.dot or BLOCK % tiling.ins == 0


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="a library of NVIDIA's multiplies 8-bit floats")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [33, 1000])
def test_many_rows_are_rounded_to_eight_bits_where_each_output_has_a_scale(rows: int, kind: str) -> None:
    weight = scaled(512, 1024, kind)
    x, how = draw(rows, weight, torch.bfloat16)
    eight_bits = torch.cuda.get_device_capability()[0] >= 9 and kind == "output"
    assert rounds_rows(x, weight) == eight_bits
    assert not rounds_rows(x.half(), weight)
    found = full_product(x, weight, how["bias"])
    values, scales = round_rows_reference(x) if eight_bits else (x, 1)
    exact = values.double() * scales @ expand_reference(weight, torch.float64).T + how["bias"].double()
    assert distance(found, exact) <= 0.004 * float(exact.norm())  # bfloat16, and what tensor cores drop of sums
    own = exactly(x, weight, {"bias": how["bias"]})
    assert distance(found, own) <= 0.05 * float(own.norm())
