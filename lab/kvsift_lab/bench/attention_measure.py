"""Times of attention at one point: sparse and dense variants on the same buffers, each checked before it is timed:
outputs against float32, selections against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvsift.engine.memory import available_bytes
from kvsift.kernels.page_attention import listed_tokens, page_attention_reference
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.score_pages import score_pages_reference
from kvsift.kernels.sketch import SKETCHES
from kvsift.kernels.sketch_attention import answer_reference, candidates_reference, sketch_attention_reference
from kvsift.kernels.top_pages import visible_pages_reference
from kvsift_lab.bench import machine
from kvsift_lab.bench.attention import (
    NOT_EARLY,
    AttentionRecipe,
    attention_tables,
    break_even_table,
    break_evens,
    point_text,
    shapes,
    sparse_name,
)
from kvsift_lab.bench.attention_variants import (
    BASELINES,
    Attend,
    AttentionPoint,
    Buffers,
    SparseLaunch,
    separate_kernels,
)
from kvsift_lab.bench.bench import Bench, first_line
from kvsift_lab.bench.chart import attention_chart
from kvsift_lab.bench.timing import Clock, Timer, graph_clock, interleaved
from kvsift_lab.numbers import digits

LARGEST_ERROR = 0.05  # bfloat16 costs a tenth of it; a larger one is a wrong result
LEAST_SAME = 0.95  # of the reference's tokens; queries of 7 bits choose others among near ties, up to 2 % of them
KEPT_FREE = 1 / 5  # of free memory: for CUDA graphs, references and libraries

Variants = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class AttentionBench(Bench):
    """Attention of a recipe on a device, timed by a clock."""

    recipe: AttentionRecipe
    clock: Clock
    device: torch.device
    kind = "attention"

    @classmethod
    def of(cls, recipe: AttentionRecipe) -> AttentionBench:
        """Return the bench on the first GPU.

        Raises:
            InputError: without a GPU.
        """
        return cls(recipe, graph_clock, machine.require_gpu("attention"))

    def environment(self) -> dict[str, Any]:
        return machine.gpu_environment(self.recipe.bandwidth)

    def points(self) -> list[AttentionPoint]:
        return self.recipe.points()

    def facts(self, point: AttentionPoint) -> dict[str, Any]:
        return {key: getattr(point, key) for key in ("num_query_heads", "num_kv_heads", "context", "batch")}

    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        return point_text(point, result["bandwidth"]["used"])

    def closing(self, result: dict[str, Any]) -> str:
        if not shapes(result):
            return ""
        tables = attention_tables(result), break_even_table(result) if break_evens(result) else ""
        return "\n\n".join(filter(None, tables))

    def chart(self, result: dict[str, Any]) -> bytes:
        return attention_chart(result)

    def measure(self, point: AttentionPoint) -> dict[str, Any]:
        """Time all variants of a point; those that do not run or are wrong have a reason."""
        started, kinds = perf_counter(), list(self.recipe.score_by)
        free = available_bytes(self.device) or 0
        num_sets = point.num_sets(kinds, int(free * (1 - KEPT_FREE)))
        sets = [Buffers.random(point, kinds, self.device, self.recipe.seed + number) for number in range(num_sets)]
        variants = [*self._sparse(point, sets), *self._dense(point, sets)]
        separate: list[dict[str, Any]] = []
        if self.recipe.breakdown:
            pages = [kind for kind in kinds if kind not in SKETCHES]
            separate = [piece for kind in pages for piece in self._separate(point, sets, kind)]
        _sample([*variants, *separate], self.recipe.repeats)
        candidates, visible = point.counted
        return {
            "candidate_pages": candidates,
            "visible_tokens": visible * point.page_size,
            "num_sets": num_sets,
            "variants": variants,
            "breakdown": separate,
            "seconds": round(perf_counter() - started, 1),
        }

    def _sparse(self, point: AttentionPoint, sets: Sequence[Buffers]) -> Variants:
        for kind in self.recipe.score_by:
            facts = {"name": sparse_name(kind), "role": "sparse", "bytes": point.sparse_bytes(kind)}
            check = check_sketch if kind in SKETCHES else check_sparse
            yield self._variant(facts, partial(SparseLaunch, point, sets, kind), partial(check, point, sets), len(sets))

    def _dense(self, point: AttentionPoint, sets: Sequence[Buffers]) -> Variants:
        if not self.recipe.baselines:
            return
        exact = exact_attention(point, sets[0])
        for name, build in [variant for key in self.recipe.baselines for variant in BASELINES[key].items()]:
            facts = {"name": name, "role": "dense", "bytes": point.dense_bytes}
            yield self._variant(facts, partial(build, point, sets), partial(check_dense, exact), len(sets))

    def _separate(self, point: AttentionPoint, sets: Sequence[Buffers], kind: str) -> Variants:
        """The kernels of one kind alone, and the single launch without a head start."""
        summary, total = point.summary_bytes(kind), point.sparse_bytes(kind)
        num_bytes = {"score_pages": summary, "visible_pages": 0, "page_attention": total - summary, NOT_EARLY: total}
        try:
            pieces: dict[str, Attend] = separate_kernels(point, sets, kind)
            pieces[NOT_EARLY] = SparseLaunch(point, sets, kind, early=False)
            timers = {name: self.clock(piece, len(sets)) for name, piece in pieces.items()}
        except Exception as error:
            yield {"name": "all", "score_by": kind, "reason": first_line(error)}
            return
        for name, timer in timers.items():
            yield {"name": name, "score_by": kind, "bytes": num_bytes[name], "timer": timer}

    def _variant(
        self, facts: dict[str, Any], build: Callable[[], Any], check: Callable[[Any], dict[str, Any]], num_sets: int
    ) -> dict[str, Any]:
        """Facts of a variant with its timer; with a reason instead if it does not run or is wrong."""
        try:
            attend = build()
            facts |= check(attend)
            if not facts.get("error", 0.0) <= LARGEST_ERROR:  # NaN is not
                return facts | {"reason": f"its output is {facts['error']:.2g} away from float32's"}
            if facts.get("same_tokens", 1.0) < LEAST_SAME:
                return facts | {"reason": f"{1 - facts['same_tokens']:.1%} of its tokens are not the reference's"}
            return facts | {"timer": self.clock(attend, num_sets)}
        except Exception as error:  # whatever a library raises for a shape that it does not support
            return facts | {"reason": first_line(error)}


def _sample(variants: Sequence[dict[str, Any]], repeats: int) -> None:
    """Replace timers by samples in seconds, taken in turns."""
    timers: dict[str, Timer] = {
        str(number): variant.pop("timer") for number, variant in enumerate(variants) if "timer" in variant
    }
    for number, samples in interleaved(timers, repeats).items():
        variants[int(number)]["samples_s"] = digits(samples, 5)


def distance(output: Tensor, exact: Tensor) -> float:
    """Return the norm of the error, relative to the norm of ``exact``."""
    return float((output.float() - exact).norm() / exact.norm())


def heads_of(buffers: Buffers) -> Iterator[tuple[slice, Tensor, PagedKV]]:
    """Yield each KV head as a slice, with its queries in float32 [batch, group_size, head_dim] and its pools: what
    references compute for all heads at once would not fit."""
    for head, queries in enumerate(buffers.queries.float().unflatten(1, (buffers.kv.num_kv_heads, -1)).unbind(1)):
        own = slice(head, head + 1)
        yield own, queries, buffers.kv._replace(keys=buffers.kv.keys[own], values=buffers.kv.values[own])


def exact_attention(
    point: AttentionPoint, buffers: Buffers, pages: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """Return attention in float32 over lists of pages [batch, num_kv_heads, capacity], or over all pages ->
    [batch, num_query_heads, head_dim]."""
    outputs = []
    for own, queries, kv in heads_of(buffers):
        lists = (None, None) if pages is None or counts is None else (pages[:, own], counts[:, own])
        outputs.append(page_attention_reference(queries, kv, *lists, scale=point.scale))
    return torch.stack(outputs, 1).flatten(1, 2)


def listed(units: Tensor, counts: Tensor, num_units: int) -> Tensor:
    """Return which units lists hold, bool [batch, num_kv_heads, num_units]."""
    return torch.stack([listed_tokens(row, count, num_units, 1) for row, count in zip(units, counts)])


def check_dense(exact: Tensor, attend: Attend) -> dict[str, Any]:
    """Return the distance of an output from dense attention in float32."""
    return {"error": distance(attend(0), exact)}


def check_sparse(point: AttentionPoint, sets: Sequence[Buffers], attend: SparseLaunch) -> dict[str, Any]:
    """Return the distance of an output from float32 over its own pages, the share of the reference's pages among them,
    and how far below the reference's last score the others are, relative to it."""
    attend.units.fill_(-1)
    output, buffers = attend(0), sets[0]
    scores = score_pages_reference(
        buffers.queries, buffers.summaries[attend.kind], buffers.kv.table, attend.spans, kind=attend.kind,
        scale=point.scale, shared=True,
    )  # fmt: skip
    expected = listed(*visible_pages_reference(scores, attend.spans, point.capacity(attend.kind)), point.max_pages)
    visible = listed(attend.units, attend.counts, point.max_pages)
    return {
        "launches": attend.num_launches,
        "error": distance(output, exact_attention(point, buffers, attend.units, attend.counts)),
        "same_pages": float((visible & expected).sum() / expected.sum()),
        "score_gap": _score_gap(scores, attend.spans, visible, expected),
    }


def _score_gap(scores: Tensor, spans: Tensor, visible: Tensor, expected: Tensor) -> float:
    """Return the largest gap of all lists; all sequences have the same spans."""
    first, stop = spans[0, :2].tolist()
    if first == stop:
        return 0.0
    scores, visible, expected = scores[..., : stop - first], visible[..., first:stop], expected[..., first:stop]
    last = scores.masked_fill(~expected, torch.inf).amin(-1)  # [batch, num_kv_heads]
    lowest = scores.masked_fill(~visible, torch.inf).amin(-1)
    gaps = ((last - lowest) / last.abs()).nan_to_num(nan=0.0)  # inf - inf in lists without candidates
    return float(gaps.clamp_min(0.0).max())


def check_sketch(point: AttentionPoint, sets: Sequence[Buffers], attend: SparseLaunch) -> dict[str, Any]:
    """Return the distance of an output from the reference's over the same tokens, and the share of the reference's
    tokens among them."""
    attend.units.fill_(-1)
    output, buffers = attend(0), sets[0]
    tokens, counts = torch.full_like(attend.units, -1), torch.zeros_like(attend.counts)
    outputs, bits, scale = [], SKETCHES[attend.kind], point.scale
    for own, queries, kv in heads_of(buffers):
        rows, lists = buffers.summaries[attend.kind][own], (tokens[:, own], counts[:, own])
        sketch_attention_reference(queries, kv, rows, attend.spans, *lists, bits=bits, rest=True, scale=scale)
        for row, (first, stop, chosen, _) in enumerate(attend.spans.tolist()):
            found = attend.units[row, own], attend.counts[row, own]
            span, rest = (first, stop), chosen < stop - first
            others = candidates_reference(queries[row], kv, rows, row, span, bits=bits, scale=scale, softcap=None)
            part, _ = answer_reference(
                queries[row], kv, row, found, first, others if rest else None, scale=scale, softcap=None
            )
            outputs.append(part.output[0, :, 0])
    expected = listed(tokens, counts, point.context)
    same = listed(attend.units, attend.counts, point.context) & expected
    exact = torch.stack(outputs).unflatten(0, (buffers.kv.num_kv_heads, -1)).transpose(0, 1).flatten(1, 2)
    return {
        "launches": attend.num_launches,
        "error": distance(output, exact),
        "same_tokens": int(same.sum()) / int(expected.sum()),
    }
