"""Linear layers on a few rows, with weights of 16, 8 and 4 bits: any size, with whatever is fused, as near to the exact
product as the reference in the same dtype."""

from __future__ import annotations

from math import gcd
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels.conftest import DEVICE, DTYPES, crossed, needs_triton
from kernels.paged_cases import distance
from torch import Tensor
from turns import in_turns

from kvsift.kernels.int4_weight import Int4Weight, expand_int4_reference
from kvsift.kernels.linear import linear, linear_reference, linear_triton
from kvsift.kernels.rms_norm import rms_norm_reference
from kvsift.kernels.scaled_weight import FP8, ScaledWeight, expand_reference
from kvsift.kernels.skinny_product import Tiling, Weight, choose_tiling, in_registers, on_tensor_cores

SHORT = [dtype for dtype in DTYPES if dtype != torch.float32]  # float32 goes to torch
BLOCK, GROUP = 128, 32
FEW_BITS = ["output", "block", "int4", "int4 zeros"]
KINDS = ["plain", *FEW_BITS]
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
    SIZES += [(4096, 4096), (6144, 4096), (1000, 14336), (77, 80), (28672, 4096), (128256, 4096)]
ALL = ("norm", "bias", "residual")
FUSED = [*((name,) for name in ALL), (), ALL]


def weight_of(kind: str, num_out: int, num_in: int, dtype: torch.dtype, group: int = GROUP) -> tuple[Weight, Tensor]:
    """A random weight, and what it stands for in float64; one of 4 bits has whole groups of inputs."""
    torch.manual_seed(num_out + num_in)
    if kind == "plain":
        weight = (torch.randn(num_out, num_in) / num_in**0.5).to(DEVICE, dtype)
        return weight, weight.double()
    if kind in ("output", "block"):
        # of all sizes, those below the smallest normal one among them, and scales that differ by much
        values = (torch.randn(num_out, num_in) * 2.0 ** torch.randint(-9, 4, (num_out, num_in))).to(FP8)
        outs, ins = (1, num_in) if kind == "output" else (BLOCK, BLOCK)
        scales = torch.rand(-(-num_out // outs), -(-num_in // ins)) / num_in**0.5 + 1e-3
        scaled = ScaledWeight(values.to(DEVICE), scales.to(DEVICE), outs, ins)
        return scaled, expand_reference(scaled, torch.float64)
    codes = torch.randint(0, 16, (num_out, -(-num_in // group) * group), dtype=torch.uint8)
    scales = (torch.rand(num_out, codes.shape[1] // group) / num_in**0.5 + 1e-3).half()
    zeros = torch.randint(0, 17, scales.shape, dtype=torch.uint8) if kind == "int4 zeros" else None  # 16 is GPTQ's
    zeros = None if zeros is None else zeros.to(DEVICE).t().contiguous().t()  # as AWQ's and GPTQ's files have them
    packed = Int4Weight.of(codes.to(DEVICE), scales.to(DEVICE), zeros, group)
    return packed, expand_int4_reference(packed, torch.float64)


def draw(rows: int, num_out: int, num_in: int, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    x = torch.randn(rows, num_in)
    x[:, 0] *= 30  # residual streams have such channels
    bias, residual, norm = torch.randn(num_out), torch.randn(rows, num_out), torch.rand(num_in) + 0.5
    x, bias, residual, norm = (t.to(DEVICE, dtype) for t in (x, bias, residual, norm))
    norms = norm, 1e-5, float(num_out % 2)  # some have an offset
    return x, {"bias": bias, "residual": residual, "norm": norms}


def exactly(x: Tensor, exact: Tensor, how: dict[str, Any]) -> Tensor:
    """Everything in float64."""
    x = x.double()
    if "norm" in how:
        norm, eps, offset = how["norm"]
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (norm.double() + offset)
    return x @ exact.T + sum(how[name].double() for name in ("bias", "residual") if name in how)


def check(twin: Tensor, x: Tensor, weight: Weight, exact: Tensor, how: dict[str, Any]) -> None:
    expected, own = exactly(x, exact, how), linear_reference(x, weight, **how)
    assert twin.dtype == x.dtype
    floor = torch.finfo(torch.float32).eps * float(expected.norm())
    step = torch.finfo(x.dtype).eps * float(expected.abs().max())  # of few outputs, all may be rounded luckily
    assert distance(twin, expected) <= 2 * max(distance(own, expected), floor) + step


@needs_triton
@crossed(case=CASES, kind=KINDS, fused=FUSED, dtype=SHORT)
def test_the_twin_is_as_near_to_the_exact_product_as_the_reference(
    case: tuple[int, int, int, Tiling], kind: str, fused: tuple[str, ...], dtype: torch.dtype
) -> None:
    rows, num_out, num_in, tiling = case
    weight, exact = weight_of(kind, num_out, num_in, dtype)
    x, how = draw(rows, *weight.shape, dtype)
    how = {name: how[name] for name in fused}
    if tiling.dot and kind not in ("plain", "output"):  # a tile is within one block of inputs
        tiling = tiling._replace(ins=gcd(tiling.ins, BLOCK if kind == "block" else GROUP))
    check(linear_triton(x, weight, tiling=tiling, **how), x, weight, exact, how)


@needs_triton
@crossed(size=[(64, 1100), *SIZES], rows=[1, 2, 19], kind=KINDS, dtype=SHORT)
def test_the_chosen_tilings_are_right(size: tuple[int, int], rows: int, kind: str, dtype: torch.dtype) -> None:
    weight, exact = weight_of(kind, *size, dtype)
    x, how = draw(rows, *weight.shape, dtype)
    check(linear_triton(x, weight, **how), x, weight, exact, how)


@needs_triton
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 32), st.integers(1, 150), st.integers(1, 300), st.sampled_from(KINDS), st.sampled_from([32, 64, 128])
)
def test_they_are_right_for_any_size_and_group(rows: int, num_out: int, num_in: int, kind: str, group: int) -> None:
    weight, exact = weight_of(kind, num_out, num_in, SHORT[0], group)
    x, how = draw(rows, *weight.shape, SHORT[0])
    check(linear_triton(x, weight, **how), x, weight, exact, how)


@needs_triton
@crossed(size=SIZES, rows=[1, 5, 20], kind=FEW_BITS, dtype=SHORT)
def test_gates_are_multiplied_by_their_own_scales(
    size: tuple[int, int], rows: int, kind: str, dtype: torch.dtype
) -> None:
    num_out, num_in = size
    inter = num_out // 2 // BLOCK * BLOCK or num_out
    weight, exact = weight_of(kind, 2 * inter, num_in, dtype)
    if isinstance(weight, ScaledWeight):
        weight = weight.finer(gcd(weight.outs, inter))
    x, how = draw(rows, *weight.shape, dtype)
    found, own = (run(x, weight, norm=how["norm"], gated=True) for run in (linear_triton, linear_reference))
    gate, up = exactly(x, exact, {"norm": how["norm"]}).chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    assert distance(found, expected) <= 2 * distance(own, expected)


@needs_triton
@pytest.mark.parametrize(("size", "kind"), in_turns(SIZES, KINDS), ids=str)
def test_a_steady_row_has_the_same_bits_beside_any_others(size: tuple[int, int], kind: str) -> None:
    weight, _ = weight_of(kind, *size, SHORT[0])
    x, how = draw(32, *weight.shape, SHORT[0])
    residual = how.pop("residual")
    together = linear_triton(x, weight, residual=residual, steady=True, **how)
    for rows in (1, 5, 16, 17):
        some = linear_triton(x[:rows], weight, residual=residual[:rows], steady=True, **how)
        assert torch.equal(some, together[:rows]), rows


@needs_triton
def test_rows_and_weights_may_be_parts_of_something_wider() -> None:
    (weight, exact), (x, how) = weight_of("plain", 24, 128, SHORT[0]), draw(2, 24, 128, SHORT[0])
    x, weight, exact = x[:, :64], weight[:, 64:], exact[:, 64:]  # type: ignore[index]
    assert not x.is_contiguous()
    how = {"residual": how["residual"][:, :24]}
    check(linear_triton(x, weight, **how), x, weight, exact, how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_any_rows_and_dtype_are_answered(rows: int, kind: str, dtype: torch.dtype) -> None:
    weight, exact = weight_of(kind, 24, 64, dtype)
    x, how = draw(rows, 24, 64, dtype)
    check(linear(x, weight, **how), x, weight, exact, how)
    gates = linear(x, weight.finer(4) if kind == "block" else weight, norm=how["norm"], gated=True)  # type: ignore[union-attr]
    own = linear_reference(x, weight, norm=how["norm"], gated=True)
    torch.testing.assert_close(gates, own, rtol=0.02, atol=0.05)


def test_the_reference_is_a_norm_a_linear_layer_and_a_sum() -> None:
    (weight, _), (x, how) = weight_of("plain", 24, 64, torch.bfloat16), draw(3, 24, 64, torch.bfloat16)
    normal = rms_norm_reference(x, *how["norm"])
    expected = how["residual"] + torch.nn.functional.linear(normal, weight, how["bias"])  # type: ignore[arg-type]
    assert torch.equal(linear_reference(x, weight, **how), expected)


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 64), (4096, 14336), (128256, 4096)])
def test_tiles_are_powers_of_two(num_out: int, num_in: int, rows: int) -> None:
    tiling = choose_tiling(num_out, num_in, rows)
    assert tiling.dot or rows == 1, "only tensor cores take several rows"
    for number in (tiling.outs, tiling.ins, tiling.num_warps, tiling.prefetch):
        assert number & (number - 1) == 0
