"""Rotation of a chunk in place: the reference against transformers, the twin against the reference."""

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, needs_triton
from kernels.paged_cases import distance
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvsift.kernels import rotary
from kvsift.kernels.rms_norm import rms_norm_reference
from kvsift.kernels.rotary import rotate_heads
from kvsift.native.product import MAX_ROWS

NUM_TOKENS = MAX_ROWS + 1  # more than the compiled core takes
SHAPES = [(4, 2, 64), (3, 3, 80), (8, 1, 128)]  # query heads, KV heads, head_dim


def draw(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    heads, kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(sum(shape))
    qkv = torch.randn(NUM_TOKENS, (heads + 2 * kv_heads) * head_dim, generator=generator).to(DEVICE, dtype)
    angles = torch.rand(NUM_TOKENS, head_dim // 2, generator=generator).repeat(1, 2).to(DEVICE) * 6
    norms = {name: torch.rand(head_dim, generator=generator).to(DEVICE, dtype) for name in ("q_norm", "k_norm")}
    return qkv, angles.cos().to(dtype), angles.sin().to(dtype), norms


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_the_reference_is_transformers_bit_for_bit(
    shape: tuple[int, int, int], dtype: torch.dtype, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotary, "runs_on_triton", lambda tensor: False)
    qkv, cos, sin, norms = draw(shape, dtype)
    q, k, v = qkv.clone().unflatten(1, (-1, shape[2])).transpose(0, 1).split([shape[0], shape[1], shape[1]])
    if normed:
        q, k = rms_norm_reference(q, norms["q_norm"], 1e-6), rms_norm_reference(k, norms["k_norm"], 1e-6)
    expected = *(each[0] for each in apply_rotary_pos_emb(q[None], k[None], cos[None], sin[None])), v
    found = rotate_heads(qkv, cos, sin, *shape[:2], **(norms if normed else {}))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@needs_triton
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_the_twin_is_as_near_to_float32_as_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, normed: bool
) -> None:
    qkv, cos, sin, norms = draw(shape, dtype)
    how, wide_how = (
        (*(norms[name].to(to) for name in ("q_norm", "k_norm")), 1e-6) if normed else (None, None, 1e-6)
        for to in (dtype, torch.float32)
    )
    one, other = (each.unflatten(1, (-1, shape[2])) for each in (qkv.clone(), qkv.clone()))
    rotary._rotate_reference(one, cos, sin, *shape[:2], *how)
    rotary._rotate_triton(other, cos, sin, *shape[:2], *how)
    wide = qkv.unflatten(1, (-1, shape[2])).float()
    rotary._rotate_reference(wide, cos.float(), sin.float(), *shape[:2], *wide_how)
    if not normed and DEVICE == "cpu":  # a GPU may contract a product and a sum
        assert torch.equal(other, one)  # two products and a sum, each rounded: no room for a choice
    floor = torch.finfo(torch.float32).eps * float(wide.norm())
    assert distance(other, wide) <= 2 * max(distance(one, wide), floor)
    assert torch.equal(other[:, -shape[1] :], qkv.unflatten(1, (-1, shape[2]))[:, -shape[1] :])  # the values
