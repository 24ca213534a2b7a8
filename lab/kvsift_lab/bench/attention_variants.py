"""What is compared at a point of attention: its shape and bytes, buffers, our kernels, and the dense ones of torch and
FlashInfer, all on the same buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvsift.errors import InvalidValue, MissingPackage, NotEnoughMemory
from kvsift.kernels import sketch_launch
from kvsift.kernels.page_attention import SplitSpace, page_attention, split_count
from kvsift.kernels.page_summary import row_format, summarise
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.score_pages import score_pages
from kvsift.kernels.sifted_attention import SiftSpace, sifted_attention, single_launch_runs
from kvsift.kernels.sketch import SKETCHES
from kvsift.kernels.sketch_attention import sketch_attention
from kvsift.kernels.top_pages import visible_pages
from kvsift.layer.paged_decode import list_capacity, page_spans
from kvsift.plan.budget import Budget
from kvsift_lab.bench.timing import COLD_BYTES

DTYPE = torch.bfloat16
LARGEST_BYTES = 60 << 30  # of all buffers
SUMMARISED_NUMBERS = 1 << 27  # of keys, summarised at once: workspace is a few times as large
FLASHINFER_WORKSPACE = 128 << 20  # bytes, as its documentation recommends


@dataclass(frozen=True)
class AttentionPoint:
    """Attention of one decode step in one layer."""

    num_query_heads: int
    num_kv_heads: int
    context: int  # tokens of every sequence, the query's own included
    batch: int
    head_dim: int
    page_size: int
    budget: int
    sketch_budget: int = 1024

    def __post_init__(self) -> None:
        if self.num_query_heads % self.num_kv_heads:
            raise InvalidValue(
                f"shape {self.num_query_heads}/{self.num_kv_heads}: the query heads must be a multiple of the KV heads."
            )
        if self.context % self.page_size:
            raise InvalidValue(f"context {self.context} must be a multiple of the page size, {self.page_size}.")
        for kind in ("minmax", "sketch1"):
            budget, unit_size = self.lists(kind)
            budget.check(unit_size, selects=True)

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def group_size(self) -> int:
        return self.num_query_heads // self.num_kv_heads

    @property
    def max_pages(self) -> int:
        return self.context // self.page_size

    def lists(self, kind: str) -> tuple[Budget, int]:
        """Return the budget, with sinks and window, and the unit size of the lists that a kind of summary chooses."""
        return (
            (Budget(tokens=self.sketch_budget), 1) if kind in SKETCHES else (Budget(tokens=self.budget), self.page_size)
        )

    def capacity(self, kind: str) -> int:
        """Return the units that a list has room for."""
        budget, unit_size = self.lists(kind)
        return list_capacity(budget, self.context // unit_size, unit_size)

    def spans(self, kind: str, lengths: Tensor) -> Tensor:
        """Return the spans of every sequence in units, int32 [batch, 4]; see ``page_spans``."""
        budget, unit_size = self.lists(kind)
        return page_spans(budget, lengths, unit_size)

    @cached_property
    def counted(self) -> tuple[int, int]:
        """Candidate pages and visible pages of each list."""
        first, stop, selected, total = self.spans("minmax", torch.tensor([self.context]))[0].tolist()
        return stop - first, first + selected + total - stop

    @property
    def dense_bytes(self) -> int:
        """Bytes of keys and values of the whole context."""
        return 2 * self.batch * self.num_kv_heads * self.context * self.head_dim * DTYPE.itemsize

    def summary_bytes(self, kind: str) -> int:
        """Bytes of the summary rows of all candidates."""
        width, dtype = row_format(kind, self.head_dim, self.page_size)
        return self.batch * self.num_kv_heads * self.counted[0] * width * (dtype or DTYPE).itemsize

    def sparse_bytes(self, kind: str) -> int:
        """Bytes of the summary rows of all candidates, and of keys and values of the visible tokens."""
        visible = self.counted[1] * self.page_size
        if kind in SKETCHES:
            visible = min(self.sketch_budget, self.context)
        kv = 2 * self.batch * self.num_kv_heads * visible * self.head_dim * DTYPE.itemsize
        return self.summary_bytes(kind) + kv

    def num_sets(self, kinds: list[str], free_bytes: int) -> int:
        """Return how many sets of buffers keep every read cold; at least two.

        Raises:
            InputError: if not even two fit.
        """
        set_bytes = self.dense_bytes + sum(map(self.summary_bytes, kinds))
        if 2 * set_bytes > free_bytes:
            raise NotEnoughMemory(
                f"two sets of buffers need {2 * set_bytes / 2**30:.1f} GiB and {free_bytes / 2**30:.1f} GiB are free"
            )
        cold = ceil(COLD_BYTES / min(map(self.sparse_bytes, kinds))) + 1
        return max(2, min(cold, min(LARGEST_BYTES, free_bytes) // set_bytes))


@dataclass(frozen=True)
class Buffers:
    """Inputs of one launch."""

    queries: Tensor  # [batch, num_query_heads, head_dim]
    kv: PagedKV
    summaries: dict[str, Tensor]  # kind -> [num_kv_heads, num_pages, width]

    @classmethod
    def random(cls, point: AttentionPoint, kinds: list[str], device: torch.device, seed: int) -> Buffers:
        """Return normal numbers; the pages of a sequence are consecutive, so that dense kernels take a view."""
        torch.manual_seed(seed)
        num_pages = point.batch * point.max_pages
        pool = (point.num_kv_heads, num_pages, point.page_size, point.head_dim)
        keys, values = (torch.randn(pool, dtype=DTYPE, device=device) for _ in range(2))
        table = torch.arange(num_pages, dtype=torch.int32, device=device).view(point.batch, -1)
        lengths = torch.full((point.batch,), point.context, dtype=torch.int32, device=device)
        queries = torch.randn(point.batch, point.num_query_heads, point.head_dim, dtype=DTYPE, device=device)
        summaries = {}
        for kind in kinds:
            width, dtype = row_format(kind, point.head_dim, point.page_size)
            summaries[kind] = torch.empty(*pool[:2], width, dtype=dtype or DTYPE, device=device)
            fill_summary(kind, keys, values, summaries[kind])
        return cls(queries, PagedKV(keys, values, table, lengths), summaries)

    @property
    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, num_kv_heads, context, head_dim], views."""
        keys, values = (
            pool.flatten(1, 2).unflatten(1, (self.kv.batch, -1)).transpose(0, 1)
            for pool in (self.kv.keys, self.kv.values)
        )
        return keys, values


def fill_summary(kind: str, keys: Tensor, values: Tensor, rows: Tensor) -> None:
    """Write the summary rows of all pages of a pool, some pages at a time; every token counts."""
    num_kv_heads, num_pages, page_size, head_dim = keys.shape
    step = max(1, SUMMARISED_NUMBERS // (num_kv_heads * page_size * head_dim))
    valid = torch.ones(step, page_size, dtype=torch.bool, device=keys.device)
    for start in range(0, num_pages, step):
        pages = slice(start, min(start + step, num_pages))
        rows[:, pages] = summarise(kind, keys[:, pages], valid[: pages.stop - start], values[:, pages])


Attend = Callable[[int], Tensor]  # on the buffers of that number: [batch, num_query_heads, head_dim]
Build = Callable[[AttentionPoint, Sequence[Buffers]], Attend]


class SparseLaunch:
    """Scores, selection and attention of one step, in a single launch where that runs: of pages, or by sketches of
    tokens with an estimate of the rest.

    Args:
        point: the shape.
        sets: buffers.
        kind: of summary or sketch.
        early: each launch may start before the previous one ends, as in a captured step.

    Attributes:
        units, counts: the lists of the last launch.
        num_launches: of a step.
    """

    def __init__(self, point: AttentionPoint, sets: Sequence[Buffers], kind: str, early: bool = True) -> None:
        self._sets, self.kind = sets, kind
        queries, kv, device = sets[0].queries, sets[0].kv, sets[0].queries.device
        self.spans = point.spans(kind, kv.lengths)
        shape = (point.batch, point.num_kv_heads, point.capacity(kind))
        self.units = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(shape[:2], dtype=torch.int32, device=device)
        self._counted = torch.zeros(2, point.batch, dtype=torch.int64, device=device)  # visible, estimated
        space: Any  # of the single launch
        if kind in SKETCHES:
            single = sketch_launch.single_launch_runs(queries, kv, shape[2])
            space = sketch_launch.SketchSpace.make(kv, point.group_size, shape[2]) if single else None
            self.num_launches = 1 if single else 7
        else:
            single = single_launch_runs(queries, kv, sets[0].summaries[kind], self.units, kind)
            space = SiftSpace.make(kv, point.group_size) if single else None
            self.num_launches = 1 if single else 3
        self._options: dict[str, Any] = {"scale": point.scale, "space": space, "early": early}

    def __call__(self, number: int) -> Tensor:
        buffers, (visible, estimated) = self._sets[number], self._counted
        inputs = buffers.queries, buffers.kv, buffers.summaries[self.kind], self.spans, self.units, self.counts
        if self.kind in SKETCHES:
            return sketch_attention(
                *inputs, bits=SKETCHES[self.kind], rest=True, visible=visible, estimated=estimated, **self._options
            )
        return sifted_attention(*inputs, kind=self.kind, visible=visible, **self._options)


def separate_kernels(point: AttentionPoint, sets: Sequence[Buffers], kind: str) -> dict[str, Attend]:
    """Return the three kernels that the single launch replaces, each on outputs of the previous one."""
    spans, capacity = point.spans(kind, sets[0].kv.lengths), point.capacity(kind)
    visible = torch.zeros(point.batch, dtype=torch.int64, device=spans.device)
    space = _split_space(point, sets[0], capacity)

    def score(number: int) -> Tensor:
        buffers = sets[number]
        return score_pages(
            buffers.queries, buffers.summaries[kind], buffers.kv.table, spans, kind=kind, scale=point.scale, shared=True
        )

    scores = [score(number) for number in range(len(sets))]
    lists = [visible_pages(page_scores, spans, capacity) for page_scores in scores]

    def select(number: int) -> Tensor:
        return visible_pages(scores[number], spans, capacity, lists[number])[0]

    def attend(number: int) -> Tensor:
        buffers, (pages, counts) = sets[number], lists[number]
        return page_attention(
            buffers.queries, buffers.kv, pages, counts, scale=point.scale, space=space, visible=visible
        )

    return {"score_pages": score, "visible_pages": select, "page_attention": attend}


def ours_dense(point: AttentionPoint, sets: Sequence[Buffers]) -> Attend:
    """Return our own kernel over all pages."""
    visible = torch.zeros(point.batch, dtype=torch.int64, device=sets[0].queries.device)
    space = _split_space(point, sets[0], None)

    def attend(number: int) -> Tensor:
        buffers = sets[number]
        return page_attention(buffers.queries, buffers.kv, None, None, scale=point.scale, space=space, visible=visible)

    return attend


def sdpa(backend: SDPBackend) -> Build:
    """Return torch's fused attention on one of its backends."""

    def build(point: AttentionPoint, sets: Sequence[Buffers]) -> Attend:
        def attend(number: int) -> Tensor:
            buffers = sets[number]
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    buffers.queries.unsqueeze(2), *buffers.dense, scale=point.scale, enable_gqa=point.group_size > 1
                ).squeeze(2)

        return attend

    return build


def flashinfer(tensor_cores: bool) -> Build:
    """Return FlashInfer's decode: over one tensor for one sequence, over pages for several."""

    def build(point: AttentionPoint, sets: Sequence[Buffers]) -> Attend:
        try:
            import flashinfer
        except ImportError as error:
            raise MissingPackage(f"flashinfer cannot be imported ({error}); pip install flashinfer-python") from None
        if point.batch > 1:
            return _flashinfer_pages(flashinfer, point, sets, tensor_cores)

        def attend(number: int) -> Tensor:
            buffers = sets[number]
            output: Tensor = flashinfer.single_decode_with_kv_cache(
                buffers.queries[0], *(tensor[0] for tensor in buffers.dense), kv_layout="HND",
                use_tensor_cores=tensor_cores, sm_scale=point.scale,
            )  # fmt: skip
            return output.unsqueeze(0)

        return attend

    return build


def _flashinfer_pages(flashinfer: object, point: AttentionPoint, sets: Sequence[Buffers], tensor_cores: bool) -> Attend:
    device, batch = sets[0].queries.device, point.batch
    workspace = torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    # fa2, as its function for one sequence
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(  # type: ignore[attr-defined]
        workspace, "HND", use_tensor_cores=tensor_cores, backend="fa2"
    )
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32, device=device) * point.max_pages, sets[0].kv.table.flatten(),
        torch.full((batch,), point.page_size, dtype=torch.int32, device=device), point.num_query_heads,
        point.num_kv_heads, point.head_dim, point.page_size, q_data_type=sets[0].queries.dtype,
        kv_data_type=sets[0].kv.keys.dtype, sm_scale=point.scale,
    )  # fmt: skip

    def attend(number: int) -> Tensor:
        buffers = sets[number]
        pools = tuple(pool.transpose(0, 1) for pool in buffers.kv[:2])  # [num_pages, num_kv_heads, page_size, head_dim]
        output: Tensor = wrapper.run(buffers.queries, pools)
        return output

    return attend


BASELINES: dict[str, dict[str, Build]] = {  # name on the command line -> variants
    "sdpa-flash": {"sdpa-flash": sdpa(SDPBackend.FLASH_ATTENTION)},
    "sdpa-cudnn": {"sdpa-cudnn": sdpa(SDPBackend.CUDNN_ATTENTION)},
    "flashinfer": {"flashinfer": flashinfer(False), "flashinfer-tc": flashinfer(True)},
    "ours-dense": {"ours-dense": ours_dense},
}


def _split_space(point: AttentionPoint, buffers: Buffers, capacity: int | None) -> SplitSpace:
    rows = point.batch * point.num_kv_heads
    splits = split_count(buffers.kv, capacity, rows)
    return SplitSpace.make(rows, splits, point.group_size, point.head_dim, buffers.queries.device)
