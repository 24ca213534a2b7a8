"""Weights of 4 bits: as near to the exact product as the expanded weights, with and without zero points."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels.conftest import DEVICE, DTYPES, needs_triton
from kernels.paged_cases import distance
from kernels.test_scaled_weight import draw
from torch import Tensor

from kvsift.kernels.gated_linear import gated_linear_reference, gated_linear_triton
from kvsift.kernels.int4_weight import Int4Weight, expand_int4_reference, expand_int4_triton
from kvsift.kernels.linear import linear, linear_reference, linear_triton
from kvsift.kernels.skinny_product import choose_int4_tiling, takes_weight

SHORT = [dtype for dtype in DTYPES if dtype != torch.float32]
SHAPES = [(40, 320, 32), (33, 256, 128), (200, 192, 64), (24, 384, 384)]  # (out, in, group)
if DEVICE == "cuda":
    SHAPES += [(4096, 4096, 128), (6144, 4096, 32), (4096, 14336, 128), (28672, 4096, 128)]


def packed(num_out: int, num_in: int, ins: int, has_zeros: bool = True) -> tuple[Int4Weight, Tensor]:
    """A weight, and what it stands for in float64."""
    torch.manual_seed(num_out + num_in)
    codes = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8)
    scales = (torch.rand(num_out, num_in // ins) / num_in**0.5 + 1e-3).half()
    zeros = torch.randint(0, 17, scales.shape, dtype=torch.uint8) if has_zeros else None  # 16 is possible in GPTQ
    exact = codes.double() - (8 if zeros is None else zeros.double().repeat_interleave(ins, 1))
    weight = Int4Weight.of(codes.to(DEVICE), scales.to(DEVICE), None if zeros is None else zeros.to(DEVICE), ins)
    return weight, (exact * scales.double().repeat_interleave(ins, 1)).to(DEVICE)


def check(found: Tensor, own: Tensor, exact: Tensor) -> None:
    assert distance(found, exact) <= 2 * max(distance(own, exact), torch.finfo(torch.float32).eps * float(exact.norm()))


def exactly(x: Tensor, weight: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + norm[1]).sqrt() * norm[0].double() @ weight.T


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_stand_for_multiples_of_their_scale(shape: tuple[int, int, int], has_zeros: bool) -> None:
    weight, exact = packed(*shape, has_zeros)
    assert weight.shape == shape[:2]
    assert torch.equal(expand_int4_reference(weight, torch.float64), exact)


@needs_triton
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_expanded_weights_are_rounded_once(shape: tuple[int, int, int], has_zeros: bool, dtype: torch.dtype) -> None:
    weight, exact = packed(*shape, has_zeros)
    assert torch.equal(expand_int4_triton(weight, dtype), exact.float().to(dtype))


@needs_triton
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_twin_is_as_near_to_the_exact_product_as_expanded_weights(
    shape: tuple[int, int, int], rows: int, has_zeros: bool, dtype: torch.dtype
) -> None:
    weight, exact = packed(*shape, has_zeros)
    x, how = draw(rows, weight, dtype)
    expected = exactly(x, exact, how["norm"]) + how["bias"].double() + how["residual"].double()
    check(linear_triton(x, weight, **how), linear_reference(x, weight, **how), expected)


@needs_triton
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 32), st.integers(1, 150), st.integers(1, 6), st.sampled_from([32, 64, 128]), st.booleans())
def test_any_number_of_rows_outputs_and_groups(rows: int, num_out: int, groups: int, ins: int, has_zeros: bool) -> None:
    weight, exact = packed(num_out, groups * ins, ins, has_zeros)
    x, how = draw(rows, weight, SHORT[0])
    expected = exactly(x, exact, how["norm"])
    check(linear_triton(x, weight, norm=how["norm"]), linear_reference(x, weight, norm=how["norm"]), expected)


@needs_triton
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_gates_are_multiplied(rows: int, has_zeros: bool) -> None:
    weight, exact = packed(78, 256, 64, has_zeros)
    x, how = draw(rows, weight, SHORT[0])
    gate, up = exactly(x, exact, how["norm"]).chunk(2, -1)
    found, own = (run(x, weight, norm=how["norm"]) for run in (gated_linear_triton, gated_linear_reference))
    check(found, own, torch.nn.functional.silu(gate) * up)


@needs_triton
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_steady_row_has_the_same_bits_beside_any_others(shape: tuple[int, int, int], has_zeros: bool) -> None:
    weight, _ = packed(*shape, has_zeros)
    x, how = draw(32, weight, SHORT[0])
    residual = how.pop("residual")
    together = linear_triton(x, weight, residual=residual, steady=True, **how)
    for rows in (1, 5, 16, 17):
        some = linear_triton(x[:rows], weight, residual=residual[:rows], steady=True, **how)
        assert torch.equal(some, together[:rows]), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 40])
def test_any_rows_and_dtype_are_answered(rows: int, dtype: torch.dtype) -> None:
    weight, exact = packed(24, 64, 32)
    x, how = draw(rows, weight, dtype)
    found, own = (run(x, weight, norm=how["norm"]) for run in (linear, linear_reference))
    check(found, own, exactly(x, exact, how["norm"]))


def test_groups_of_whole_tiles_and_rows_of_16_bits_are_taken() -> None:
    weight, _ = packed(8, 96, 32)
    assert takes_weight(weight, torch.bfloat16)
    assert not takes_weight(weight, torch.float32)
    assert not takes_weight(packed(8, 96, 48)[0], torch.bfloat16)
    for rows in (1, 2, 32):
        tiling = choose_int4_tiling(weight, rows)
        assert not tiling.dot or tiling.ins == 32
