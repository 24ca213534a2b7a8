"""Variants compared at a point: our kernels, and the dense ones of torch and FlashInfer, all on the same buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvsift.errors import InputError
from kvsift.kernels import sketch_launch
from kvsift.kernels.page_attention import SplitSpace, page_attention, split_count
from kvsift.kernels.score_pages import score_pages
from kvsift.kernels.sifted_attention import SiftSpace, sifted_attention, single_launch_runs
from kvsift.kernels.sketch import SKETCHES
from kvsift.kernels.sketch_attention import sketch_attention
from kvsift.kernels.top_pages import visible_pages
from kvsift.layer.paged_decode import list_capacity, page_spans
from kvsift_lab.bench.attention_point import AttentionPoint, Buffers

FLASHINFER_WORKSPACE = 128 << 20  # bytes, as its documentation recommends

Attend = Callable[[int], Tensor]  # on the buffers of that number: [batch, num_query_heads, head_dim]
Build = Callable[[AttentionPoint, Sequence[Buffers]], Attend]


class SparseLaunch:
    """Scores, selection and attention of one step.

    Args:
        point: the shape.
        sets: buffers.
        kind: of summary.
        early: each launch may start before the previous one ends, as in a captured step.
    """

    def __init__(self, point: AttentionPoint, sets: Sequence[Buffers], kind: str, early: bool = True) -> None:
        self._point, self._sets, self.kind, self._early = point, sets, kind, early
        buffers, device = sets[0], sets[0].queries.device
        self.spans = point.spans(buffers.kv.lengths)
        shape = (point.batch, point.num_kv_heads, point.capacity)
        self.pages = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(shape[:2], dtype=torch.int32, device=device)
        self._visible = torch.zeros(point.batch, dtype=torch.int64, device=device)
        self.single_launch = single_launch_runs(buffers.queries, buffers.kv, buffers.summaries[kind], self.pages, kind)
        self._space = SiftSpace.make(buffers.kv, point.group_size) if self.single_launch else None

    def __call__(self, number: int) -> Tensor:
        buffers = self._sets[number]
        return sifted_attention(
            buffers.queries, buffers.kv, buffers.summaries[self.kind], self.spans, self.pages, self.counts,
            kind=self.kind, scale=self._point.scale, space=self._space, visible=self._visible, early=self._early,
        )  # fmt: skip


class SketchLaunch:
    """Weights, selection, estimate and attention of one step, in a single launch where that runs.

    Args:
        point: the shape.
        sets: buffers.
        kind: of sketch.
    """

    def __init__(self, point: AttentionPoint, sets: Sequence[Buffers], kind: str) -> None:
        self._point, self._sets, self.kind = point, sets, kind
        kv, device = sets[0].kv, sets[0].queries.device
        self.spans = page_spans(point.sketch_rule, kv.lengths, 1)
        shape = (point.batch, point.num_kv_heads, list_capacity(point.sketch_rule, point.context, 1))
        self.tokens = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(shape[:2], dtype=torch.int32, device=device)
        self.counted = torch.zeros(2, point.batch, dtype=torch.int64, device=device)
        self.single_launch = sketch_launch.single_launch_runs(sets[0].queries, kv, shape[2])
        make = sketch_launch.SketchSpace.make
        self._space = make(kv, point.group_size, shape[2]) if self.single_launch else None

    def __call__(self, number: int) -> Tensor:
        buffers, (visible, estimated) = self._sets[number], self.counted
        return sketch_attention(
            buffers.queries, buffers.kv, buffers.summaries[self.kind], self.spans, self.tokens, self.counts,
            bits=SKETCHES[self.kind], rest=True, scale=self._point.scale, visible=visible, estimated=estimated,
            space=self._space, early=True,
        )  # fmt: skip


def separate_kernels(point: AttentionPoint, sets: Sequence[Buffers], kind: str) -> dict[str, Attend]:
    """Return the three kernels that the single launch replaces, each on outputs of the previous one."""
    spans, capacity = point.spans(sets[0].kv.lengths), point.capacity
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
                    buffers.queries.unsqueeze(2), buffers.dense_keys, buffers.dense_values, scale=point.scale,
                    enable_gqa=point.group_size > 1,
                ).squeeze(2)  # fmt: skip

        return attend

    return build


def flashinfer(tensor_cores: bool) -> Build:
    """Return FlashInfer's decode: over one tensor for one sequence, over pages for several."""

    def build(point: AttentionPoint, sets: Sequence[Buffers]) -> Attend:
        try:
            import flashinfer
        except ImportError as error:
            raise InputError(f"flashinfer cannot be imported ({error}); pip install flashinfer-python") from None
        if point.batch > 1:
            return _flashinfer_pages(flashinfer, point, sets, tensor_cores)

        def attend(number: int) -> Tensor:
            buffers = sets[number]
            output: Tensor = flashinfer.single_decode_with_kv_cache(
                buffers.queries[0], buffers.dense_keys[0], buffers.dense_values[0], kv_layout="HND",
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
