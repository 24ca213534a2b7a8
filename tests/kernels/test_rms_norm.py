"""RMS norm: transformers' bits in the reference, and a twin as near to float32."""

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, needs_triton
from kernels.paged_cases import distance
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kvsift.kernels.rms_norm import rms_norm, rms_norm_reference, rms_norm_triton
from kvsift.models.decoder import ROUNDED_ONCE

NORMS = [(LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0), (Gemma4RMSNorm, ROUNDED_ONCE)]


def draw(rows: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows + hidden)
    x, weight = 4 * torch.randn(rows, hidden), torch.rand(hidden) + 0.5
    x[:, 0] = 300.0  # residual streams have such channels
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("module", "offset"), NORMS)
def test_the_reference_is_transformers_bit_for_bit(module: type, offset: float, dtype: torch.dtype) -> None:
    x, weight = draw(3, 96, dtype)
    norm = module(96, eps=1e-5).to(DEVICE)
    norm.weight.data = weight
    assert torch.equal(rms_norm_reference(x, weight, 1e-5, offset=offset), norm(x))
    residual, scale = x.flip(0), torch.full((1,), 0.8, dtype=dtype, device=DEVICE)  # as Gemma4TextDecoderLayer adds
    added = rms_norm_reference(x, weight, 1e-5, offset=offset, residual=residual, scale=float(scale))
    assert torch.equal(added, (residual + norm(x)) * scale)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0, ROUNDED_ONCE])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (3, 100)])  # 100: not a power of two
def test_the_twin_is_as_near_to_float32_as_the_reference(
    rows: int, hidden: int, offset: float, adds: bool, dtype: torch.dtype
) -> None:
    wide, weight = draw(rows, 2 * hidden, dtype)
    x, weight = wide[:, :hidden], weight[:hidden]  # rows of something wider
    residual, how = x.flip(1).contiguous(), {"offset": offset, "scale": 0.8}
    wide_sum = {**how, "residual": residual.float()} if adds else how
    how = {**how, "residual": residual} if adds else how
    exact = rms_norm_reference(x.float(), weight.float(), 1e-5, **wide_sum)
    own = rms_norm_reference(x, weight, 1e-5, **how)
    twin = rms_norm_triton(x, weight, 1e-5, **how)
    assert twin.dtype == dtype
    floor = torch.finfo(torch.float32).eps * float(exact.norm())
    assert distance(twin, exact) <= 2 * max(distance(own, exact), floor)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, **how), own, rtol=0.02, atol=1e-3)
