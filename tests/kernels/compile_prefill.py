"""Compile the kernels of prefill for Hopper on a machine without a GPU.

Prints a line per launch: kernel, and bytes of shared memory. Run in a process of its own, as ``compile_for_hopper``.
"""

import torch
from kernels.compile_decode import print_shared_bytes

from kvsift.kernels import rotary
from kvsift.kernels.extremes import extremes_triton
from kvsift.kernels.list_slots import list_slots_triton
from kvsift.kernels.pick_queries import pick_queries_triton
from kvsift.kernels.probe_scores import probe_scores_triton
from kvsift.kernels.segment_attention import Rows, Span, segment_attention_triton
from kvsift.kernels.top_pages import visible_pages_triton
from kvsift.kernels.unlikeness import unlikeness_triton

CASES = [  # (KV heads, group, head_dim, page_size, dtype)
    (8, 4, 128, 16, torch.bfloat16),
    (1, 2, 256, 16, torch.bfloat16),
    (1, 2, 128, 8, torch.float32),
]


def launch_all() -> None:
    for kv_heads, group, head_dim, page_size, dtype in CASES:
        heads, tokens = kv_heads * group, 1024
        queries = torch.zeros(tokens, heads, head_dim, dtype=dtype).transpose(0, 1)
        pool = torch.zeros(kv_heads, tokens // page_size, page_size, head_dim, dtype=dtype)
        rows = Rows(pool, pool, torch.arange(tokens // page_size, dtype=torch.int32))
        spans = [Span(0, 512, 0), Span(512, 1024, 512)]
        slots = torch.zeros(2, kv_heads, 100, dtype=torch.int32)
        counts = torch.full((2, kv_heads), 100, dtype=torch.int32)
        segment_attention_triton(queries, rows, 0, spans, slots, counts, 0.1, None if group > 2 else 20.0)
        list_slots_triton(slots, counts, 1 if group > 2 else 32, rows, 2 * kv_heads)
        probes = torch.zeros(2, kv_heads, 16, head_dim, dtype=dtype)
        scores = probe_scores_triton(probes, pool, rows.table, slice(4, 1020), cosine=True, mean=group == 2)
        spans = torch.zeros(2, 4, dtype=torch.int32)
        visible_pages_triton(scores.repeat(1, 1, 20), spans, 1000 if group > 2 else 2000)
        unlike = unlikeness_triton(queries, 2, 16)
        pick_queries_triton(queries, unlike, kv_heads, 16, shared=group > 2, mean=page_size > 8, unit=True)
        extremes_triton(queries, 512)
        heads_of = torch.zeros(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
        angles, norm = torch.zeros(tokens, head_dim, dtype=dtype), torch.ones(head_dim, dtype=dtype)
        rotary._rotate_triton(heads_of, angles, angles, heads, kv_heads, norm, None, 1e-6)


if __name__ == "__main__":
    print_shared_bytes(launch_all)
