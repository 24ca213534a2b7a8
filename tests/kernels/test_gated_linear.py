"""Gate, up and their product in one launch, rounded where transformers' MLP rounds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, far_memory, needs_triton
from kernels.paged_cases import distance
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from kvsift.kernels.linear import _gate_kernel, gate_triton, linear, linear_reference, linear_triton
from kvsift.kernels.skinny_product import Tiling, in_registers, on_tensor_cores

SHORT = [dtype for dtype in DTYPES if dtype != torch.float32]  # float32 goes to torch

CASES: list[tuple[int, int, int, Tiling | None]] = [  # (rows, inter, in, tiling)
    (1, 16, 512, in_registers(4, 1, 2)),  # everything fits
    (1, 13, 300, in_registers(8, 1, 1)),  # gates that stick out of the last tile must not become ups
    (3, 20, 96, on_tensor_cores(16, 32, 4, 3)),
    (16, 21, 50, None),
    (20, 21, 50, None),
    (1, 21, 50, None),
]
if DEVICE == "cuda":
    CASES += [(rows, 14336, 4096, None) for rows in (1, 2, 8, 16, 32)]


def draw(rows: int, inter: int, num_in: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Tensor, float]]:
    torch.manual_seed(rows + inter + num_in)
    x, weight, norm = torch.randn(rows, num_in), torch.randn(2 * inter, num_in) / num_in**0.5, torch.rand(num_in) + 0.5
    return x.to(DEVICE, dtype), 2 * weight.to(DEVICE, dtype), (norm.to(DEVICE, dtype), 1e-5)


def exactly(x: Tensor, gate_up: Tensor, how: dict[str, Any]) -> Tensor:
    """Everything in float64."""
    x = x.double()
    if how.get("norm"):
        norm, eps = how["norm"]
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()
    gate, up = (x @ gate_up.double().T).chunk(2, -1)
    active = torch.nn.functional.gelu(gate, approximate="tanh") if how.get("gelu") else torch.nn.functional.silu(gate)
    return active * up


@needs_triton
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
@pytest.mark.parametrize(("rows", "inter", "num_in", "tiling"), CASES)
def test_the_twin_is_as_near_to_the_exact_product_as_torch(
    rows: int, inter: int, num_in: int, tiling: Tiling | None, gelu: bool, normed: bool, dtype: torch.dtype
) -> None:
    x, gate_up, norm = draw(rows, inter, num_in, dtype)
    how: dict[str, Any] = {"norm": norm if normed else None, "gelu": gelu}
    twin = linear_triton(x, gate_up, gated=True, tiling=tiling, **how)
    exact, own = exactly(x, gate_up, how), linear_reference(x, gate_up, gated=True, **how)
    assert twin.dtype == dtype
    assert distance(twin, exact) <= 2 * distance(own, exact)


@needs_triton
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
@pytest.mark.parametrize("inter", [40, 1500])  # less than a block, more
def test_the_gate_of_a_finished_product_is_that_of_the_reference(inter: int, gelu: bool, dtype: torch.dtype) -> None:
    x, gate_up, _ = draw(3, inter, 16, dtype)
    exact, own = exactly(x, gate_up, {"gelu": gelu}), linear_reference(x, gate_up, gated=True, gelu=gelu)
    found = gate_triton(torch.nn.functional.linear(x, gate_up), gelu)
    assert found.dtype == dtype
    assert distance(found, exact) <= 2 * distance(own, exact)


@needs_triton
def test_a_gate_that_lies_beyond_32_bits_is_read_where_it_lies(tmp_path: Path) -> None:
    """The first columns of rows that are as long as 75,000 usual ones together."""
    rows, inter = 5, 1 << 28
    gate_up = far_memory(tmp_path, rows * 2 * inter, torch.float16).view(rows, 2, inter)
    gate_up[..., :1024] = torch.randn(rows, 2, 1024, generator=torch.Generator().manual_seed(0)).half()
    (tmp_path / "out").mkdir()
    found = far_memory(tmp_path / "out", rows * inter, torch.float16).view(rows, inter)
    _gate_kernel[(rows, 1)](gate_up, found, inter, BLOCK=1024, GELU=False)
    gate, up = gate_up[..., :1024].unbind(1)
    torch.testing.assert_close(found[:, :1024], torch.nn.functional.silu(gate) * up)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter knows no limit of a grid")
def test_a_chunk_of_more_rows_than_the_second_axis_of_a_grid_holds() -> None:
    """75,000 rows of Llama 3 8B: 2^31 numbers and more."""
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of GPU memory")
    gate_up = torch.randn(75_000, 28_672, dtype=torch.bfloat16, device=DEVICE)
    found = gate_triton(gate_up)
    for row in (0, 65_535, 65_536, 74_999):
        gate, up = gate_up[row].chunk(2)
        torch.testing.assert_close(found[row], torch.nn.functional.silu(gate) * up)


def test_the_reference_is_the_first_half_of_transformers_mlp() -> None:
    x, gate_up, _ = draw(3, 32, 16, torch.bfloat16)
    mlp = LlamaMLP(LlamaConfig(hidden_size=16, intermediate_size=32, num_attention_heads=2)).to(DEVICE, torch.bfloat16)
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data = gate_up.chunk(2)
    assert torch.equal(mlp.down_proj(linear_reference(x, gate_up, gated=True)), mlp(x))
    gemma = Gemma3MLP(Gemma3TextConfig(hidden_size=16, intermediate_size=32)).to(DEVICE, torch.bfloat16)
    gemma.gate_proj.weight.data, gemma.up_proj.weight.data = gate_up.chunk(2)
    assert torch.equal(gemma.down_proj(linear_reference(x, gate_up, gated=True, gelu=True)), gemma(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_any_rows_and_dtype_are_answered(rows: int, gelu: bool, dtype: torch.dtype) -> None:
    x, gate_up, norm = draw(rows, 24, 64, dtype)
    own = linear_reference(x, gate_up, norm=norm, gated=True, gelu=gelu)
    torch.testing.assert_close(linear(x, gate_up, norm=norm, gated=True, gelu=gelu), own, rtol=0.02, atol=0.05)
