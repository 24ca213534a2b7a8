"""A layer of experts on a few rows in four launches: which experts a row gets, their gates and ups, their outputs, and
the weighted sum of these.

Each row is computed as if it were alone, so its bits do not depend on the number of rows. Programs that read the same
weights for different rows run side by side, and find them in the GPU's cache; on Hopper ``streamed_experts`` reads
weights of 8 bits once, faster. An expert that all rows get is the last one of the stacks. The products of gpt-oss have
biases, and its gates and ups alternate and are clamped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvsift.kernels.expert_linear import expert_linear_reference
from kvsift.kernels.float4_stack import Float4Stack, sum_float4_products
from kvsift.kernels.linear import gate_reference, gated
from kvsift.kernels.rms_norm import rms_norm_reference, weighted
from kvsift.kernels.scaled_weight import ScaledStack
from kvsift.kernels.skinny_product import SCALE_INS, Tiling, in_registers, prefetch, sum_products
from kvsift.kernels.streamed_experts import streamed_experts, streams_experts
from kvsift.kernels.triton_shim import jit, jit_for_any, power_of_two, runs_on_triton, tl, triton
from kvsift.native.experts import Routing, mix_reference, route_reference

MOST_ROWS = 1024
ROUTED = 4  # logits of a program
MIXED = 128  # outputs of a program that mixes
# weights of an output that are prefetched while the gates are computed, and up to how many pairs of a row and an
# expert: with more, most programs begin when the gates are there
PREFETCHED, FEW_PAIRS = 1024, 16


class Clamps(NamedTuple):
    """How gpt-oss joins gates and ups."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class ExpertStacks:
    """The weights of a layer of experts.

    Attributes:
        router: [experts, hidden], and one more row if a gate of the shared expert is the last.
        gate_up: [experts, 2 * inter, hidden], gates before ups, the inputs of an output in one piece; if scaled, with
            scales of whole rows, or of 128 inputs; or 4-bit floats.
        down: [experts, hidden, inter], of the same kind. Both have one more expert if one is shared.
        routing: which experts a row gets.
        bias: float32 [experts], see ``route``, or None.
        shared: the last expert of the stacks is one that every row gets.
        gated: and its weight is the sigmoid of the last logit; else 1.
        router_bias, gate_up_bias, down_bias: [experts], [experts, 2 * inter] and [experts, hidden], added to products;
            or None.
        clamps: where gates and ups alternate, how ``clamped_reference`` joins them; None: gates are before ups, and
            joined by SiLU.
    """

    router: Tensor
    gate_up: Tensor | ScaledStack
    down: Tensor | ScaledStack
    routing: Routing
    bias: Tensor | None = None
    shared: bool = False
    gated: bool = False
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    clamps: Clamps | None = None
    # int32 [MOST_ROWS], programs that have computed logits of a row; zeros between launches
    finished: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "finished", torch.zeros(MOST_ROWS, dtype=torch.int32, device=self.router.device))

    @property
    def per_row(self) -> int:
        """Experts of a row, the shared one included."""
        return self.routing.top_k + self.shared


def takes_stack(weight: Tensor | ScaledStack, dtype: torch.dtype) -> bool:
    """Whether the twins take the weights of experts [experts, out, in] for rows of this dtype."""
    if isinstance(weight, ScaledStack):
        by_rows = isinstance(weight, Float4Stack) or weight.scales.shape[2] == 1 or weight.ins == SCALE_INS
        return by_rows and weight.values.stride(2) == 1
    return (
        weight.dtype == dtype and weight.is_floating_point() and 1 in weight.stride()[1:]
    )  # laid by output on the way


def routed_experts(
    x: Tensor, norm: tuple[Tensor, float] | tuple[Tensor, float, float], stacks: ExpertStacks, *, pdl: bool = False
) -> Tensor:
    """Compute ``x + experts(rms_norm(x))``.

    Args:
        x: [rows, hidden], at most ``MOST_ROWS``.
        norm: arguments of ``rms_norm``.
        stacks: the weights.
        pdl: launch while the previous kernel still runs (Hopper and later).

    Returns:
        [rows, hidden] in the dtype of ``x``.
    """
    if not runs_on_triton(x):
        rows, chosen, weights = choose_experts_reference(x, norm, stacks)
        return mix_experts_reference(gate_experts_reference(rows, chosen, stacks), chosen, weights, x, stacks)
    rows, chosen, weights = choose_experts_triton(x, norm, stacks, pdl=pdl)
    return mix_experts_triton(gate_experts_triton(rows, chosen, stacks, pdl=pdl), chosen, weights, x, stacks, pdl=pdl)


def choose_experts_reference(
    x: Tensor, norm: tuple[Tensor, float] | tuple[Tensor, float, float], stacks: ExpertStacks
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised rows [rows, hidden], the experts of each and their weights, int32 and float32 [rows,
    per_row], the shared one last. Logits are rounded to the dtype of rows, but for those of which sigmoids are taken
    (GLM-4.5)."""
    rows = rms_norm_reference(x, *norm)
    dtype = torch.promote_types(x.dtype, torch.float32) if stacks.routing.sigmoid else x.dtype
    bias = None if stacks.router_bias is None else stacks.router_bias.to(dtype)
    logits = torch.nn.functional.linear(rows.to(dtype), stacks.router.to(dtype), bias)
    number = len(stacks.router) - stacks.gated
    chosen, weights = route_reference(logits[:, :number], stacks.routing, stacks.bias)
    if stacks.shared:
        gates = logits[:, number:].float().sigmoid() if stacks.gated else weights.new_ones(len(x), 1)
        chosen, weights = torch.cat((chosen, chosen.new_full((len(x), 1), number)), 1), torch.cat((weights, gates), 1)
    return rows, chosen.int(), weights


def gate_experts_reference(rows: Tensor, chosen: Tensor, stacks: ExpertStacks) -> Tensor:
    """Return ``silu(gate) * up``, or what ``clamps`` make of them, of each row and each of its experts, [rows, per_row,
    inter]."""
    products = expert_linear_reference(rows, stacks.gate_up, chosen.flatten().long(), stacks.gate_up_bias)
    heads = gate_reference(products) if stacks.clamps is None else clamped_reference(products, stacks.clamps)
    return heads.view(*chosen.shape, -1)


def clamped_reference(products: Tensor, clamps: Clamps) -> Tensor:
    """Return ``(up + 1) * gate * sigmoid(alpha * gate)`` of alternating gates and ups, [rows, 2 * inter] -> [rows,
    inter]: gates are at most ``limit``, and ups between ``-limit`` and ``limit``."""
    gate, up = products[:, ::2].clamp(max=clamps.limit), products[:, 1::2].clamp(-clamps.limit, clamps.limit)
    return (up + 1) * (gate * (gate * clamps.alpha).sigmoid())


def mix_experts_reference(
    heads: Tensor, chosen: Tensor, weights: Tensor, residual: Tensor, stacks: ExpertStacks
) -> Tensor:
    """Return ``residual + sum over experts of weight * output``, [rows, hidden]; outputs are rounded, and the sum is in
    float32."""
    outputs = expert_linear_reference(heads.flatten(0, 1), stacks.down, chosen.flatten().long(), stacks.down_bias)
    return mix_reference(outputs.view(*chosen.shape, -1), weights, residual)


def choose_experts_triton(
    x: Tensor, norm: tuple[Tensor, float] | tuple[Tensor, float, float], stacks: ExpertStacks, *, pdl: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    (count, hidden), number, (weight, eps, *offset) = x.shape, len(stacks.router), norm
    assert count <= MOST_ROWS, "rows are counted one by one"
    rows = torch.empty_like(x, memory_format=torch.contiguous_format)
    logits = x.new_empty(count, number, dtype=torch.float32 if stacks.routing.sigmoid else x.dtype)
    chosen = torch.empty(count, stacks.per_row, dtype=torch.int32, device=x.device)
    weights = torch.empty(count, stacks.per_row, dtype=torch.float32, device=x.device)
    tile = power_of_two(hidden)
    _choose_experts_kernel[count, triton.cdiv(number, ROUTED)](
        x, weight, stacks.router, stacks.router_bias, stacks.bias, rows, logits, stacks.finished, chosen, weights,
        x.stride(0), stacks.router.stride(0), eps, stacks.routing.factor, hidden, number, TOP_K=stacks.routing.top_k,
        SLOTS=power_of_two(stacks.per_row), SIGMOID=stacks.routing.sigmoid, NORMALISED=stacks.routing.normalised,
        SHARED=stacks.shared, GATED=stacks.gated, OFFSET=offset[0] if offset else 0.0, EXPERTS=power_of_two(number),
        OUTS=ROUTED, TILE=tile, PDL=pdl, num_warps=4 if tile <= 2048 else 8, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return rows, chosen, weights


@jit_for_any()
def _choose_experts_kernel(
    x_ptr, norm_ptr, router_ptr, router_bias_ptr, bias_ptr, rows_ptr, logits_ptr, finished_ptr, chosen_ptr, weights_ptr,
    x_row, router_row, eps, factor, hidden, number, TOP_K: tl.constexpr, SLOTS: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, OFFSET: tl.constexpr, EXPERTS: tl.constexpr,
    OUTS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, outs, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * OUTS + tl.arange(0, OUTS), tl.arange(0, TILE)
    inside = i < hidden
    known = tl.minimum(outs, number - 1)  # the last tile may exceed the logits: it repeats the last one
    router = tl.load(router_ptr + known[:, None] * router_row + i[None, :], mask=inside[None, :], other=0.0)
    norm = tl.load(norm_ptr + i, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # early kernels rely on all before this launch
    x = tl.load(x_ptr + row * x_row + i, mask=inside, other=0.0).to(tl.float32)
    y = weighted(x * tl.rsqrt(tl.sum(x * x, 0) / hidden + eps), norm, OFFSET, rows_ptr.dtype.element_ty)
    if tl.program_id(1) == 0:
        tl.store(rows_ptr + row * hidden + i, y, mask=inside)
    products = tl.sum(router.to(tl.float32) * y.to(tl.float32)[None, :], 1)
    if router_bias_ptr is not None:
        products += tl.load(router_bias_ptr + known).to(tl.float32)
    logits_ptr += row * number
    tl.store(logits_ptr + outs, products.to(logits_ptr.dtype.element_ty), mask=outs < number)
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(finished_ptr + row, 1, sem="acq_rel") == tl.num_programs(1) - 1:  # the last one chooses
        tl.store(finished_ptr + row, 0)
        choices, e, slot = number - GATED, tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
        logits = tl.load(logits_ptr + e, mask=e < choices, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
        most, total = tl.max(logits, 0), 1.0
        if SIGMOID:
            ranked = tl.sigmoid(logits)
        else:
            ranked = tl.exp(logits - most)
            total = tl.sum(ranked, 0)
            ranked /= total
        if bias_ptr is not None:
            ranked += tl.load(bias_ptr + e, mask=e < choices, other=0.0)
        # numbers of the same order as the weights, and the first of equal ones before the others
        bits = tl.where(e < choices, ranked, float("-inf")).to(tl.int32, bitcast=True)
        keys = (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) << 32) | (EXPERTS - 1 - e).to(tl.int64)
        LEAST: tl.constexpr = -(1 << 63)
        chosen = tl.zeros((SLOTS,), tl.int32)
        for k in range(TOP_K):
            best = EXPERTS - 1 - (tl.max(keys, 0) & (EXPERTS - 1)).to(tl.int32)
            keys = tl.where(e == best, LEAST, keys)
            chosen = tl.where(slot == k, tl.minimum(best, choices - 1), chosen)  # whatever the logits are
        # a later load of what this program has read before
        logits = tl.load(logits_ptr + chosen, cache_modifier=".cg").to(tl.float32)
        weights = tl.sigmoid(logits) if SIGMOID else tl.exp(logits - most) / total
        weights = tl.where(slot < TOP_K, weights, 0.0)
        if NORMALISED:
            weights = weights / (tl.sum(weights, 0) + 1e-20)
        weights *= factor
        if SHARED:
            gate = 1.0
            if GATED:
                gate = tl.sigmoid(tl.load(logits_ptr + choices, cache_modifier=".cg").to(tl.float32))
            chosen, weights = tl.where(slot == TOP_K, choices, chosen), tl.where(slot == TOP_K, gate, weights)
        at = row * (TOP_K + SHARED) + slot
        tl.store(chosen_ptr + at, chosen, mask=slot < TOP_K + SHARED)
        tl.store(weights_ptr + at, weights, mask=slot < TOP_K + SHARED)


def gate_experts_triton(
    rows: Tensor, chosen: Tensor, stacks: ExpertStacks, *, pdl: bool = False, tiling: Tiling | None = None
) -> Tensor:
    return expert_products(rows, chosen, stacks.gate_up, stacks.gate_up_bias, True, stacks.clamps, tiling, pdl)


def mix_experts_triton(
    heads: Tensor, chosen: Tensor, weights: Tensor, residual: Tensor, stacks: ExpertStacks, *, pdl: bool = False,
    tiling: Tiling | None = None,
) -> Tensor:  # fmt: skip
    outputs = expert_products(heads.flatten(0, 1), chosen, stacks.down, stacks.down_bias, tiling=tiling, pdl=pdl)
    (count, per_row, hidden), out = outputs.shape, torch.empty_like(residual, memory_format=torch.contiguous_format)
    _mix_experts_kernel[count, triton.cdiv(hidden, MIXED)](
        outputs, weights, residual, out, residual.stride(0), hidden, PER_ROW=per_row, SLOTS=power_of_two(per_row),
        TILE=MIXED, PDL=pdl, num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


def choose_tiling(weight: Tensor | ScaledStack, gates: bool) -> Tiling:
    """Return the best tiling on an H200, of 1 to 8 rows and Qwen3-30B-A3B's shape; no more inputs at once than there
    are."""
    if isinstance(weight, Tensor):
        outs, warps, depth = (8, 1, 1) if gates else (4, 2, 2)
    elif isinstance(weight, Float4Stack):
        outs, warps, depth = 4, 1, 4
    else:
        outs, warps, depth = (2, 1, 8) if gates else (4, 1, 2)
    return in_registers(outs, warps, max(1, min(depth, power_of_two(weight.shape[2]) // (256 * warps))))


def expert_products(
    x: Tensor, chosen: Tensor, weight: Tensor | ScaledStack, bias: Tensor | None, gates: bool = False,
    clamps: Clamps | None = None, tiling: Tiling | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Products of rows [rows, in] and the weights of their experts [rows or their pairs of experts, out]: [rows,
    per_row, out], or gates and ups joined, half as many."""
    if tiling is None and bias is None and clamps is None and streams_experts(x, chosen, weight):
        assert isinstance(weight, ScaledStack)
        return streamed_experts(x, chosen, weight, gated=gates, pdl=pdl)
    (_, width, num_in), pairs, tiling = weight.shape, chosen.numel(), tiling or choose_tiling(weight, gates)
    values, scales, scale_outs, scale_ins = weight, None, 1, 0
    if isinstance(weight, ScaledStack):
        values, scales, scale_outs = weight.values, weight.scales, weight.outs
        scale_ins = 0 if scales.shape[2] == 1 else weight.ins
    assert isinstance(values, Tensor)
    out = x.new_empty(*chosen.shape, width // 2 if gates else width)
    _expert_products_kernel[pairs, triton.cdiv(width, tiling.outs)](
        x, chosen, values, scales, bias, out, *values.stride()[:2],
        *((0, 0) if scales is None else scales.stride()[:2]), 0 if bias is None else bias.stride(0), out.shape[2],
        num_in, pairs // len(x), *(clamps or (0.0, 0.0)), GATES=gates, CLAMPED=clamps is not None,
        PREFETCH=0 if gates or pairs > FEW_PAIRS else PREFETCHED, OUTS=tiling.outs, INS=tiling.ins,
        DEPTH=tiling.depth, SCALE_OUTS=scale_outs, SCALE_INS=scale_ins,
        EVEN=num_in % (tiling.ins * tiling.depth) == 0, PDL=pdl, num_warps=tiling.num_warps,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


@jit_for_any("repeats")
def _expert_products_kernel(
    x_ptr, chosen_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, of_expert, of_out, scales_of_expert, scales_of_out,
    bias_of_expert, num_out, num_in, repeats, alpha, limit, GATES: tl.constexpr, CLAMPED: tl.constexpr,
    PREFETCH: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, DEPTH: tl.constexpr, SCALE_OUTS: tl.constexpr,
    SCALE_INS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair, i = tl.program_id(0).to(tl.int64), tl.arange(0, OUTS)
    if GATES:  # a gate and its up are adjacent in the tile
        tile = tl.program_id(1) * (OUTS // 2)
        known = tl.minimum(tile + i // 2, num_out - 1)
        known = known * 2 + i % 2 if CLAMPED else known + i % 2 * num_out
    else:
        tile = tl.program_id(1) * OUTS
        known = tl.minimum(tile + i, num_out - 1)
    if PDL and GATES:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # early kernels rely on all before this launch
    expert = tl.load(chosen_ptr + pair).to(tl.int64)
    weights, scales = weight_ptr + expert * of_expert + known.to(tl.int64) * of_out, None
    if PDL and not GATES:
        # experts were chosen two launches before: prefetch while the gates are computed
        if PREFETCH > 0:
            prefetch(weights, num_in // 2 if weight_ptr.dtype.element_ty == tl.uint8 else num_in, PREFETCH)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if scales_ptr is not None:
        scales = scales_ptr + expert * scales_of_expert + known // SCALE_OUTS * scales_of_out
    x_ptr += pair // repeats * num_in
    if weight_ptr.dtype.element_ty == tl.uint8:
        products = sum_float4_products(x_ptr, weights, scales, num_in, OUTS, INS, EVEN, DEPTH)
    else:
        products = sum_products(x_ptr, weights, scales, None, 0.0, 0.0, num_in, OUTS, INS, SCALE_INS, EVEN, DEPTH)
        if scales_ptr is not None and SCALE_INS == 0:
            products *= tl.load(scales)[None, :]
    if bias_ptr is not None:
        products += tl.load(bias_ptr + expert * bias_of_expert + known).to(tl.float32)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out_ptr += pair * num_out
    if GATES:
        gate, up = tl.split(tl.reshape(products.to(dtype), (OUTS // 2, 2)))  # rounded, as two projections would be
        heads = clamped(gate, up, alpha, limit) if CLAMPED else gated(gate, up)
        outs = tile + tl.arange(0, OUTS // 2)
        tl.store(out_ptr + outs, heads.to(dtype), mask=outs < num_out)
    else:
        tl.store(out_ptr + tile + i, tl.reshape(products, (OUTS,)).to(dtype), mask=tile + i < num_out)


@jit
def clamped(gate, up, alpha, limit):
    """``clamped_reference``, rounded at its end alone."""
    gate = tl.minimum(gate.to(tl.float32), limit)
    up = tl.minimum(tl.maximum(up.to(tl.float32), -limit), limit)
    return (up + 1) * gate * tl.sigmoid(alpha * gate)


@jit_for_any()
def _mix_experts_kernel(
    outputs_ptr, weights_ptr, residual_ptr, out_ptr, residual_row, hidden, PER_ROW: tl.constexpr, SLOTS: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, outs, slot = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, SLOTS)
    inside, pairs = outs < hidden, row * PER_ROW + slot
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # early kernels rely on all before this launch
    weights = tl.load(weights_ptr + pairs, mask=slot < PER_ROW, other=0.0)
    real = (slot < PER_ROW)[:, None] & inside[None, :]
    outputs = tl.load(outputs_ptr + pairs[:, None] * hidden + outs[None, :], mask=real, other=0.0)
    residual = tl.load(residual_ptr + row * residual_row + outs, mask=inside, other=0.0).to(tl.float32)
    mixed = tl.sum(outputs.to(tl.float32) * weights[:, None], 0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * hidden + outs, (mixed.to(dtype).to(tl.float32) + residual).to(dtype), mask=inside)
