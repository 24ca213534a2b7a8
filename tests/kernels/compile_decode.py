"""Compile the kernels of both sparse attentions, and of ``merge``, for Hopper on a machine without a GPU.

Prints a line per launch: kernel, and bytes of shared memory; with the argument ``wide`` for heads of 512. Run in a
process of its own, as ``compile_for_hopper``.
"""

import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from kernels.compile_for_hopper import Hopper
from kernels.decode_cases import draw_case
from kernels.decode_checks import by_twins
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvsift.kernels.block_attention import block_attention_triton
from kvsift.kernels.block_pages import BlockPages, place_pages_triton
from kvsift.kernels.constrain_logits import constrain_logits_triton
from kvsift.kernels.expert_linear import expert_linear_triton
from kvsift.kernels.merge import merge_triton
from kvsift.kernels.page_attention import page_attention_triton
from kvsift.kernels.page_summary import SUMMARIES, row_format
from kvsift.kernels.scaled_weight import FP8, ScaledStack
from kvsift.kernels.score_pages import score_pages_triton
from kvsift.kernels.sketch import SketchLayout
from kvsift.kernels.sketch_append import write_newest_triton
from kvsift.kernels.sketch_attention import sketch_attention_triton
from kvsift.kernels.summarise_slots import summarise_slots_triton
from kvsift.types import Part

CASES = [  # (group, head_dim, page_size, kind, dtype)
    (1, 64, 8, "minmax_fp8", torch.float16),
    (3, 80, 16, "centroid_radius", torch.bfloat16),
    (8, 256, 32, "mean_std", torch.bfloat16),
    (2, 256, 16, "log_mass", torch.float32),
    (16, 128, 16, "minmax_fp8", torch.bfloat16),
]
SKETCHES = [  # (group, head_dim, page_size, bits, dtype)
    (1, 64, 4, 1, torch.float16),
    (4, 128, 16, 1, torch.bfloat16),
    (8, 256, 32, 2, torch.bfloat16),
    (2, 80, 128, 2, torch.float32),
    (16, 256, 16, 1, torch.bfloat16),
]
WIDE = [(8, 512, 16, "minmax", torch.bfloat16)], [(8, 512, 16, 1, torch.bfloat16)]


IN_8_BITS = [(1, 64, 8), (3, 80, 16), (4, 128, 16), (8, 256, 32)]  # (group, head_dim, page_size)


def launch_all(cases: list[Any], sketches: list[Any]) -> None:
    for group, head_dim, page_size, kind, dtype in cases:
        case = draw_case([300, 1], 2, group, head_dim, page_size, dtype, kind=kind, device="cpu")
        sinks = torch.zeros(2 * group, dtype=dtype)
        by_twins(*case[:4], *case.new_lists(group > 1), kind=kind, scale=1.0, softcap=3.0, sink_logit=sinks)
        no_twin = SUMMARIES[kind]._replace(features_twin=None)
        score_pages_triton(
            case.queries, case.summary, case.kv.table, case.spans, kind=no_twin, scale=1.0, shared=group > 1
        )
        part = Part(torch.zeros(1, 4, 3, head_dim, dtype=dtype), torch.zeros(1, 4, 3))
        merge_triton(part, part)
    for group, head_dim, page_size, bits, dtype in sketches:
        case = draw_case([300, 1], 2, group, head_dim, page_size, dtype, device="cpu")
        width = SketchLayout(bits, head_dim, page_size).width
        rows = torch.zeros(2, case.kv.keys.shape[1], width, dtype=torch.uint8)
        write_newest_triton(case.kv, bits, rows)
        how = {"bits": bits, "rest": group > 1, "softcap": 3.0 if group == 2 else None}
        spans = torch.tensor([[4, 280, 100, 300], [0, 0, 0, 1]], dtype=torch.int32)
        sketch_attention_triton(case.queries, case.kv, rows, spans, *case.new_lists(True, 124), scale=1.0, **how)
    for group, head_dim, page_size, _, dtype in cases:
        case = draw_case([300] * 8, 2, group, head_dim, page_size, dtype, device="cpu")
        for size in (1, 8):
            block_attention_triton(case.queries, case.kv, size, scale=1.0, softcap=3.0 if group == 3 else None)


def launch_of_hybrids() -> None:
    for group, head_dim in ((8, 64), (2, 256), (8, 512)):  # attention over windows, token by token
        case = draw_case([300, 1], 2, group, head_dim, 16, torch.bfloat16, device="cpu")
        lists = torch.zeros(2, 2, 128, dtype=torch.int32), torch.ones(2, 2, dtype=torch.int32)
        sinks = torch.zeros(2 * group, dtype=torch.bfloat16)
        page_attention_triton(case.queries, case.kv, *lists, scale=1.0, sink_logit=sinks, unit_size=1)
    for dtype in (torch.float32, torch.bfloat16):
        weight, experts = torch.zeros(4, 96, 64, dtype=dtype), torch.zeros(2, dtype=torch.int64)
        expert_linear_triton(torch.zeros(1, 64, dtype=dtype), weight, experts)
        expert_linear_triton(torch.zeros(2, 96, dtype=dtype), weight.mT, experts, torch.zeros(4, 64, dtype=dtype))
    for outs, ins in ((1, 256), (128, 128)):
        scales = torch.zeros(4, 256 // outs, 256 // ins)
        stack = ScaledStack(torch.zeros(4, 256, 256, dtype=FP8), scales, outs, ins)
        expert_linear_triton(torch.zeros(1, 256, dtype=torch.bfloat16), stack, experts)


def launch_over_blocks() -> None:
    pages = BlockPages(64, 16, 4)
    blocks, lengths = torch.zeros(2, 300, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    own = torch.zeros(2, 1200, dtype=torch.int32), torch.zeros_like(lengths)
    place_pages_triton(blocks, lengths, pages, own, torch.zeros(2, 4, dtype=torch.int64), lengths)
    for kind, dtype in product(("minmax", "minmax_fp8", "sketch1"), (torch.bfloat16, FP8)):
        keys = torch.zeros(2, 8, 16, 128, dtype=dtype)
        width, row_dtype = row_format(kind, 128, 16)
        rows = pages.new_rows(2, 2, width, row_dtype or torch.bfloat16, keys.device)
        new = torch.zeros(4, 2, 128, dtype=dtype)
        for count, tokens in ((4, None), (4, (new, new)), (4096, None)):
            slots = torch.zeros(count, dtype=torch.int64)
            for pdl in (False, True):
                summarise_slots_triton(kind, slots, keys, keys, rows, pages, tokens, pdl=pdl)


def print_shared_bytes(launch_all: Callable[[], None]) -> None:
    """Compile what is launched, and print each kernel with its bytes of shared memory."""
    launch = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        print(self.fn.__name__, kernel.metadata.shared)
        return kernel

    driver.set_active(Hopper())
    JITFunction.run = compile_only
    launch_all()


def launch_in_8_bits() -> None:
    for group, head_dim, page_size in IN_8_BITS:
        sizes = 2, group, head_dim, page_size, torch.bfloat16
        case = draw_case([300] * 8, *sizes, device="cpu", in_8_bits=True)
        for unit_size in (page_size, 1):
            page_attention_triton(case.queries, case.kv, *case.new_lists(True), scale=1.0, unit_size=unit_size)
        block_attention_triton(case.queries, case.kv, 8, scale=1.0)
        rows = torch.zeros(2, case.kv.keys.shape[1], 1024, dtype=torch.uint8)
        write_newest_triton(case.kv, 1, rows)
        sketch_attention_triton(
            case.queries, case.kv, rows, torch.zeros(8, 4, dtype=torch.int32), *case.new_lists(True), bits=1,
            rest=False, scale=1.0, softcap=3.0 if group == 3 else None,
        )  # fmt: skip
        summarise_slots_triton(
            "minmax", torch.zeros(4, dtype=torch.int64), case.kv.keys, case.kv.values, case.summary,
            BlockPages(page_size, page_size, 1),
        )  # fmt: skip


def launch_usual() -> None:
    launch_all(CASES, SKETCHES)
    launch_in_8_bits()
    launch_over_blocks()
    words, penalties = torch.zeros(8, 4008, dtype=torch.int32), torch.ones(3, 8)
    logits, counts = torch.zeros(8, 128256), torch.zeros(8, 128256, dtype=torch.int32)
    constrain_logits_triton(logits, counts, penalties, torch.zeros_like(logits), words)
    launch_of_hybrids()


if __name__ == "__main__":
    print_shared_bytes(launch_usual if sys.argv[1:] != ["wide"] else lambda: launch_all(*WIDE))
