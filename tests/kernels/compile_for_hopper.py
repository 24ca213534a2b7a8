"""Compile the step kernels for Hopper on a machine without a GPU: every launch becomes a compilation.

Prints a line per launch: kernel, whether it was launched ahead of its predecessor's end, how often its PTX waits for
that. Run in a process of its own, in which Triton does not interpret.
"""

from typing import Any

import torch
from kernels.paged_cases import coded
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvsift.kernels.append import append_triton
from kvsift.kernels.delta_step import DeltaNet, delta_step_triton
from kvsift.kernels.float4_stack import Float4Stack, expand_float4_triton
from kvsift.kernels.int4_weight import Int4Weight, expand_int4_triton
from kvsift.kernels.linear import gate_heads_triton, linear_triton
from kvsift.kernels.page_summary import SUMMARIES
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.rms_norm import rms_norm_triton
from kvsift.kernels.rotary_append import qkv_rotary_append_triton
from kvsift.kernels.routed_experts import (
    Clamps,
    ExpertStacks,
    choose_experts_triton,
    gate_experts_triton,
    mix_experts_triton,
)
from kvsift.kernels.scaled_weight import FP8, ScaledStack, ScaledWeight, expand_triton, round_rows_triton
from kvsift.native.experts import Routing


class Hopper:
    """As much of a driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_only(launch: Any) -> Any:
    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        waits = kernel.asm["ptx"].count("griddepcontrol.wait")
        print(self.fn.__name__, bool(options.get("launch_pdl")), waits)
        return kernel

    return run


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def launch_all(pdl: bool) -> None:
    num_pages, head_dim, norm = 8, 80, (zeros(512), 1e-5)
    kv = PagedKV(
        zeros(2, num_pages, 16, head_dim), zeros(2, num_pages, 16, head_dim),
        torch.zeros(2, 4, dtype=torch.int32), torch.ones(2, dtype=torch.int32),
    )  # fmt: skip
    summaries = {
        kind: torch.zeros(2, num_pages, of.width(head_dim), dtype=of.dtype or torch.bfloat16)
        for kind, of in SUMMARIES.items()
    }
    qkv, angles, lengths, head_norm = zeros(2, 8 * head_dim), zeros(9, 2, 64), kv.lengths, zeros(head_dim)
    qkv_rotary_append_triton(
        qkv, angles, lengths, kv, summaries, num_query_heads=4, q_norm=head_norm, k_norm=head_norm, pdl=pdl
    )
    kv8 = coded(kv)
    qkv_rotary_append_triton(qkv, angles, lengths, kv8, summaries, num_query_heads=4, pdl=pdl)
    qkv_rotary_append_triton(
        zeros(2, 12 * head_dim), zeros(9, 2, 32), lengths, kv, summaries, num_query_heads=4, q_norm=head_norm,
        k_norm=head_norm, norm_offset=1.0, gated=True, pdl=pdl,
    )  # fmt: skip
    qkv_rotary_append_triton(
        zeros(2, 6 * head_dim), zeros(9, 2, 96)[:, :, :64], lengths, kv, summaries, num_query_heads=4,
        q_norm=head_norm, k_norm=head_norm, norm_offset=1.0, v_norm=True, values_are_keys=True,
        query_scales=zeros(9, 4)[:, 0], pdl=pdl,
    )  # fmt: skip
    gate_heads_triton(zeros(2, 4, head_dim), zeros(2, 4, head_dim), pdl=pdl)
    for by_key_head in (False, True):
        net = DeltaNet(zeros(10240, 4), zeros(48), zeros(48), zeros(128), 1e-6, 16, 128, by_key_head)
        states = zeros(4, 2, 10240, 4), torch.zeros(4, 2, 48, 128, 128)
        delta_step_triton(zeros(2, 16384), zeros(2, 96), net, *states, torch.ones(1, dtype=torch.int64), pdl=pdl)
    rms_norm_triton(zeros(2, 512), norm[0], 1e-5, offset=1.0, pdl=pdl)
    rms_norm_triton(zeros(2, 512), norm[0], 1e-5, offset=1.0, residual=zeros(2, 512), scale=0.5, pdl=pdl)
    fp8 = torch.zeros(1000, 512, dtype=FP8)
    by_output, by_block = ScaledWeight(fp8, torch.ones(1000, 1), 1, 512), ScaledWeight(fp8, torch.ones(8, 4), 128, 128)
    codes, scales = torch.zeros(1000, 256, dtype=torch.uint8), torch.ones(1000, 4).half()
    int4 = [Int4Weight(codes, scales, points, 128) for points in (None, scales.to(torch.uint8))]
    for rows in (1, 2, 20):
        for weight in (zeros(1000, 512), by_output, by_block, *int4):
            x = zeros(rows, 512)
            linear_triton(x, weight, zeros(1000), norm=norm, residual=zeros(rows, 1000), pdl=pdl)
            linear_triton(x, weight, norm=norm, gated=True, gelu=rows == 2, pdl=pdl)
    stacks = [(zeros(5, 256, 512), zeros(5, 512, 128))] + [
        tuple(ScaledStack(torch.zeros(5, *of, dtype=FP8), torch.ones(5, of[0] // outs, of[1] // ins(of[1])), outs,
                          ins(of[1])) for of in ((256, 512), (512, 128)))
        for outs, ins in ((1, lambda width: width), (128, lambda width: 128))
    ]  # fmt: skip
    float4 = [
        Float4Stack.of_codes(*(torch.zeros(5, out, num_in // each, dtype=torch.uint8) for each in (2, 32)))
        for out, num_in in ((256, 512), (512, 128))
    ]
    for number, (gate_up, down) in enumerate([*stacks, float4]):
        router, bias = zeros(5, 512), None if number else torch.zeros(4)
        experts = ExpertStacks(router, gate_up, down, Routing(2, number == 0), bias, shared=True, gated=True)
        rows, chosen, weights = choose_experts_triton(zeros(3, 512), norm, experts, pdl=pdl)
        heads = gate_experts_triton(rows, chosen, experts, pdl=pdl)
        mix_experts_triton(heads, chosen, weights, zeros(3, 512), experts, pdl=pdl)
    biases = zeros(2), zeros(2, 256), zeros(2, 512), Clamps(1.702, 7.0)
    experts = ExpertStacks(
        zeros(2, 512), zeros(2, 256, 512), zeros(2, 512, 128), Routing(2), None, False, False, *biases
    )
    rows, chosen, weights = choose_experts_triton(zeros(3, 512), norm, experts, pdl=pdl)
    heads = gate_experts_triton(rows, chosen, experts, pdl=pdl)
    mix_experts_triton(heads, chosen, weights, zeros(3, 512), experts, pdl=pdl)
    if not pdl:
        expand_triton(by_block, torch.bfloat16)
        expand_float4_triton(float4[0], torch.bfloat16)
        expand_int4_triton(int4[1], torch.bfloat16)
        round_rows_triton(zeros(3, 14336))
        append_triton(kv, zeros(2, 2, head_dim), zeros(2, 2, head_dim), summaries)
        append_triton(kv, zeros(2, 2, head_dim), zeros(2, 2, head_dim), {})
        append_triton(kv8, zeros(2, 2, head_dim), zeros(2, 2, head_dim), summaries)


if __name__ == "__main__":
    driver.set_active(Hopper())
    JITFunction.run = compile_only(JITFunction.run)
    for pdl in (False, True):
        launch_all(pdl)
