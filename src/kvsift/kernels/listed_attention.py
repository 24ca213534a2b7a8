"""Attention over lists that another layer has chosen, in one launch of CUDA C++ (``sift/listed_step.cu``).

It takes the place of ``page_attention``'s Triton kernel on Hopper and later GPUs: keys and values of listed tokens are
on their way before the kernel in front has ended, and the blocks of a row merge their parts without a trip to memory.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvsift.kernels.cuda_module import arguments, compile_kernel, have_nvrtc
from kvsift.kernels.paged import PagedKV
from kvsift.native.shapes import SCALE_BYTES

PARTS = ("primitives", "copies", "attention", "listed_common", "merge", "listed_step")
SOURCES = tuple(f"sift/{name}.cu" for name in PARTS)
STAGES = 2  # with eight warps one block fits a multiprocessor beside products; with more it does not, and is slower
UNIT = 8  # tokens a warp attends together
MOST_TOKENS = 256  # of a block: with more, Triton's matrix products are faster
MOST_MEMBERS = 8  # blocks of a cluster, on every GPU

_ListedArguments = arguments(
    "queries keys values table lengths lists counts heads out visible sink dense_below",
    "key_head key_page key_token value_head value_page value_token",
    "max_pages num_kv_heads capacity share",
    "scale softcap",
)


def launch_takes(group: int, head_dim: int) -> bool:
    """Return whether single launches are compiled for so many query heads per KV head of this size."""
    return head_dim in (64, 128, 256, 512) and group <= 16 and group * head_dim <= 4096


def is_narrow(group: int, head_dim: int) -> bool:
    """Return whether registers have room for the sums of 16 warps."""
    return group <= 8 and head_dim <= 128


def listed_launch_runs(queries: Tensor, kv: PagedKV, units: Tensor, unit_size: int) -> bool:
    """Return whether ``listed_attention_cuda`` takes these shapes."""
    return (
        queries.is_cuda
        and queries.dtype in (torch.bfloat16, torch.float16)
        and kv.read_in_launches_of(queries.dtype)
        and launch_takes(queries.shape[1] // kv.num_kv_heads, kv.head_dim)
        and units.shape[1] == kv.num_kv_heads
        and units.stride()[1:] == (units.shape[2], 1)
        and have_nvrtc()
        and _share(kv, units.shape[2] * unit_size) <= MOST_TOKENS
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
    members, share = _members(kv), _share(kv, units.shape[2] * unit_size)
    group, warps = queries.shape[1] // kv.num_kv_heads, 4 if kv.head_dim == 512 else 8
    given = _ListedArguments(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors), *strides,
        kv.table.shape[1], kv.num_kv_heads, units.shape[2], share, scale, softcap or 0.0,
    )  # fmt: skip
    defines = {
        "G": group, "D": kv.head_dim, "PAGE": kv.page_size, "LIST_UNIT": unit_size,
        "HALF": int(queries.dtype == torch.float16), "KV8": int(kv.keys.element_size() == 1), "CODED": int(kv.coded),
        "WARPS": warps, "STAGES": STAGES, "MEMBERS": members, "MORE": 0, "CAPPED": int(softcap is not None),
        "SINK": int(sink_logit is not None), "ARGUMENT_BYTES": ctypes.sizeof(_ListedArguments),
    }  # fmt: skip
    scales = 2 * SCALE_BYTES if kv.coded else 0
    rings = warps * STAGES * UNIT * (2 * kv.head_dim * kv.keys.element_size() + scales)
    parts = 4 * warps * (group * (kv.head_dim + 3) + 3)  # of warps, behind which their weights lie
    shared_bytes = max(rings + 8 * MOST_TOKENS, parts)
    kernel = compile_kernel(
        SOURCES, "listed", tuple(defines.items()), warps * 32, shared_bytes, queries.device.index or 0
    )
    kernel.launch(kv.batch * kv.num_kv_heads * members, given, early=early, cluster=members)
    return out


def _members(kv: PagedKV) -> int:
    """Return the blocks that share a row, a power of two: one per multiprocessor, if there are few rows."""
    processors = torch.cuda.get_device_properties(kv.table.device).multi_processor_count
    room = max(1, processors // (kv.batch * kv.num_kv_heads))
    return min(MOST_MEMBERS, 1 << room.bit_length() - 1)


def _share(kv: PagedKV, tokens: int) -> int:
    """Return the most tokens of a member, of a list of ``tokens`` at most."""
    return -(-tokens // (UNIT * _members(kv))) * UNIT
