"""Linear layers of experts: the product of each row with the weights of its expert, as near as the reference."""

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, crossed, needs_triton
from kernels.paged_cases import distance
from torch import Tensor

from kvsift.kernels.expert_linear import expert_linear_reference, expert_linear_triton

SIZES = [(1, 40, 300), (8, 33, 256), (6, 16, 7)]  # (top_k, out, in): tiles that are full, and some that are not
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


@needs_triton
@pytest.mark.skipif(DEVICE == "cpu", reason="needs the memory of a GPU")
def test_offsets_of_far_experts_do_not_wrap() -> None:
    weight = torch.zeros(5, 1 << 15, 1 << 14, device=DEVICE, dtype=torch.float16)  # 5.4 GB
    weight[4, -1] = 1
    x = torch.ones(1, 1 << 14, device=DEVICE, dtype=torch.float16)
    assert expert_linear_triton(x, weight, torch.tensor([4], device=DEVICE))[0, -1] == 1 << 14
