"""Weights of few bits streamed by CUDA C++: as near to the exact product as the reference, whatever is fused."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels.conftest import DEVICE
from kernels.paged_cases import distance
from kernels.test_linear import BLOCK, check, draw, exactly, weight_of
from turns import in_turns

from kvsift.kernels.cuda_module import have_nvrtc
from kvsift.kernels.int4_weight import Int4Weight
from kvsift.kernels.linear import linear_reference
from kvsift.kernels.scaled_weight import ScaledWeight
from kvsift.kernels.streamed_linear import FEW_ROWS, streamed_linear, streams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not have_nvrtc(), reason="needs a Hopper GPU")]
SHORT = [torch.bfloat16, torch.float16]
SHAPES = [  # (rows, out, in)
    (1, 37, 768),  # outputs that stick out of the last tile, and fewer steps of inputs than warps
    (1, 1024, 14336),
    (1, 128256, 1024),  # as many tiles as a block has room for
    (3, 6144, 4096),
    (4, 77, 1024),
    (4, 4096, 14336),  # fewer stages with codes of 4 bits, for the room of the rows
    (5, 1000, 4224),  # shares of the inputs that differ
    (8, 5120, 17408),
    (8, 128256, 1024),
]


KINDS = [
    "output",
    "block",
    "tensor",
    *(f"{kind} {group}" for kind in ("int4", "int4 zeros") for group in (32, 64, 128)),
]


def weight_in(kind: str, num_out: int, num_in: int) -> tuple[ScaledWeight | Int4Weight, torch.Tensor]:
    """As ``weight_of``; with one scale for all, too, and groups by their size."""
    if kind.startswith("int4"):
        name, group = kind.rsplit(" ", 1)
        return weight_of(name, num_out, num_in, torch.bfloat16, int(group))  # type: ignore[return-value]
    weight, exact = weight_of("block" if kind == "block" else "output", num_out, num_in, torch.bfloat16)
    assert isinstance(weight, ScaledWeight)
    if kind != "tensor":
        return weight, exact
    one = weight.scales[:1].contiguous()
    return ScaledWeight(weight.values, one, num_out, num_in), weight.values.double() * one.double()


def most_rows(kind: str) -> int:
    return 4 if kind.startswith("int4") else 8


CASES = [(kind, shape) for kind in KINDS for shape in SHAPES if shape[0] <= most_rows(kind)]
FUSED = (), ("norm",), ("norm", "bias", "residual")


@pytest.mark.parametrize(("case", "how"), in_turns(CASES, [*product(SHORT, FUSED)]), ids=str)
def test_it_is_as_near_to_the_exact_product_as_the_reference(
    case: tuple[str, tuple[int, int, int]], how: tuple[torch.dtype, tuple[str, ...]]
) -> None:
    (kind, (rows, num_out, num_in)), (dtype, fused) = case, how
    weight, exact = weight_in(kind, num_out, num_in)
    x, more = draw(rows, num_out, num_in, dtype)
    more = {name: more[name] for name in fused}
    assert streams(x, weight)
    check(streamed_linear(x, weight, **more), x, weight, exact, more)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 8), st.integers(1, 5000), st.integers(1, 40), st.sampled_from(KINDS), st.sampled_from(SHORT),
    st.booleans(),
)  # fmt: skip
def test_any_size_is_right(rows: int, num_out: int, steps: int, kind: str, dtype: torch.dtype, norm: bool) -> None:
    weight, exact = weight_in(kind, num_out, 256 * steps)
    x, how = draw(min(rows, most_rows(kind)), num_out, 256 * steps, dtype)
    if not norm:
        del how["norm"]
    check(streamed_linear(x, weight, **how), x, weight, exact, how)


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("kind", ["output", "block", "int4 32", "int4 zeros 128"])
@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize(("inter", "num_in"), [(BLOCK * 3, 256), (20, 768), (14336, 4096), (17408, 5120)])
def test_gates_are_multiplied_by_their_own_scales(
    inter: int, num_in: int, rows: int, kind: str, dtype: torch.dtype
) -> None:
    weight, exact = weight_in(kind, 2 * inter, num_in)
    if kind == "block" and inter % BLOCK:
        weight = weight.finer(4)  # type: ignore[union-attr]
    x, how = draw(min(rows, most_rows(kind)), 2 * inter, num_in, dtype)
    gate, up = exactly(x, exact, {"norm": how["norm"]}).chunk(2, -1)
    for gelu, active in (
        (False, torch.nn.functional.silu(gate)),
        (True, torch.nn.functional.gelu(gate, approximate="tanh")),
    ):
        found, own = (
            run(x, weight, norm=how["norm"], gated=True, gelu=gelu) for run in (streamed_linear, linear_reference)
        )
        assert distance(found, active * up) <= 2 * distance(own, active * up)


@pytest.mark.parametrize("kind", ["output", "block", "int4 32"])
@pytest.mark.parametrize(("num_out", "num_in"), [(5120, 17408), (6144, 5120), (100, 768)])
def test_a_row_has_the_same_bits_beside_others_of_the_same_kernel(num_out: int, num_in: int, kind: str) -> None:
    if kind == "int4 32" and num_in > 5120:
        pytest.skip("its rows have no room")
    weight, _ = weight_in(kind, num_out, num_in)
    x, how = draw(most_rows(kind), num_out, num_in, torch.bfloat16)
    del how["residual"]
    together = streamed_linear(x, weight, **how)
    for rows in range(FEW_ROWS + 1, len(x)):
        assert torch.equal(streamed_linear(x[:rows], weight, **how), together[:rows])
        assert torch.equal(streamed_linear(x[-rows:], weight, **how), together[-rows:])
    if isinstance(weight, ScaledWeight):
        first, pair = streamed_linear(x[:1], weight, **how), streamed_linear(x[:2], weight, **how)
        assert torch.equal(first, pair[:1])


@pytest.mark.parametrize("kind", ["output", "int4 32", "int4 zeros 128"])
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_rows_may_have_any_size(size: float, kind: str) -> None:
    """Numbers beyond float16, whose range is small."""
    weight, exact = weight_in(kind, 64, 512)
    x = (draw(2, 64, 512, torch.float32)[0] * torch.tensor([[size], [1.0]], device=DEVICE)).bfloat16()
    for row, alone in zip(streamed_linear(x, weight), x):
        expected = alone.double() @ exact.T
        assert distance(row, expected) <= 2**-8 * float(expected.norm())


@pytest.mark.parametrize("kind", ["output", "int4 32", "int4 zeros 128"])
@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_a_row_of_zeros_gives_zeros_and_one_without_numbers_none(what: float, kind: str) -> None:
    weight, _ = weight_in(kind, 48, 256)
    x = torch.zeros(2, 256, dtype=torch.bfloat16, device=DEVICE)
    x[1, 5] = what
    found = streamed_linear(x, weight)
    assert not found[0].any()
    assert not found[1].isfinite().any()


def test_other_rows_are_left_to_the_twins() -> None:
    weight, _ = weight_in("output", 48, 256)
    x = torch.zeros(32, 256, dtype=torch.bfloat16, device=DEVICE)
    assert streams(x[:8], weight)
    assert not streams(x[:9], weight)
    assert not streams(x[:5], weight_in("int4 32", 48, 256)[0])
    assert not streams(x[:4].float(), weight)
    assert isinstance(weight, ScaledWeight)
    assert not streams(x[:2, 1:129], ScaledWeight(weight.values[:, :128], weight.scales, 1, 128))
    assert not streams(x[:2], weight_in("int4 96", 48, 288)[0])
