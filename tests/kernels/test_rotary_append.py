"""The head of a decode step's attention: head norms, rotation and store, as transformers computes them."""

from typing import Any

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, needs_triton
from kernels.paged_cases import copy_of, distance, paged_kv, pools_of, same
from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from kvsift.kernels.append import append_reference
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.rotary_append import qkv_rotary_append, qkv_rotary_append_reference, qkv_rotary_append_triton
from kvsift.models.decoder import ROUNDED_ONCE

Shape = tuple[int, int, int, int, str]  # query heads, KV heads, head_dim, rotary_dim, what there is more
SHAPES = [
    (4, 2, 16, 16, ""),  # the usual, in small
    (6, 2, 12, 12, "norms"),  # group of 3, head_dim not a power of two
    (2, 2, 16, 8, "norms"),  # no grouping, half of a head rotated
    (6, 2, 16, 4, "norms and gates"),  # a quarter rotated, and norms with an offset, as in Qwen3.5
    (4, 2, 16, 16, "norms of values"),  # Gemma 4
    (4, 1, 12, 8, "norms of values, which are keys"),
    (4, 2, 16, 16, "scales"),  # Ministral 3
]


def draw(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
    num_query_heads, num_kv_heads, head_dim, rotary_dim, more = shape
    torch.manual_seed(sum(shape[:4]))
    gated, kinds = "gates" in more, 1 if "keys" in more else 2
    qkv = 3 * torch.randn(3, ((2 if gated else 1) * num_query_heads + kinds * num_kv_heads) * head_dim)
    angles = (100 * torch.rand(9, rotary_dim // 2)).repeat(1, 2)  # of lengths
    weights = torch.rand(2, head_dim) + 0.5
    how: dict[str, Any] = {"num_query_heads": num_query_heads, "norm_eps": 1e-5}
    if gated:
        how |= {"gated": True, "norm_offset": 1.0}
    if "values" in more:
        how |= {"norm_offset": ROUNDED_ONCE, "v_norm": True, "values_are_keys": "keys" in more}
    if "norms" in more:
        how |= {"q_norm": weights[0].to(DEVICE, dtype), "k_norm": weights[1].to(DEVICE, dtype)}
    table = torch.stack((angles.cos(), angles.sin()), 1)
    if "values" in more:  # columns of a wider table
        table = torch.cat((torch.rand(9, 2, 8), table, torch.rand(9, 2, 4)), 2)
    table = table.to(DEVICE, dtype)[:, :, 8 : 8 + rotary_dim] if "values" in more else table.to(DEVICE, dtype)
    if "scales" in more:
        how |= {"query_scales": (1 + torch.rand(9, 3)).to(DEVICE, dtype)[:, 1]}
    return qkv.to(DEVICE, dtype), table, how


def case(shape: Shape, dtype: torch.dtype) -> PagedKV:
    return paged_kv([1, 6, 8], shape[1], 4, shape[2], dtype, DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_is_transformers_bit_for_bit(shape: Shape, dtype: torch.dtype) -> None:
    qkv, angles, how = draw(shape, dtype)
    kv = case(shape, dtype)
    other = copy_of(kv)
    queries = qkv_rotary_append_reference(qkv, angles, kv.lengths, kv, {}, **how)
    if "gates" in shape[4]:
        gated, rest = qkv.split([2 * shape[0] * shape[2], 2 * shape[1] * shape[2]], 1)
        q = gated.view(3, shape[0], -1).chunk(2, 2)[0]  # as Qwen3_5Attention splits them
        k, v = rest.view(3, 2, shape[1], shape[2]).unbind(1)
    else:
        q, rest = qkv.view(3, -1, shape[2]).tensor_split([shape[0]], 1)
        k, v = (rest, rest) if "keys" in shape[4] else rest.chunk(2, 1)
    if "values" in shape[4]:
        v = Gemma4RMSNorm(shape[2], eps=1e-5, with_scale=False)(v)
    kinds = {"gates": Qwen3_5RMSNorm, "values": Gemma4RMSNorm}
    if "norms" in shape[4]:
        for name, states in (("q_norm", q), ("k_norm", k)):
            kind = next((kind for word, kind in kinds.items() if word in shape[4]), Qwen3RMSNorm)
            norm = kind(shape[2], eps=1e-5).to(DEVICE)
            norm.weight.data = how[name]
            q, k = (norm(states), k) if name == "q_norm" else (q, norm(states))
    rotary, (cos, sin) = shape[3], angles[kv.lengths.long()].unbind(1)
    turned = apply_rotary_pos_emb(q[..., :rotary], k[..., :rotary], cos, sin)
    q, k = (torch.cat([turn, states[..., rotary:]], -1) for turn, states in zip(turned, (q, k)))
    append_reference(other, k, v, {})
    if "scales" in shape[4]:  # as Ministral3Attention multiplies
        q = (q.unsqueeze(2) * how["query_scales"][kv.lengths.long()][:, None, None, None]).squeeze(2)
    assert torch.equal(queries, q)
    assert same(kv.keys, other.keys)
    assert same(kv.values, other.values)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_twin_is_as_near_to_float32_as_the_reference(shape: Shape, dtype: torch.dtype) -> None:
    qkv, angles, how = draw(shape, dtype)
    kv = case(shape, dtype)
    summaries = pools_of(["minmax"], kv)
    wide = case(shape, torch.float32)
    wide_how = {name: value.float() if isinstance(value, Tensor) else value for name, value in how.items()}
    exact = qkv_rotary_append_reference(qkv.float(), angles.float(), kv.lengths, wide, {}, **wide_how)
    other = copy_of(kv)
    own = qkv_rotary_append_reference(qkv, angles, kv.lengths, other, {}, **how)
    queries = qkv_rotary_append_triton(qkv, angles, kv.lengths, kv, summaries, **how)
    if not shape[4] and dtype != torch.float32 and DEVICE == "cpu":  # a GPU may contract a product and a sum
        assert torch.equal(queries, own)  # two products and a sum, each rounded: no room for a choice
        assert same(kv.keys, other.keys)
    pages = kv.table.long().gather(1, (kv.lengths.long()[:, None] - 1) // 4)[:, 0]
    slots = (kv.lengths.long() - 1) % 4
    floor = torch.finfo(torch.float32).eps * float(exact.norm())
    assert distance(queries, exact) <= 2 * max(distance(own, exact), floor)
    new, reference, exact_keys = (pool[:, pages, slots] for pool in (kv.keys, other.keys, wide.keys))
    assert distance(new, exact_keys) <= 2 * max(distance(reference, exact_keys), floor)
    if "values" in shape[4]:
        new_values, reference, exact_values = (pool[:, pages, slots] for pool in (kv.values, other.values, wide.values))
        assert distance(new_values, exact_values) <= 2 * max(distance(reference, exact_values), floor)
    else:
        assert same(kv.values, other.values)
    again = pools_of(["minmax"], kv)
    append_reference(copy_of(kv), new.transpose(0, 1), other.values[:, pages, slots].transpose(0, 1), again)
    assert torch.equal(summaries["minmax"], again["minmax"])


def test_the_dispatcher_takes_what_the_tensors_need() -> None:
    qkv, angles, how = draw(SHAPES[1], torch.float32)
    kv = case(SHAPES[1], torch.float32)
    own = qkv_rotary_append_reference(qkv, angles, kv.lengths, copy_of(kv), {}, **how)
    torch.testing.assert_close(qkv_rotary_append(qkv, angles, kv.lengths, kv, {}, **how), own)
