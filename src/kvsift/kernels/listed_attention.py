"""Attention over lists that another layer has chosen, in one launch of CUDA C++ (``sift/listed_step.cu``).

It takes the place of ``page_attention``'s Triton kernel on Hopper and later GPUs: keys and values of listed tokens are
on their way before the kernel in front has ended, and the kernel behind may start while tokens are attended.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvsift.kernels.cuda_module import Kernel, arguments, compile_kernel, have_nvrtc
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.split_attention import SplitSpace

PARTS = ("primitives", "listed_common", "attention", "gather", "merge", "listed_step")
SOURCES = tuple(f"sift/{name}.cu" for name in PARTS)
WARPS, UNIT = 8, 8  # of a block: two fit a multiprocessor, or one and a product; tokens a warp attends together
MOST_SHARED = 200 << 10  # bytes

_ListedArguments = arguments(
    "queries keys values table lengths lists counts heads out parts arrived visible sink dense_below",
    "key_head key_page key_token value_head value_page value_token",
    "max_pages num_kv_heads members capacity share",
    "scale softcap",
)


def listed_launch_runs(queries: Tensor, kv: PagedKV, units: Tensor, unit_size: int) -> bool:
    """Return whether ``listed_attention_cuda`` takes these shapes."""
    group = queries.shape[1] // kv.num_kv_heads
    return (
        queries.is_cuda
        and queries.dtype in (torch.bfloat16, torch.float16)
        and kv.read_in_launches_of(queries.dtype)
        and kv.head_dim in (64, 128)
        and units.shape[1] == kv.num_kv_heads
        and group <= 8
        and units.stride()[1:] == (units.shape[2], 1)
        and have_nvrtc()
        and _shared_bytes(kv, group, units.shape[2] * unit_size, listed_members(kv)) <= MOST_SHARED
    )


def listed_members(kv: PagedKV) -> int:
    """Return the blocks that share a row: as many as fill the device."""
    processors = torch.cuda.get_device_properties(kv.table.device).multi_processor_count
    return max(1, processors // (kv.batch * kv.num_kv_heads))


def listed_attention_cuda(
    queries: Tensor, kv: PagedKV, units: Tensor, counts: Tensor, *, scale: float, softcap: float | None = None,
    sink_logit: Tensor | None = None, space: SplitSpace | None = None, visible: Tensor | None = None,
    dense_below: Tensor | None = None, out: Tensor | None = None, unit_size: int | None = None,
    heads: Tensor | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """``page_attention`` over lists of KV heads, where ``listed_launch_runs``; their last unit holds the last token."""
    group, unit_size = queries.shape[1] // kv.num_kv_heads, unit_size or kv.page_size
    if space is None:
        rows = kv.batch * kv.num_kv_heads
        space = SplitSpace.make(rows, listed_members(kv), group, kv.head_dim, queries.device)
    _, members, record = space.parts.shape
    sink_logit = None if sink_logit is None else sink_logit.float()
    queries = queries.contiguous()
    out = torch.empty_like(queries) if out is None else out
    tensors = (
        queries, kv.keys, kv.values, kv.table, kv.lengths, units, counts, heads, out, *space, visible, sink_logit,
        dense_below,
    )  # fmt: skip
    strides = (stride * pool.element_size() for pool in (kv.keys, kv.values) for stride in pool.stride()[:3])
    share = _share(units.shape[2] * unit_size, members)
    given = _ListedArguments(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors), *strides,
        kv.table.shape[1], kv.num_kv_heads, members, units.shape[2], share, scale, softcap or 0.0,
    )  # fmt: skip
    defines = {
        "G": group, "D": kv.head_dim, "PAGE": kv.page_size, "LIST_UNIT": unit_size,
        "HALF": int(queries.dtype == torch.float16), "KV8": int(kv.keys.element_size() == 1), "WARPS": WARPS,
        "MORE": record - group * (kv.head_dim + 2) - 1, "CAPPED": int(softcap is not None),
        "SINK": int(sink_logit is not None), "ARGUMENT_BYTES": ctypes.sizeof(_ListedArguments),
    }  # fmt: skip
    kernel: Kernel = compile_kernel(
        SOURCES, "listed", tuple(defines.items()), WARPS * 32, MOST_SHARED, queries.device.index or 0
    )
    shared_bytes = _shared_bytes(kv, group, units.shape[2] * unit_size, members)
    kernel.launch(kv.batch * kv.num_kv_heads * members, given, early=early, shared_bytes=shared_bytes)
    return out


def _share(tokens: int, members: int) -> int:
    """The most tokens of a member, of a list of ``tokens`` at most."""
    return -(-tokens // (UNIT * members)) * UNIT


def _shared_bytes(kv: PagedKV, group: int, tokens: int, members: int) -> int:
    part = -(-(group * (kv.head_dim + 2)) // 4) * 4
    return 8 * _share(tokens, members) + 4 * (WARPS * part + group * max(WARPS, members))
