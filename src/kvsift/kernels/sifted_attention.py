"""One decode step of page-sparse attention: score, choose, attend, merge; in a single launch where the GPU allows it.

The launch is CUDA C++ (the folder ``sift``). The three Triton kernels do the same and take every shape, but their fixed
costs are more than the traffic of a whole step: at 32K tokens and 32 KV heads of an H200 they take 45.6 microseconds,
the launch 25.6, and the bytes 14.9 (results/attention-h200).
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from kvsift.kernels.cuda_module import Kernel, arguments, compile_kernel, have_nvrtc
from kvsift.kernels.listed_attention import is_narrow, launch_takes
from kvsift.kernels.page_attention import page_attention
from kvsift.kernels.page_summary import Kind, find_kind
from kvsift.kernels.paged import PagedKV, SpaceShape, new_space
from kvsift.kernels.score_pages import score_pages
from kvsift.kernels.top_pages import visible_pages
from kvsift.kernels.triton_shim import power_of_two

PARTS = ("primitives", "copies", "attention", "common", "scores", "choice", "pages", "merge", "members", "step")
SOURCES = tuple(f"sift/{name}.cu" for name in PARTS)
STAGE_BYTES = 4096  # of a warp's ring
FEWEST_KEYS, KEYS = 2048, 8192  # scores compared at once, as few as do; more pages are cut to the best groups first
GROUP_PAGES = 8


class SiftSpace(NamedTuple):
    """Workspace of the single launch, shared by all layers of a model, see ``SketchSpace``."""

    scores: Tensor  # float32 [rows, max_pages, rounded up to 32]
    maxima: Tensor  # float32 [rows, of that / GROUP_PAGES], largest score of every group of candidates
    parts: Tensor  # int64 [rows, members, record], float32 with the number of the launch
    launches: Tensor  # int32 [rows, 2], zero at first: numbers of launches, and of members that have ever scored

    @classmethod
    def make(cls, kv: PagedKV, group: int) -> SiftSpace:
        return cls(*new_space(cls.shapes(kv, group), kv.keys.device))

    @classmethod
    def shapes(cls, kv: PagedKV, group: int) -> tuple[SpaceShape, ...]:
        rows = kv.batch * kv.num_kv_heads
        scores = -(-kv.table.shape[1] // 32) * 32
        processors = torch.cuda.get_device_properties(kv.keys.device).multi_processor_count
        members = max(1, processors // rows)  # all of them run at once, so they may wait for each other
        return (
            SpaceShape((rows, scores), torch.float32, lasts=False),
            SpaceShape((rows, scores // GROUP_PAGES), torch.float32, lasts=False),
            SpaceShape((rows, members, group * (kv.head_dim + 2)), torch.int64),
            SpaceShape((rows, 2), torch.int32),
        )


def sifted_attention(
    queries: Tensor, kv: PagedKV, summary: Tensor, spans: Tensor, pages: Tensor, counts: Tensor, *, kind: Kind,
    scale: float, softcap: float | None = None, sink_logit: Tensor | None = None, space: SiftSpace | None = None,
    visible: Tensor | None = None, dense_below: Tensor | None = None, out: Tensor | None = None, early: bool = False,
    ranked: int | None = None,
) -> Tensor:  # fmt: skip
    """Return attention of one query per sequence over its sinks, its best pages and its window.

    Args:
        queries: [batch, num_query_heads, head_dim].
        kv: the cache, the queries' own tokens included.
        summary: [num_kv_heads, num_pages, width], packed rows by physical page.
        spans: int32 [batch, 4]: first candidate page, the page behind the last, pages to choose, pages held.
        pages: int32 [batch, num_rows, capacity], written: the visible pages. num_rows is num_kv_heads if query heads
            share a list, else num_query_heads.
        counts: int32 [batch, num_rows], written.
        kind: kind of summary, or its name.
        scale, softcap, sink_logit, visible: as in ``page_attention``.
        dense_below: int32 [batch]; sequences shorter than this are left out.
        out: written where a sequence is attended; a new one by default.
        space: kept between launches; made here by default.
        early: the launch may start while the kernel before is still running, which then must not write the table, the
            spans or summaries of candidates.
        ranked: most pages of a list of which some are left out; by default what a list holds. Fewer are chosen faster.

    Returns:
        [batch, num_query_heads, head_dim].
    """
    if single_launch_runs(queries, kv, summary, pages, kind):
        return sifted_attention_cuda(
            queries, kv, summary, spans, pages, counts, kind=kind, scale=scale, softcap=softcap, sink_logit=sink_logit,
            space=space, visible=visible, dense_below=dense_below, out=out, early=early, ranked=ranked,
        )  # fmt: skip
    scores = score_pages(
        queries, summary, kv.table, spans, kind=kind, scale=scale, shared=pages.shape[1] == kv.num_kv_heads
    )
    visible_pages(scores, spans, pages.shape[2], out=(pages, counts))
    return page_attention(
        queries, kv, pages, counts, scale=scale, softcap=softcap, sink_logit=sink_logit, visible=visible,
        dense_below=dense_below, out=out,
    )  # fmt: skip


def single_launch_runs(queries: Tensor, kv: PagedKV, summary: Tensor, pages: Tensor, kind: Kind) -> bool:
    """Return whether the single launch takes these shapes; the three kernels take the rest."""
    group, capacity = queries.shape[1] // kv.num_kv_heads, pages.shape[2]
    shapes = (
        queries.is_cuda
        and queries.dtype in (torch.bfloat16, torch.float16)
        and kv.read_in_launches_of(queries.dtype)
        and launch_takes(group, kv.head_dim)
        and kv.page_size % 8 == 0
        and pages.shape[1] == kv.num_kv_heads
        and find_kind(kind).cuda_features is not None
        and summary.shape[2] == 2 * kv.head_dim
        and summary.dtype in (queries.dtype, torch.float8_e4m3fn)
        and max(capacity * GROUP_PAGES, kv.table.shape[1] / GROUP_PAGES) <= KEYS
        and summary.stride(2) == 1
    )
    return shapes and have_nvrtc()


_SiftArguments = arguments(
    "queries keys values table lengths summary spans pages counts out scores maxima parts launches visible sink "
    "dense_below",
    "summary_head summary_page key_head key_page key_token value_head value_page value_token",
    "max_pages row_scores num_kv_heads members",
    "scale softcap",
)


def sifted_attention_cuda(
    queries: Tensor, kv: PagedKV, summary: Tensor, spans: Tensor, pages: Tensor, counts: Tensor, *, kind: Kind,
    scale: float, softcap: float | None = None, sink_logit: Tensor | None = None, space: SiftSpace | None = None,
    visible: Tensor | None = None, dense_below: Tensor | None = None, out: Tensor | None = None, early: bool = False,
    ranked: int | None = None,
) -> Tensor:  # fmt: skip
    group = queries.shape[1] // kv.num_kv_heads
    space = SiftSpace.make(kv, group) if space is None else space
    sink_logit = None if sink_logit is None else sink_logit.float()
    queries = queries.contiguous()
    out = torch.empty_like(queries) if out is None else out
    tensors = (
        queries, kv.keys, kv.values, kv.table, kv.lengths, summary, spans, pages, counts, out, *space, visible,
        sink_logit, dense_below,
    )  # fmt: skip
    sizes = [stride * summary.element_size() for stride in summary.stride()[:2]]
    sizes += [stride * kv.keys.element_size() for pool in (kv.keys, kv.values) for stride in pool.stride()[:3]]
    numbers = (kv.table.shape[1], space.scores.shape[1], kv.num_kv_heads, space.parts.shape[1])
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    given = _SiftArguments(*pointers, *sizes, *numbers, scale, softcap or 0.0)
    most = (pages.shape[2], pages.shape[2] if ranked is None else ranked)
    kernel = _kernel(queries, kv, summary, most, kind, softcap is not None, sink_logit is not None)
    kernel.launch(space.parts.shape[0] * space.parts.shape[1], given, early=early)
    return out


def _keys(max_pages: int, ranked: int) -> int:
    """Return the fewest that suffice: every group of pages, and all pages of the groups that a list may come from."""
    return max(FEWEST_KEYS, power_of_two(max(-(-max_pages // GROUP_PAGES), ranked * GROUP_PAGES)))


def _kernel(
    queries: Tensor, kv: PagedKV, summary: Tensor, most: tuple[int, int], kind: Kind, capped: bool, sink: bool
) -> Kernel:
    features, (capacity, ranked) = find_kind(kind).cuda_features, most
    assert features is not None
    group = queries.shape[1] // kv.num_kv_heads
    # a block takes a whole multiprocessor; each of its warps has a ring of stages
    warps, stages = (16, 3) if is_narrow(group, kv.head_dim) else (8, 5)
    defines: dict[str, int | str] = {
        "G": group, "D": kv.head_dim, "PAGE": kv.page_size,
        "FIRST_FEATURE": features[0], "SECOND_FEATURE": features[1], "ARGUMENT_BYTES": ctypes.sizeof(_SiftArguments),
        "HALF": int(queries.dtype == torch.float16), "KV8": int(kv.keys.element_size() == 1),
        "CODED": int(kv.coded),
        "FP8": int(summary.element_size() == 1), "WARPS": warps, "STAGES": stages, "CAPACITY": capacity,
        "CAPPED": int(capped), "SINK": int(sink),
        "KEYS": _keys(kv.table.shape[1], ranked), "MORE": 0,
    }  # fmt: skip
    return compile_kernel(
        SOURCES, "sift", tuple(defines.items()), warps * 32, warps * stages * STAGE_BYTES,
        queries.device.index or 0,
    )  # fmt: skip
