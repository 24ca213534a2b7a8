"""Packed GGUF tensors as packed matrices, against the dequantisation of the gguf package."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsift import native
from kvsift.gguf_file import GgufTensor
from kvsift.models.hf.gguf_codes import TYPES, packed_matrix
from kvsift.native.packed import packed_product

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled core is missing")
PACKED = [Kind(number) for number in TYPES]
BITS = {"Q4_0": 4.5, "Q4_1": 5, "Q4_K": 5, "IQ4_NL": 4.5, "IQ4_XS": 4.5, "MXFP4": 4.5,
        "Q5_0": 8.5, "Q5_1": 9, "Q8_0": 8.5, "Q5_K": 9, "Q6_K": 9}  # fmt: skip
SCALES = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}  # where blocks have float16


def random_tensor(kind: Kind, num_out: int, num_in: int, seed: int) -> GgufTensor:
    """Any codes, and scales as weights have them."""
    drawn, (block, block_bytes) = np.random.default_rng(seed), GGML_QUANT_SIZES[kind]
    packed = drawn.integers(0, 256, (num_out * num_in // block, block_bytes), dtype=np.uint8)
    for at in SCALES.get(kind.name, (0,)):
        packed[:, at : at + 2] = drawn.normal(0, 0.01, (len(packed), 1)).astype(np.float16).view(np.uint8)
    if kind == Kind.MXFP4:
        packed[:, 0] = drawn.integers(110, 130, len(packed))
    return GgufTensor(kind.value, (num_out, num_in), packed.reshape(num_out, -1))


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
@settings(max_examples=8)
@given(num_out=st.integers(1, 40), num_wide=st.sampled_from([1, 8]), rows=st.integers(1, 9), seed=st.integers(0, 99))
def test_products_are_as_near_to_the_expanded_weights_as_inputs_in_8_bits(
    kind: Kind, num_out: int, num_wide: int, rows: int, seed: int
) -> None:
    """Widths of 256 and 2,048, or 32 and 256 where blocks are that small."""
    num_in = num_wide * GGML_QUANT_SIZES[kind][0]
    tensor = random_tensor(kind, num_out, num_in, seed)
    matrix = packed_matrix(tensor)
    assert matrix.shape == tensor.shape
    assert matrix.tiles.numel() * 8 == BITS[kind.name] * -(-num_out // 16) * 16 * num_in
    weights = torch.from_numpy(tensor.expand(0, num_out)).double()
    found = matrix.rows(torch.arange(num_out), torch.float32).double()
    # scales and minima are rounded to float16: no more than 2^-11 of the largest terms of a block
    terms = 2 * weights.unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1) + 0.01 * 64 * (
        kind.name in SCALES
    )
    assert ((found - weights).abs() <= 2.0**-11 * terms).all()
    if not kind.name.endswith(("_K", "_XS")):  # their scales are products
        torch.testing.assert_close(found, weights, rtol=1e-6, atol=1e-9)
    x = torch.randn(rows, num_in, generator=torch.Generator().manual_seed(seed)).double()
    steps = (x.unflatten(1, (-1, 32)).abs().amax(2) / 254).repeat_interleave(32, 1)  # halves
    bound = 1.001 * (steps @ found.abs().T + x.abs() @ (found - weights).abs().T) + 1e-5 * (x.abs() @ found.abs().T)
    products = packed_product(x.float(), [matrix]).double()
    assert ((products - x @ weights.T).abs() <= bound).all()


@pytest.mark.parametrize(
    "kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.MXFP4], ids=lambda kind: kind.name
)
def test_quantised_weights_are_multiplied_within_a_percent(kind: Kind) -> None:
    weights = np.random.default_rng(0).normal(0, 0.02, (64, 512)).astype(np.float32)
    packed = gguf.quantize(weights, kind)
    matrix = packed_matrix(GgufTensor(kind.value, weights.shape, packed))
    assert matrix is not None
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(1))
    exact = x @ torch.from_numpy(gguf.dequantize(packed, kind)).T
    assert (packed_product(x, [matrix]) - exact).norm() < 0.01 * exact.norm()


def test_damaged_scales_and_other_types_are_left_to_be_expanded() -> None:
    damaged = random_tensor(Kind.Q4_K, 20, 256, 0)
    damaged.packed[7, :2] = 0xFF  # NaN
    assert packed_matrix(damaged) is None
    values = np.ones((4, 32), np.float32)
    assert packed_matrix(GgufTensor(0, values.shape, values.view(np.uint8))) is None
    assert packed_matrix(GgufTensor(Kind.Q8_0.value, (1, 4, 32), gguf.quantize(values, Kind.Q8_0))) is None
