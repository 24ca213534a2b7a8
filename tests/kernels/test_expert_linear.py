"""Linear layers of experts: the product of each row with the weights of its expert, as near as the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.conftest import DEVICE, DTYPES, crossed, needs_triton
from kernels.paged_cases import distance
from torch import Tensor

from kvsift.kernels.expert_linear import expert_linear_reference, expert_linear_triton
from kvsift.kernels.scaled_weight import FP8, ScaledStack, ScaledWeight, expand_reference

SIZES = [(1, 40, 300), (8, 33, 256), (6, 16, 7)]  # (top_k, out, in): tiles that are full, and some that are not
BLOCK = 128
if DEVICE == "cuda":
    SIZES += [(8, 1536, 2048), (8, 2048, 768), (4, 2880, 2880)]


def exactly(x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.double().repeat_interleave(len(experts) // len(x), 0)
    products = (weight.double()[experts] * rows.unsqueeze(1)).sum(2)
    return products if bias is None else products + bias.double()[experts]


@needs_triton
@crossed(size=SIZES, rows=[1, 3], dtype=DTYPES, transposed=[False, True], biased=[False, True])
def test_each_row_is_multiplied_by_its_expert(
    size: tuple[int, int, int], rows: int, dtype: torch.dtype, transposed: bool, biased: bool
) -> None:
    (top_k, num_out, num_in), draw = size, torch.Generator().manual_seed(rows)
    x = torch.randn(rows, num_in, generator=draw).to(DEVICE, dtype)
    weight = (torch.randn(5, num_out, num_in, generator=draw) / num_in**0.5).to(DEVICE, dtype)
    weight = weight.mT.contiguous().mT if transposed else weight
    bias = torch.randn(5, num_out, generator=draw).to(DEVICE, dtype) if biased else None
    experts = torch.randint(0, 5, (rows * top_k,), generator=draw).to(DEVICE)
    exact = exactly(x, weight, experts, bias)
    plain = distance(expert_linear_reference(x, weight, experts, bias), exact)
    assert distance(expert_linear_triton(x, weight, experts, bias), exact) <= max(2 * plain, 1e-6)


def scaled(num_out: int, num_in: int, kind: str, draw: torch.Generator) -> ScaledStack:
    """8-bit floats of five experts, whose scales differ by much."""
    outs, ins = {"output": (1, num_in), "tensor": (num_out, num_in), "block": (BLOCK, BLOCK), "group": (1, BLOCK)}[kind]
    scales = torch.rand(5, -(-num_out // outs), -(-num_in // ins), generator=draw) + 0.01
    values = torch.randn(5, num_out, num_in, generator=draw) / num_in**0.5
    return ScaledStack(values.to(FP8).to(DEVICE), scales.to(DEVICE), outs, ins)


@needs_triton
@crossed(
    size=[*SIZES, (2, 200, 140), (2, 256, 384)], rows=[1, 3], dtype=[each for each in DTYPES if each != torch.float32],
    kind=["output", "tensor", "block", "group"], biased=[False, True],
)  # fmt: skip
def test_weights_of_8_bits_are_multiplied_as_they_lie(
    size: tuple[int, int, int], rows: int, dtype: torch.dtype, kind: str, biased: bool
) -> None:
    (top_k, num_out, num_in), draw = size, torch.Generator().manual_seed(rows)
    x = torch.randn(rows, num_in, generator=draw).to(DEVICE, dtype)
    weight = scaled(num_out, num_in, kind, draw)
    bias = torch.randn(5, num_out, generator=draw).to(DEVICE, dtype) if biased else None
    experts = torch.randint(0, 5, (rows * top_k,), generator=draw).to(DEVICE)
    exact = exactly(x, expand_reference(weight, torch.float64), experts, bias)
    plain = distance(expert_linear_reference(x, weight, experts, bias), exact)
    assert distance(expert_linear_triton(x, weight, experts, bias), exact) <= max(2 * plain, 1e-6)
    assert torch.equal(weight.expanded(dtype), expand_reference(weight, dtype))


@settings(max_examples=40, deadline=None)
@given(
    outs=st.lists(st.integers(1, 9), min_size=1, max_size=2), ins=st.integers(1, 9), seed=st.integers(0, 99),
    block=st.tuples(st.integers(1, 4), st.integers(1, 4)), rows=st.integers(1, 4), top_k=st.integers(1, 3),
)  # fmt: skip
def test_matrices_that_are_joined_are_multiplied_as_each_is_alone(
    outs: list[int], ins: int, seed: int, block: tuple[int, int], rows: int, top_k: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    matrices = [
        [
            ScaledWeight(
                torch.randn(num_out, ins, generator=draw).to(FP8),
                torch.rand(-(-num_out // block[0]), -(-ins // block[1]), generator=draw),
                *block,
            )
            for num_out in outs
        ]
        for _ in range(3)
    ]
    x, experts = torch.randn(rows, ins, generator=draw), torch.randint(0, 3, (rows * top_k,), generator=draw)
    expected = [
        torch.cat([expand_reference(weight, torch.float32) @ x[pair // top_k] for weight in matrices[expert]])
        for pair, expert in enumerate(experts.tolist())
    ]
    stack = ScaledStack.joined(matrices)
    torch.testing.assert_close(expert_linear_reference(x, stack, experts), torch.stack(expected), rtol=1e-5, atol=1e-5)
    rounded = ScaledStack.of(stack.expanded(torch.float32))
    for own, weight in zip(rounded.expanded(torch.float32), stack.expanded(torch.float32)):
        assert torch.equal(own, ScaledWeight.of(weight).expanded(torch.float32))


@needs_triton
@pytest.mark.skipif(DEVICE == "cpu", reason="needs the memory of a GPU")
def test_offsets_of_far_experts_do_not_wrap() -> None:
    weight = torch.zeros(5, 1 << 15, 1 << 14, device=DEVICE, dtype=torch.float16)  # 5.4 GB
    weight[4, -1] = 1
    x = torch.ones(1, 1 << 14, device=DEVICE, dtype=torch.float16)
    assert expert_linear_triton(x, weight, torch.tensor([4], device=DEVICE))[0, -1] == 1 << 14
