"""Attention over lists that another layer has chosen, in one launch of CUDA C++ (``sift/listed_step.cu``).

It takes the place of ``page_attention``'s Triton kernel on Hopper and later GPUs: keys and values of listed tokens are
on their way before the kernel in front has ended, and the blocks of a row merge their parts without a trip to memory.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from kvsift.kernels.cuda_module import Kernel, arguments, compile_kernel, have_nvrtc
from kvsift.kernels.paged import PagedKV

PARTS = ("primitives", "copies", "listed_common", "attention", "merge", "listed_step")
SOURCES = tuple(f"sift/{name}.cu" for name in PARTS)
WARPS = 8  # of a block: one fits a multiprocessor beside a product that is launched early
UNIT = 8  # tokens a warp attends together
MOST_STAGES = 3  # of a warp's units, under way together
MOST_TOKENS = 256  # of a block: with more, Triton's matrix products are faster
MOST_MEMBERS = 8  # blocks of a cluster, on every GPU
MOST_SHARED = 100 << 10  # bytes

_ListedArguments = arguments(
    "queries keys values table lengths lists counts heads out visible sink dense_below",
    "key_head key_page key_token value_head value_page value_token",
    "max_pages num_kv_heads capacity share",
    "scale softcap",
)


def listed_launch_runs(queries: Tensor, kv: PagedKV, units: Tensor, unit_size: int) -> bool:
    """Return whether ``listed_attention_cuda`` takes these shapes."""
    return (
        queries.is_cuda
        and queries.dtype in (torch.bfloat16, torch.float16)
        and kv.read_in_launches_of(queries.dtype)
        and kv.head_dim in (64, 128)
        and units.shape[1] == kv.num_kv_heads
        and queries.shape[1] <= 8 * kv.num_kv_heads
        and units.stride()[1:] == (units.shape[2], 1)
        and have_nvrtc()
        and _Form.of(kv, units.shape[2] * unit_size).share <= MOST_TOKENS
    )


def listed_attention_cuda(
    queries: Tensor, kv: PagedKV, units: Tensor, counts: Tensor, *, scale: float, softcap: float | None = None,
    sink_logit: Tensor | None = None, visible: Tensor | None = None, dense_below: Tensor | None = None,
    out: Tensor | None = None, unit_size: int | None = None, heads: Tensor | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """``page_attention`` over lists of KV heads, where ``listed_launch_runs``; the last unit of a list holds the
    sequence's last token."""
    unit_size = unit_size or kv.page_size
    sink_logit = None if sink_logit is None else sink_logit.float()
    queries = queries.contiguous()
    out = torch.empty_like(queries) if out is None else out
    tensors = (
        queries, kv.keys, kv.values, kv.table, kv.lengths, units, counts, heads, out, visible, sink_logit, dense_below,
    )  # fmt: skip
    strides = (stride * pool.element_size() for pool in (kv.keys, kv.values) for stride in pool.stride()[:3])
    form = _Form.of(kv, units.shape[2] * unit_size)
    given = _ListedArguments(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors), *strides,
        kv.table.shape[1], kv.num_kv_heads, units.shape[2], form.share, scale, softcap or 0.0,
    )  # fmt: skip
    defines = {
        "G": queries.shape[1] // kv.num_kv_heads, "D": kv.head_dim, "PAGE": kv.page_size, "LIST_UNIT": unit_size,
        "HALF": int(queries.dtype == torch.float16), "KV8": int(kv.keys.element_size() == 1), "WARPS": WARPS,
        "STAGES": form.stages, "MEMBERS": form.members, "MORE": 0, "CAPPED": int(softcap is not None),
        "SINK": int(sink_logit is not None), "ARGUMENT_BYTES": ctypes.sizeof(_ListedArguments),
    }  # fmt: skip
    kernel: Kernel = compile_kernel(
        SOURCES, "listed", tuple(defines.items()), WARPS * 32, MOST_SHARED, queries.device.index or 0
    )
    blocks = kv.batch * kv.num_kv_heads * form.members
    kernel.launch(blocks, given, early=early, shared_bytes=form.shared_bytes, cluster=form.members)
    return out


class _Form(NamedTuple):
    """How lists of a length are attended."""

    members: int  # blocks that share a row, a power of two: one per multiprocessor, if there are few rows
    share: int  # most tokens of a member
    stages: int  # of a warp
    shared_bytes: int  # of a block

    @classmethod
    def of(cls, kv: PagedKV, tokens: int) -> _Form:
        processors = torch.cuda.get_device_properties(kv.table.device).multi_processor_count
        room = max(1, processors // (kv.batch * kv.num_kv_heads))
        members = min(MOST_MEMBERS, 1 << room.bit_length() - 1)
        share = -(-tokens // (UNIT * members)) * UNIT
        stages = max(2, min(MOST_STAGES, share // (WARPS * UNIT)))
        rings = WARPS * stages * UNIT * 2 * kv.head_dim * kv.keys.element_size()
        return cls(members, share, stages, rings + 8 * share)
