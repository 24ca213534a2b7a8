"""Norms, products, rotation and page extremes of the compiled core, against torch."""

from __future__ import annotations

import pytest
import torch

from kvsift import native
from kvsift.kernels.linear import linear_reference
from kvsift.kernels.page_summary import SUMMARIES
from kvsift.kernels.rms_norm import rms_norm_reference
from kvsift.kernels.rotary import _rotate_reference
from kvsift.native.experts import Routing, mix, mix_reference, route, route_reference

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled core is missing")

if native.available():
    from kvsift.native.pages import page_extremes
    from kvsift.native.product import normalised, product, rotate

DTYPES = [torch.bfloat16, torch.float32]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(tensor: torch.Tensor, exact: torch.Tensor) -> float:
    return float((tensor.double() - exact.double()).norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "sizes"), [(1, (512, 96)), (3, (40, 7)), (1, (40, 7)), (3, (1280, 512))], ids=str)
@pytest.mark.parametrize("how", ["plain", "norm", "bias", "residual", "all", "gated"])
def test_products_are_as_near_to_float64_as_torchs(
    dtype: torch.dtype, rows: int, sizes: tuple[int, int], how: str, level: str
) -> None:
    num_in, num_out = sizes[0], sizes[1] * (2 if how == "gated" else 1)
    x, weight = draw(rows, num_in, dtype=dtype), draw(num_out, num_in, dtype=dtype, seed=1)
    norm = (draw(num_in, dtype=dtype, seed=2), 1e-6) if how in ("norm", "all", "gated") else None
    residual = draw(rows, num_out, dtype=dtype, seed=3) if how in ("residual", "all") else None
    bias = draw(num_out, dtype=dtype, seed=4) if how in ("bias", "all") else None
    found = product(x, weight, bias, norm=norm, residual=residual, gated=how == "gated")

    def reference(to: torch.dtype) -> torch.Tensor:
        wide = None if norm is None else (norm[0].to(to), norm[1])
        if how == "gated":
            return linear_reference(x.to(to), weight.to(to), norm=wide, gated=True)
        added = [None if each is None else each.to(to) for each in (bias, residual)]
        return linear_reference(x.to(to), weight.to(to), added[0], norm=wide, residual=added[1])

    exact = reference(torch.float32 if dtype == torch.bfloat16 else torch.float64)
    floor = 4 * torch.finfo(torch.float32).eps * float(exact.norm())
    assert found.dtype == dtype
    assert distance(found, exact) <= 2 * max(distance(reference(dtype), exact), floor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_of_gelu_and_norms_with_an_offset_are_as_near_to_float64_as_torchs(
    dtype: torch.dtype, level: str
) -> None:
    x, weight = draw(3, 96, dtype=dtype), draw(74, 96, dtype=dtype, seed=1) * 0.3
    norm = draw(96, dtype=dtype, seed=2), 1e-6, 1.0

    def reference(to: torch.dtype) -> torch.Tensor:
        normal = rms_norm_reference(x.to(to), norm[0].to(to), *norm[1:])
        gate, up = (normal @ weight.to(to).T).chunk(2, -1)
        return torch.nn.functional.gelu(gate, approximate="tanh") * up

    found = product(x, weight, norm=norm, gated=True, gelu=True)
    exact = reference(torch.float32 if dtype == torch.bfloat16 else torch.float64)
    floor = 8 * torch.finfo(torch.float32).eps * float(exact.norm())
    assert distance(found, exact) <= 2 * max(distance(reference(dtype), exact), floor)
    assert torch.equal(found, product(normalised(x, norm), weight, gated=True, gelu=True))
    added = normalised(x, norm, x.flip(0))
    torch.testing.assert_close(
        added, x.flip(0) + rms_norm_reference(x, *norm), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", [Routing(1), Routing(3), Routing(7, normalised=False), Routing(3, True, True, 2.5)])
def test_experts_are_chosen_and_mixed_as_in_torch(routing: Routing, dtype: torch.dtype) -> None:
    logits, bias = draw(5, 7, dtype=dtype), draw(7, dtype=torch.float32, seed=1)
    logits[0, 2:4] = logits[0].max() + 1  # of equal ones the first is the better one
    for added in (None, bias):
        chosen, weights = route(logits, routing, added)
        expected = route_reference(logits, routing, added)
        assert torch.equal(chosen, expected[0])
        torch.testing.assert_close(weights, expected[1], rtol=1e-5, atol=1e-7)
    outputs, residual = draw(5, routing.top_k, 33, dtype=dtype), draw(5, 33, dtype=dtype, seed=2)
    for own in (None, residual):
        mixed = mix(outputs, weights, own)
        torch.testing.assert_close(
            mixed, mix_reference(outputs, weights, own), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
        )


def test_logits_of_experts_that_are_not_numbers_choose_some() -> None:
    chosen, _ = route(torch.full((1, 4), torch.nan), Routing(3))
    assert len({*chosen[0].tolist()} & {*range(4)}) == 3


def test_products_do_not_depend_on_the_number_of_threads() -> None:
    x, weight = draw(1, 512, dtype=torch.bfloat16), draw(4096, 512, dtype=torch.bfloat16, seed=1)
    assert torch.equal(product(x, weight, threads=1), product(x, weight, threads=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("normed", "offset"), [(False, 0.0), (True, 0.0), (True, 1.0)])
def test_rotation_is_the_references(dtype: torch.dtype, normed: bool, offset: float) -> None:
    heads, angles = draw(1, 8, 80, dtype=dtype), torch.rand(1, 40).repeat(1, 2) * 6
    cos, sin, norm = angles.cos().to(dtype), angles.sin().to(dtype), draw(80, dtype=dtype, seed=1) if normed else None
    expected = heads.clone()
    _rotate_reference(expected, cos, sin, 6, 1, norm, norm, 1e-6, offset)
    rotate(heads, cos, sin, 6, 1, norm, norm, 1e-6, offset)
    if normed or dtype == torch.float32:  # sums of squares in another order, contracted products
        torch.testing.assert_close(heads, expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
    else:
        assert torch.equal(heads, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extremes_are_torchs_bit_for_bit(dtype: torch.dtype) -> None:
    keys = draw(3, 6, 16, 24, dtype=dtype)[:, 2:5]  # a view whose heads lie apart
    keys[1, 1, 5, 7] = torch.nan
    valid = torch.arange(16).unsqueeze(0) < torch.tensor([[16], [9], [1]])
    for mask in (None, valid):
        expected = SUMMARIES["minmax"].rows(keys, None if mask is None else mask.unsqueeze(-1))
        torch.testing.assert_close(page_extremes(keys, mask), expected, rtol=0, atol=0, equal_nan=True)
