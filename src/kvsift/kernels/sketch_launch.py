"""The single launch of ``kernels.sketch_attention``: CUDA C++, the files ``sift/sketch_*.cu``."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from kvsift.kernels.cuda_module import Kernel, arguments, compile_kernel, have_nvrtc, in_host_memory
from kvsift.kernels.listed_attention import is_narrow, launch_takes
from kvsift.kernels.paged import PagedKV, SpaceShape, new_space
from kvsift.kernels.sketch import ERROR
from kvsift.native.sketch_format import SketchLayout

SOURCES = tuple(
    f"sift/{name}.cu"
    for name in (
        "primitives", "attention", "sketch_common", "merge", "members", "sketch_weights", "sketch_choice",
        "sketch_rest", "sketch_step",
    )
)  # fmt: skip
SUB, TILE = 16, 8  # tokens weighed together; of them, weighed by a warp
BINS, COARSE = 4096, 64
MOST_TOKENS = 1 << 19  # of a member, whose pages take shared memory
MOST_SHARED = 227 << 10  # bytes of a block
MOST_SPILL = 1 << 30  # bytes of a batch that lie in global memory; larger ones are left to the Triton kernels


class SketchSpace(NamedTuple):
    """Workspace of the single launch, shared by all layers of a model. What blocks tell each other brings the number of
    the launch, so that nothing is cleared between launches."""

    past: Tensor  # int64 [rows, group, 2, warps], sums of sinks and window that come over the bus
    bins: Tensor  # int32 [rows, members, BINS], counts with the last bits of that number
    coarse: Tensor  # int32 [rows, members, COARSE], the same
    spill: Tensor  # uint8 [rows, members, bytes of a member's numbers that find no shared memory]
    parts: Tensor  # int64 [rows, members, record], float32 with the number of the launch
    launches: Tensor  # int32 [rows, 2], zero at first: numbers of launches, and of those that ranked tokens

    @classmethod
    def make(cls, kv: PagedKV, group: int, capacity: int) -> SketchSpace:
        return cls(*new_space(cls.shapes(kv, group, capacity), kv.table.device))

    @classmethod
    def shapes(cls, kv: PagedKV, group: int, capacity: int) -> tuple[SpaceShape, ...]:
        rows, members = kv.batch * kv.num_kv_heads, _members(kv)
        record = group * (kv.head_dim + 3)
        spill = _spill_bytes(kv, group, capacity, members)
        return (
            SpaceShape((rows, group, 2, _warps(group, kv.head_dim)), torch.int64),
            SpaceShape((rows, members, BINS), torch.int32),
            SpaceShape((rows, members, COARSE), torch.int32),
            SpaceShape((rows, members, spill), torch.uint8, lasts=False),
            SpaceShape((rows, members, record), torch.int64),
            SpaceShape((rows, 2), torch.int32),
        )


def _warps(group: int, head_dim: int) -> int:
    """Warps of a block, which takes a whole multiprocessor."""
    return 16 if is_narrow(group, head_dim) else 8


def _members(kv: PagedKV) -> int:
    """Blocks per row: all of them run at once, so they may wait for each other."""
    processors = torch.cuda.get_device_properties(kv.table.device).multi_processor_count
    return max(1, processors // (kv.batch * kv.num_kv_heads))


def _own_subs(kv: PagedKV, members: int) -> int:
    """The most subs of a member."""
    subs = kv.table.shape[1] * kv.page_size // SUB
    return -(-subs // (members * TILE)) * TILE


def _list_length(capacity: int) -> int:
    return -(-capacity // 4) * 4


def _numbers(group: int) -> tuple[int, ...]:
    """Bytes per sub of what may lie in global memory, in the order in which it goes there: bases; bins; unseen weights
    and scales."""
    return 4 * group, 2 * SUB, 4 * group + 4


def _most_dynamic(group: int, head_dim: int) -> int:
    """The most bytes of dynamic shared memory: what the queries of a row leave, in three forms, and 4 KiB of sums."""
    heads = -(-group // 8) * 8
    queries = heads * (2 * (head_dim + 32) + 2 * head_dim + 32 * max(4, head_dim // 32))
    return MOST_SHARED - queries - (4 << 10)


def _spilled(kv: PagedKV, group: int, capacity: int, members: int) -> int:
    """How many of ``_numbers`` find no shared memory."""
    most = _most_dynamic(group, kv.head_dim)
    levels = range(len(_numbers(group)))
    fits = (n for n in levels if _shared_bytes(kv, group, capacity, members, spilled=n) <= most)
    return next(fits, len(levels))


def _spill_bytes(kv: PagedKV, group: int, capacity: int, members: int) -> int:
    """Bytes of a member in global memory."""
    return _own_subs(kv, members) * sum(_numbers(group)[: _spilled(kv, group, capacity, members)])


def _shared_bytes(kv: PagedKV, group: int, capacity: int, members: int, *, spilled: int) -> int:
    """Bytes of dynamic shared memory: ``Arrays`` of the source, and parts in their place."""
    arrays = 4 * BINS + 8 * _list_length(capacity) + _own_subs(kv, members) * (4 + sum(_numbers(group)[spilled:]))
    part, warps = -(-(group * (kv.head_dim + 2)) // 4) * 4, _warps(group, kv.head_dim)
    return max(arrays, 4 * (warps * part + group * warps))


def single_launch_runs(queries: Tensor, kv: PagedKV, capacity: int) -> bool:
    """Return whether the single launch takes these shapes; the Triton kernels take the rest."""
    group = queries.shape[1] // kv.num_kv_heads
    shapes = (
        queries.is_cuda
        and queries.dtype in (torch.bfloat16, torch.float16)
        and kv.read_in_launches_of(queries.dtype)
        and launch_takes(group, kv.head_dim)
        and kv.page_size % SUB == 0
    )
    if not shapes or not have_nvrtc():
        return False
    members = _members(kv)
    if kv.batch * kv.num_kv_heads * members * _spill_bytes(kv, group, capacity, members) > MOST_SPILL:
        return False
    least = _shared_bytes(kv, group, capacity, members, spilled=len(_numbers(group)))
    return least <= _most_dynamic(group, kv.head_dim) and _own_subs(kv, members) * SUB <= MOST_TOKENS


_SketchArguments = arguments(
    "queries keys values table lengths rows spans tokens counts out past bins coarse spill parts launches visible "
    "estimated sink dense_below",
    "row_head row_page key_head key_page key_token value_head value_page value_token spill_bytes",
    "max_pages num_kv_heads members own_subs",
    "scale softcap",
)


def sketch_attention_cuda(
    queries: Tensor, kv: PagedKV, rows: Tensor, spans: Tensor, tokens: Tensor, counts: Tensor, *, bits: int, rest: bool,
    scale: float, softcap: float | None = None, sink_logit: Tensor | None = None, visible: Tensor | None = None,
    estimated: Tensor | None = None, dense_below: Tensor | None = None, out: Tensor | None = None,
    space: SketchSpace | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    group, capacity = queries.shape[1] // kv.num_kv_heads, tokens.shape[2]
    space = SketchSpace.make(kv, group, capacity) if space is None else space
    sink_logit = None if sink_logit is None else sink_logit.float()
    queries = queries.contiguous()
    out = torch.empty_like(queries) if out is None else out
    tensors = (
        queries, kv.keys, kv.values, kv.table, kv.lengths, rows, spans, tokens, counts, out, *space, visible, estimated,
        sink_logit, dense_below,
    )  # fmt: skip
    sizes = [*rows.stride()[:2]]
    sizes += [stride * kv.keys.element_size() for pool in (kv.keys, kv.values) for stride in pool.stride()[:3]]
    members, spill = space.parts.shape[1], space.spill.shape[2]
    numbers = (kv.table.shape[1], kv.num_kv_heads, members, _own_subs(kv, members))
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    given = _SketchArguments(*pointers, *sizes, spill, *numbers, scale, softcap or 0.0)
    layout, spilled = SketchLayout(bits, kv.head_dim, kv.page_size), _spilled(kv, group, capacity, members)
    switches = {
        "HALF": queries.dtype == torch.float16, "KV8": kv.keys.element_size() == 1, "CODED": kv.coded, "REST": rest,
        "SPILL": spilled, "CAPPED": softcap is not None, "SINK": sink_logit is not None,
        "OVER_BUS": in_host_memory(kv.keys),
    }  # fmt: skip
    shared = _shared_bytes(kv, group, capacity, members, spilled=spilled)
    kernel = _kernel(layout, group, capacity, switches, shared, queries.device)
    kernel.launch(space.parts.shape[0] * members, given, early=early)
    return out


def _kernel(
    layout: SketchLayout, group: int, capacity: int, switches: dict[str, int], shared: int, device: torch.device
) -> Kernel:
    warps = _warps(group, layout.head_dim)
    defines: dict[str, int | str] = {
        "G": group, "D": layout.head_dim, "PAGE": layout.page_size, "BITS": layout.bits, "FACTORS": layout.factors,
        "KEY_MEAN": layout.key_mean, "VALUE_MEAN": layout.value_mean, "SCALES": layout.scales,
        "ERROR": f"{ERROR[layout.bits]}f", "CAPACITY": capacity, "LIST": _list_length(capacity), "WARPS": warps,
        "MORE": group, "ARGUMENT_BYTES": ctypes.sizeof(_SketchArguments),
        **{name: int(value) for name, value in switches.items()},
    }  # fmt: skip
    return compile_kernel(SOURCES, "sketch", tuple(defines.items()), warps * 32, shared, device.index or 0)
