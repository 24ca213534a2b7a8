"""A training forward pass for Qwen3 on flat rows of tokens, equal to transformers' but compiled once for all lengths.

Everything but attention sees [num_tokens, ...] with a constant number of tokens; the head runs on learned tokens only.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config, Qwen3ForCausalLM

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class Learned(NamedTuple):
    """What a batch teaches; each [capacity]."""

    places: Tensor
    targets: Tensor
    weights: Tensor


def new_model(model: dict[str, float]) -> Qwen3ForCausalLM:
    sizes = {name: int(size) for name, size in model.items() if name != "rope_theta"}
    rope = {"rope_type": "default", "rope_theta": float(model["rope_theta"])}
    config = Qwen3Config(
        rope_parameters=rope,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        **sizes,
    )
    return Qwen3ForCausalLM(config)


def loss(model: Qwen3ForCausalLM, ids: Tensor, learned: Learned, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(weighted mean loss, whether each learned token is the most likely one [capacity]).

    Args:
        ids: [num_rows, length].
        rope: cosines and sines, each [num_rows * length, head_dim].
    """
    config = model.config
    rows, length = ids.shape
    x = F.embedding(ids.flatten(), model.model.embed_tokens.weight).bfloat16()  # [num_tokens, hidden_size]
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        q, k, v = _project(
            x,
            layer.input_layernorm.weight,
            a.q_proj.weight,
            a.k_proj.weight,
            a.v_proj.weight,
            a.q_norm.weight,
            a.k_norm.weight,
            *rope,
            config.num_attention_heads // config.num_key_value_heads,
        )
        q, k, v = (t.view(rows, length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(BACKENDS, set_priority=True):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [rows, num_query_heads, length, head_dim]
        out = out.transpose(1, 2).reshape(rows * length, -1)
        x = _mix(
            x,
            out,
            a.o_proj.weight,
            layer.post_attention_layernorm.weight,
            m.gate_proj.weight,
            m.up_proj.weight,
            m.down_proj.weight,
        )
    return _head(x[learned.places], model.model.norm.weight, model.model.embed_tokens.weight, *learned[1:])


def rope_tables(length: int, rows: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines for rows of one length, each [rows * length, head_dim] in bf16, as in transformers."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angle = torch.arange(length, device=device).float()[:, None] * frequency  # [length, head_dim / 2]
    angle = torch.cat((angle, angle), -1).repeat(rows, 1)
    return angle.cos().bfloat16(), angle.sin().bfloat16()


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight.bfloat16() * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]


@torch.compile(dynamic=False)
def _project(
    x: Tensor,
    norm: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries, keys and values, KV heads repeated: each [num_tokens, num_query_heads, head_dim]."""
    x = _norm(x, norm)
    q, k, v = (F.linear(x, w.bfloat16()).unflatten(-1, (-1, q_norm.shape[0])) for w in (wq, wk, wv))
    q, k = _rotate(_norm(q, q_norm), cos, sin), _rotate(_norm(k, k_norm), cos, sin)
    return q, k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)


@torch.compile(dynamic=False)
def _mix(x: Tensor, attention: Tensor, wo: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    x = x + F.linear(attention, wo.bfloat16())
    h = _norm(x, norm)
    return x + F.linear(F.silu(F.linear(h, gate.bfloat16())) * F.linear(h, up.bfloat16()), down.bfloat16())


@torch.compile(dynamic=False)
def _head(x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(_norm(x, norm), embedding.bfloat16()).float()
    each = F.cross_entropy(logits, targets, reduction="none")
    return (each * weights).sum() / weights.sum(), logits.argmax(-1) == targets
