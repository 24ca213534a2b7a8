"""A token of gated delta nets: convolution, decay, delta rule, read and gated norm of a layer in one launch.

Each value head has a state S [key_dim, value_dim], its memory of the tokens so far: a key's value is what S gives for
the key, and a token changes S so that its key gives its value. A step reads and writes all states, and little else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from kvsift.kernels.triton_shim import jit, power_of_two, runs_on_triton, tl

L2_EPS = 1e-6  # of the norms of queries and keys


class DeltaNet(NamedTuple):
    """The weights of a layer besides its projections.

    Channels are those of the queries of all key heads, then of their keys, then of the values of all value heads.

    Attributes:
        conv: [channels, taps], of a convolution over the last tokens; the last tap is that of the newest.
        a_log, dt_bias: [value_heads], of the decay.
        norm: [value_dim], of the output of each head.
        eps: of that norm.
        key_heads: each serves as many consecutive value heads.
        key_dim: numbers of a query and of a key.
        by_key_head: inputs come key head by key head (Qwen3-Next).
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    key_heads: int
    key_dim: int
    by_key_head: bool = False

    @property
    def value_heads(self) -> int:
        """Number of states."""
        return len(self.a_log)

    @property
    def value_dim(self) -> int:
        """Numbers of a value."""
        return len(self.norm)


def delta_step(
    qkvz: Tensor, ba: Tensor, net: DeltaNet, conv: Tensor, states: Tensor, step: Tensor, *, pdl: bool = False
) -> Tensor:
    """Feed a token of each row to a layer.

    Args:
        qkvz: [rows, 2 * key_heads * key_dim + 2 * value_heads * value_dim], queries, keys, values and gates of the
            output; or these of each key head, with the values and gates that it serves.
        ba: [rows, 2 * value_heads], logits of how much of a value is learned, and inputs of the decay, in that order.
        net: the weights.
        conv: [places, at least rows, channels, taps], the last inputs of the convolution.
        states: [places, at least rows, value_heads, key_dim, value_dim].
        step: int64 [1]. Place ``(step - 1) % places`` is read, and ``step % places`` is written, of both.
        pdl: launch while the kernel before still runs, and read the states at once (Hopper and later).

    Returns:
        [rows, value_heads * value_dim] in the dtype of ``qkvz``, rounded where transformers rounds.
    """
    if runs_on_triton(qkvz):
        return delta_step_triton(qkvz, ba, net, conv, states, step, pdl=pdl)
    return delta_step_reference(qkvz, ba, net, conv, states, step)


def delta_step_reference(
    qkvz: Tensor, ba: Tensor, net: DeltaNet, conv: Tensor, states: Tensor, step: Tensor
) -> Tensor:  # fmt: skip
    rows, places, dtype = len(qkvz), len(conv), qkvz.dtype
    keys, ratio = net.key_heads * net.key_dim, net.value_heads // net.key_heads
    values = net.value_heads * net.value_dim
    if net.by_key_head:
        widths = [net.key_dim, net.key_dim, ratio * net.value_dim, ratio * net.value_dim]
        parts = [each.flatten(1) for each in qkvz.unflatten(1, (net.key_heads, -1)).split(widths, 2)]
        b, a = (each.flatten(1) for each in ba.unflatten(1, (net.key_heads, 2, ratio)).unbind(2))
    else:
        parts, (b, a) = list(qkvz.split([keys, keys, values, values], 1)), ba.chunk(2, 1)
    before, after = (step - 1) % places, step % places
    last = torch.cat([conv.index_select(0, before)[0, :rows, :, 1:], torch.cat(parts[:3], 1).unsqueeze(2)], 2)
    conv[:, :rows].index_copy_(0, after, last.unsqueeze(0))
    mixed = silu(conv1d(last, net.conv.unsqueeze(1), groups=len(net.conv)).squeeze(2)).float()
    query, key, value = mixed.split([keys, keys, values], 1)
    query, key = (each.unflatten(1, (net.key_heads, -1)).repeat_interleave(ratio, 1) for each in (query, key))
    query, key = (each * torch.rsqrt(each.square().sum(2, keepdim=True) + L2_EPS) for each in (query, key))
    decay = (-net.a_log.float().exp() * softplus(a.float() + net.dt_bias)).exp()  # [rows, value_heads]
    state = states.index_select(0, before)[0, :rows].float() * decay[..., None, None]
    learned = (value.unflatten(1, (-1, net.value_dim)) - (state * key.unsqueeze(3)).sum(2)) * b.sigmoid().unsqueeze(2)
    state = state + key.unsqueeze(3) * learned.unsqueeze(2)
    states[:, :rows].index_copy_(0, after, state.to(states.dtype).unsqueeze(0))
    output = (state * (query / net.key_dim**0.5).unsqueeze(3)).sum(2).to(dtype).float()
    normal = output * torch.rsqrt(output.square().mean(2, keepdim=True) + net.eps)
    gate = silu(parts[3].unflatten(1, (-1, net.value_dim)).float())
    return (net.norm * normal.to(dtype) * gate).to(dtype).flatten(1)


def delta_step_triton(
    qkvz: Tensor, ba: Tensor, net: DeltaNet, conv: Tensor, states: Tensor, step: Tensor, *, pdl: bool = False
) -> Tensor:
    rows, tiles = len(qkvz), (power_of_two(net.key_dim), power_of_two(net.value_dim))
    assert qkvz.stride(1) == ba.stride(1) == 1
    assert conv[0].is_contiguous()
    assert states[0].is_contiguous()
    assert net.conv.is_contiguous()
    out = qkvz.new_empty(rows, net.value_heads * net.value_dim)
    _delta_step_kernel[net.value_heads, rows](
        qkvz, ba, net.conv, net.a_log, net.dt_bias, net.norm, conv, states, step, out, net.eps, L2_EPS,
        net.key_dim**-0.5, qkvz.stride(0), ba.stride(0), conv.stride(0), states.stride(0), PLACES=len(conv),
        KEY_HEADS=net.key_heads, VALUE_HEADS=net.value_heads, KEY_DIM=net.key_dim, VALUE_DIM=net.value_dim,
        KEY_TILE=tiles[0], VALUE_TILE=tiles[1], TAPS=net.conv.shape[1], TAP_TILE=power_of_two(net.conv.shape[1]),
        BY_KEY_HEAD=net.by_key_head, PDL=pdl, num_warps=max(1, min(8, tiles[0] * tiles[1] // 2048)),
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


@jit
def _delta_step_kernel(
    qkvz_ptr, ba_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, conv_ptr, states_ptr, step_ptr, out_ptr, eps,
    l2_eps, scale, qkvz_row, ba_row, conv_place, states_place, PLACES: tl.constexpr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr, TAPS: tl.constexpr, TAP_TILE: tl.constexpr, BY_KEY_HEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per value head of a row. What value heads share of a key head each computes; one of them stores it,
    at a place that none of them reads."""
    RATIO: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head, of_key_head = head // RATIO, head % RATIO
    k, v = tl.arange(0, KEY_TILE), tl.arange(0, VALUE_TILE)
    has_k, has_v = k < KEY_DIM, v < VALUE_DIM
    step = tl.load(step_ptr)
    before, after = (step + PLACES - 1) % PLACES, step % PLACES

    # where the inputs of the heads are in a row
    q_at, k_at = key_head * KEY_DIM, KEYS + key_head * KEY_DIM
    v_at, z_at = 2 * KEYS + head * VALUE_DIM, 2 * KEYS + VALUES + head * VALUE_DIM
    b_at, a_at = head, VALUE_HEADS + head
    q_channel, k_channel, v_channel = q_at + k, k_at + k, v_at + v
    if BY_KEY_HEAD:
        q_at = key_head * (2 * KEY_DIM + 2 * RATIO * VALUE_DIM)
        k_at, v_at = q_at + KEY_DIM, q_at + 2 * KEY_DIM + of_key_head * VALUE_DIM
        z_at = v_at + RATIO * VALUE_DIM
        b_at = key_head * 2 * RATIO + of_key_head
        a_at = b_at + RATIO

    # states, weights and older inputs do not depend on the kernel before
    old = conv_ptr + before * conv_place + row * (2 * KEYS + VALUES) * TAPS
    new = conv_ptr + after * conv_place + row * (2 * KEYS + VALUES) * TAPS
    stores = k < tl.where(of_key_head == 0, KEY_DIM, 0)
    q_sum, q_tap = shifted(old, new, weight_ptr, q_channel, has_k, stores, TAPS, TAP_TILE)
    k_sum, k_tap = shifted(old, new, weight_ptr, k_channel, has_k, stores, TAPS, TAP_TILE)
    v_sum, v_tap = shifted(old, new, weight_ptr, v_channel, has_v, has_v, TAPS, TAP_TILE)
    at = (row * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + k[:, None] * VALUE_DIM + v[None, :]
    inside = has_k[:, None] & has_v[None, :]
    state = tl.load(states_ptr + before * states_place + at, mask=inside, other=0.0).to(tl.float32)
    rate, bias = tl.exp(tl.load(a_log_ptr + head).to(tl.float32)), tl.load(dt_bias_ptr + head).to(tl.float32)
    norm = tl.load(norm_ptr + v, mask=has_v, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # early kernels rely on all before this launch

    inputs = qkvz_ptr + row * qkvz_row
    z = tl.load(inputs + z_at + v, mask=has_v, other=0.0).to(tl.float32)
    query = convolved(inputs + q_at + k, new, q_channel, q_sum, q_tap, has_k, stores, TAPS)
    key = convolved(inputs + k_at + k, new, k_channel, k_sum, k_tap, has_k, stores, TAPS)
    value = convolved(inputs + v_at + v, new, v_channel, v_sum, v_tap, has_v, has_v, TAPS)
    query *= tl.rsqrt(tl.sum(query * query, 0) + l2_eps) * scale
    key *= tl.rsqrt(tl.sum(key * key, 0) + l2_eps)
    b, a = tl.load(ba_ptr + row * ba_row + b_at), tl.load(ba_ptr + row * ba_row + a_at).to(tl.float32) + bias
    share = tl.sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)
    rate *= tl.where(a > 20, a, tl.log(1 + tl.exp(tl.minimum(a, 20))))

    state *= tl.exp(-rate)
    learned = (value - tl.sum(state * key[:, None], 0)) * share
    state += key[:, None] * learned[None, :]
    tl.store(states_ptr + after * states_place + at, state.to(states_ptr.dtype.element_ty), mask=inside)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    output = tl.sum(state * query[:, None], 0).to(dtype).to(tl.float32)
    normal = (output * tl.rsqrt(tl.sum(output * output, 0) / VALUE_DIM + eps)).to(dtype).to(tl.float32)
    weighted = (normal * norm.to(tl.float32)).to(norm.dtype).to(tl.float32)
    tl.store(out_ptr + row * VALUES + head * VALUE_DIM + v, (weighted * z * tl.sigmoid(z)).to(dtype), mask=has_v)


@jit
def shifted(
    old_ptr, new_ptr, weight_ptr, channel, inside, stores, TAPS: tl.constexpr, TAP_TILE: tl.constexpr
):  # fmt: skip
    """Forget the oldest input of channels; returns what the others add to the convolution, and the newest's tap."""
    tap = tl.arange(0, TAP_TILE)[None, :]
    at, known = channel[:, None] * TAPS + tap, inside[:, None] & (tap < TAPS - 1)
    inputs = tl.load(old_ptr + at + 1, mask=known, other=0.0)
    tl.store(new_ptr + at, inputs, mask=known & stores[:, None])
    weights = tl.load(weight_ptr + at, mask=known, other=0.0)
    newest = tl.load(weight_ptr + channel * TAPS + TAPS - 1, mask=inside, other=0.0)
    return tl.sum(inputs.to(tl.float32) * weights.to(tl.float32), 1), newest.to(tl.float32)


@jit
def convolved(x_ptrs, new_ptr, channel, older, tap, inside, stores, TAPS: tl.constexpr):
    """Store the newest inputs of channels; returns SiLU of the convolution, rounded before and after it, in float32."""
    x = tl.load(x_ptrs, mask=inside, other=0.0)
    tl.store(new_ptr + channel * TAPS + TAPS - 1, x.to(new_ptr.dtype.element_ty), mask=stores)
    y = (older + x.to(tl.float32) * tap).to(x.dtype).to(tl.float32)
    return (y * tl.sigmoid(y)).to(x.dtype).to(tl.float32)
