"""Products with packed weights, against float64 of the same weights and rounded inputs."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from kvsift import native
from kvsift.native.memory import HugeRoom
from kvsift.native.packed import PackedCodes, PackedMatrix, packed_product
from kvsift.native.product import product

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled core is missing")
KINDS = ["4", "4 affine", "4 in a row", "4 affine in a row", "8", "8 affine", "8 halves"]


def drawn_codes(kind: str, num_out: int, num_in: int, seed: int = 0) -> PackedCodes:
    drawn, num_blocks = np.random.default_rng(seed), num_in // 32
    table = drawn.permutation(256)[:16].astype(np.uint8) if "4" in kind else None
    if "in a row" in kind:  # as most formats have them, from any number on
        table = (np.arange(16) + drawn.integers(0, 241)).astype(np.uint8)
    codes = drawn.integers(0, 256 if table is None else 16, (num_out, num_in)).astype(np.uint8)
    scales = drawn.normal(0, 1e-3, (num_out, num_blocks * (2 if "halves" in kind else 1)))
    minima = drawn.normal(0, 0.1, (num_out, num_blocks)) if "affine" in kind else None
    numbers = [None if each is None else each.astype(np.float16).astype(np.float32) for each in (scales, minima)]
    assert numbers[0] is not None
    return PackedCodes(codes, numbers[0], numbers[1], table)


def matrix_of(codes: PackedCodes) -> PackedMatrix:
    matrix = PackedMatrix.of([codes])
    assert matrix is not None
    return matrix


def drawn_matrix(kind: str, num_out: int, num_in: int, seed: int = 0) -> PackedMatrix:
    return matrix_of(drawn_codes(kind, num_out, num_in, seed))


def expanded(codes: PackedCodes) -> torch.Tensor:
    """The weights in float64, [out, in]."""
    weights = (codes.codes if codes.table is None else codes.table[codes.codes]).astype(np.float64) - 128
    per_scale = weights.shape[1] // codes.scales.shape[1]
    weights *= np.repeat(codes.scales, per_scale, 1)
    return torch.from_numpy(weights if codes.minima is None else weights + np.repeat(codes.minima, 32, 1))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Inputs as the products take them, in float64."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    whole = torch.where(scale > 0, (blocks * (1 / scale)).round(), 0)
    return (whole.double() * scale.double()).flatten(-2)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(rows=st.integers(1, 21), num_out=st.integers(1, 70), num_blocks=st.integers(1, 9), seed=st.integers(0, 99))
def test_products_are_those_of_the_weights_and_the_rounded_inputs(
    kind: str, rows: int, num_out: int, num_blocks: int, seed: int
) -> None:
    codes, x = drawn_codes(kind, num_out, 32 * num_blocks, seed), draw(rows, 32 * num_blocks, seed=seed)
    matrix, weights = matrix_of(codes), expanded(codes)
    torch.testing.assert_close(
        matrix.rows(torch.arange(num_out), torch.float32).double(), weights, rtol=1e-6, atol=1e-7
    )
    found = packed_product(x, [matrix]).double()
    sizes = rounded(x).abs() @ weights.abs().T  # each product and sum is rounded by at most 2^-24 of it
    assert ((found - rounded(x) @ weights.T).abs() <= 2**-20 * sizes + 1e-30).all()
    exact = x.double() @ weights.T
    halves_of_steps = (
        (x.double().abs().unflatten(-1, (-1, 32)).amax(-1, keepdim=True) / 254).expand(-1, -1, 32).flatten(-2)
    )
    assert ((found - exact).abs() <= 1.0001 * halves_of_steps @ weights.abs().T + 2**-20 * sizes + 1e-30).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_all_products(kind: str) -> None:
    """Alone and together, with any number of threads, under every instruction set, beside other matrices."""
    parts, x = [drawn_matrix(kind, 50, 160), drawn_matrix("8", 30, 160, seed=1)], draw(150, 160).bfloat16()
    before, found = native.level(), []
    try:
        for level in native.levels():
            native.use_level(level)
            found.append(packed_product(x, parts, threads=3))
            assert torch.equal(found[-1], found[0])
    finally:
        native.use_level(before)
    assert torch.equal(found[0], packed_product(x, parts, threads=1))
    for start, count in ((0, 1), (3, 2), (7, 9), (140, 10)):
        assert torch.equal(packed_product(x[start : start + count], parts), found[0][start : start + count])
    assert torch.equal(packed_product(x, parts[1:]), found[0][:, 50:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_norms_biases_residuals_and_gates_are_those_of_plain_products(
    dtype: torch.dtype, gated: bool, level: str
) -> None:
    """Of whole numbers that 8 bits hold, so that nothing is rounded otherwise."""
    ones = [
        PackedCodes(np.full((48, 64), 128 + scale, np.uint8), np.full((48, 2), 0.25, np.float32)) for scale in (1, 3)
    ]
    parts = [matrix_of(each) for each in ones]
    weight = torch.cat([torch.from_numpy(each.codes.astype(np.float32) - 128) * 0.25 for each in ones]).to(dtype)
    x, bias = torch.full((11, 64), 1.5, dtype=dtype), draw(96).to(dtype)
    norm, residual = (torch.ones(64, dtype=dtype), 1e-6), None if gated else draw(11, 96).to(dtype)
    found = packed_product(x, parts, bias, norm=norm, residual=residual, gated=gated)
    expected = product(x, weight, bias, norm=norm, residual=residual, gated=gated)
    torch.testing.assert_close(found, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert packed_product(x[:0], parts).shape == (0, 96)


def test_inputs_that_are_not_finite_give_no_numbers_and_zeros_give_the_bias(level: str) -> None:
    matrix, x = drawn_matrix("4 affine", 20, 96), draw(4, 96)
    x[1, 40], x[2, 95], x[3] = torch.inf, torch.nan, 0
    found = packed_product(x, [matrix], torch.ones(20))
    assert found[0].isfinite().all()
    assert found[1:3].isnan().all()
    assert (found[3] == 1).all()


@pytest.mark.parametrize("scale", [np.inf, np.nan, 1e30, -70_000, 2**-26])
def test_scales_that_float16_does_not_hold_are_not_packed(scale: float) -> None:
    codes = drawn_codes("4 affine", 20, 96)
    codes.scales[3, 1] = scale
    if 0 < scale < 1:
        codes.scales[:] = scale  # all of them
    assert PackedMatrix.of([codes]) is None
    fine = drawn_codes("4 affine", 20, 96)
    fine.scales[3, 1] = 2.0**-100  # as good as 0: the scale of a block of zeros in MXFP4
    fine.scales[4, 1] = 2.0**-26  # as good as 0 beside the others
    assert fine.tiles() is not None


def test_matrices_are_copied_and_pickled_with_their_weights() -> None:
    matrix, x = drawn_matrix("8 halves", 20, 96), draw(2, 96)
    expected = packed_product(x, [matrix])
    for again in (copy.deepcopy(matrix), pickle.loads(pickle.dumps(matrix))):
        matrix.tiles.zero_() if again.tiles.data_ptr() == matrix.tiles.data_ptr() else None
        assert torch.equal(packed_product(x, [again]), expected)
    with refused("invalid_value: rows 3 to 20"):
        matrix.rows(torch.tensor([3, 20]), torch.float32)


def test_a_matrix_in_a_room_is_pickled_without_the_others() -> None:
    codes, x = drawn_codes("4 affine", 20, 96), draw(2, 96)
    alone, in_room = PackedMatrix.of([codes]), PackedMatrix.of([codes], HugeRoom())
    assert alone is not None
    assert in_room is not None
    assert torch.equal(packed_product(x, [in_room]), packed_product(x, [alone]))
    assert len(pickle.dumps(in_room)) == len(pickle.dumps(alone))
