"""Linear layers on a few rows: any size, with whatever is fused, as near to float32 as torch in the same dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, needs_triton
from kernels.paged_cases import distance
from torch import Tensor

from kvsift.kernels.linear import linear, linear_reference, linear_triton
from kvsift.kernels.rms_norm import rms_norm_reference
from kvsift.kernels.skinny_product import Tiling, choose_tiling, in_registers, on_tensor_cores

SHORT = [dtype for dtype in DTYPES if dtype != torch.float32]  # float32 goes to torch

CASES = [  # (rows, out, in, tiling)
    (1, 32, 512, in_registers(4, 1, 2)),  # everything fits
    (1, 37, 300, in_registers(8, 1, 1)),  # outputs and inputs that stick out of the last tile
    (1, 3, 40, in_registers(4, 1, 2)),  # less than a tile
    (3, 40, 96, on_tensor_cores(16, 32, 4, 3)),
    (16, 21, 50, on_tensor_cores(16, 32, 4, 2)),
    (32, 40, 96, on_tensor_cores(32, 32, 4, 3)),
]
CHOSEN = [(1, 64, 1100), (2, 40, 300), (16, 33, 256), (19, 33, 256)]
if DEVICE == "cuda":
    SIZES = [(4096, 4096), (6144, 4096), (1000, 14336), (77, 80), (128256, 4096)]
    CHOSEN = [(rows, *size) for rows in (1, 2, 3, 8, 16, 32) for size in SIZES]


def draw(rows: int, num_out: int, num_in: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
    torch.manual_seed(rows + num_out + num_in)
    x, weight = torch.randn(rows, num_in), torch.randn(num_out, num_in) / num_in**0.5
    x[:, 0] *= 30  # residual streams have such channels
    bias, residual, norm = torch.randn(num_out), torch.randn(rows, num_out), torch.rand(num_in) + 0.5
    x, weight, bias, residual, norm = (t.to(DEVICE, dtype) for t in (x, weight, bias, residual, norm))
    return x, weight, {"bias": bias, "residual": residual, "norm": (norm, 1e-5)}


def exactly(x: Tensor, weight: Tensor, how: dict[str, Any]) -> Tensor:
    """Everything in float64."""
    x, weight = x.double(), weight.double()
    if "norm" in how:
        norm, eps = how["norm"]
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()
    return x @ weight.T + sum(how[name].double() for name in ("bias", "residual") if name in how)


def check(twin: Tensor, x: Tensor, weight: Tensor, how: dict[str, Any]) -> None:
    exact, own = exactly(x, weight, how), linear_reference(x, weight, **how)
    assert twin.dtype == x.dtype
    floor = torch.finfo(torch.float32).eps * float(exact.norm())
    assert distance(twin, exact) <= 2 * max(distance(own, exact), floor)


@needs_triton
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("fused", [(), ("bias",), ("norm",), ("residual",), ("norm", "bias", "residual")], ids=str)
@pytest.mark.parametrize(("rows", "num_out", "num_in", "tiling"), CASES)
def test_the_twin_is_as_near_to_the_exact_product_as_torch(
    rows: int, num_out: int, num_in: int, tiling: Tiling, fused: tuple[str, ...], dtype: torch.dtype
) -> None:
    x, weight, how = draw(rows, num_out, num_in, dtype)
    how = {name: how[name] for name in fused}
    check(linear_triton(x, weight, tiling=tiling, **how), x, weight, how)


@needs_triton
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize(("rows", "num_out", "num_in"), CHOSEN)
def test_the_chosen_tilings_are_right_for_any_size(rows: int, num_out: int, num_in: int, dtype: torch.dtype) -> None:
    x, weight, how = draw(rows, num_out, num_in, dtype)
    check(linear_triton(x, weight, **how), x, weight, how)


@needs_triton
@pytest.mark.parametrize(("num_out", "num_in"), sorted({chosen[1:] for chosen in CHOSEN}))
def test_a_steady_row_has_the_same_bits_beside_any_others(num_out: int, num_in: int) -> None:
    x, weight, how = draw(32, num_out, num_in, SHORT[0])
    residual = how.pop("residual")
    together = linear_triton(x, weight, residual=residual, steady=True, **how)
    for rows in (1, 5, 16, 17):
        some = linear_triton(x[:rows], weight, residual=residual[:rows], steady=True, **how)
        assert torch.equal(some, together[:rows]), rows


@needs_triton
def test_rows_and_weights_may_be_parts_of_something_wider() -> None:
    x, weight, how = draw(2, 24, 128, SHORT[0])
    x, weight, residual = x[:, :64], weight[:, 64:], how["residual"][:, :24]
    assert not x.is_contiguous()
    check(linear_triton(x, weight, residual=residual), x, weight, {"residual": residual})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_any_rows_and_dtype_are_answered(rows: int, dtype: torch.dtype) -> None:
    x, weight, how = draw(rows, 24, 64, dtype)
    check(linear(x, weight, **how), x, weight, how)


def test_the_reference_is_a_norm_a_linear_layer_and_a_sum() -> None:
    x, weight, how = draw(3, 24, 64, torch.bfloat16)
    normal = rms_norm_reference(x, *how["norm"])
    expected = how["residual"] + torch.nn.functional.linear(normal, weight, how["bias"])
    assert torch.equal(linear_reference(x, weight, **how), expected)


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 64), (4096, 14336), (128256, 4096)])
def test_tiles_are_powers_of_two(num_out: int, num_in: int, rows: int) -> None:
    tiling = choose_tiling(num_out, num_in, rows)
    assert tiling.dot or rows == 1, "only tensor cores take several rows"
    for number in (tiling.outs, tiling.ins, tiling.num_warps, tiling.prefetch):
        assert number & (number - 1) == 0
