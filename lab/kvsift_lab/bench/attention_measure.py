"""Times of attention at one point: sparse and dense variants on the same buffers, each checked against float32."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch

from kvsift.engine.memory import available_bytes
from kvsift.kernels.sketch import SKETCHES
from kvsift_lab.bench import machine
from kvsift_lab.bench.attention import AttentionRecipe
from kvsift_lab.bench.attention_check import check_dense, check_sketch, check_sparse, exact_dense
from kvsift_lab.bench.attention_point import AttentionPoint, Buffers
from kvsift_lab.bench.attention_report import break_even_lines, point_text, sparse_name, summary
from kvsift_lab.bench.attention_variants import BASELINES, Attend, SketchLaunch, SparseLaunch, separate_kernels
from kvsift_lab.bench.bench import Bench, first_line
from kvsift_lab.bench.chart import attention_chart, require_matplotlib
from kvsift_lab.bench.timing import Clock, Timer, digits, graph_clock, interleaved

LARGEST_ERROR = 0.05  # bfloat16 costs a tenth of it; a larger one is a wrong result
KEPT_FREE = 1 / 5  # of free memory: for graphs, references and libraries
NOT_EARLY = "single launch, not early"

Variants = Iterator[dict[str, Any]]


def points(recipe: AttentionRecipe) -> list[AttentionPoint]:
    """Return all points, shape by shape, short contexts first."""
    sizes = recipe.batch, recipe.head_dim, recipe.page_size, recipe.budget, recipe.sketch_budget
    return [AttentionPoint(*shape, context, *sizes) for shape in recipe.shapes for context in sorted(recipe.contexts)]


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
            InputError: without a GPU, or without matplotlib for a chart.
        """
        device = machine.require_gpu("attention")
        if recipe.chart_path is not None:
            require_matplotlib()
        return cls(recipe, graph_clock, device)

    def environment(self) -> dict[str, Any]:
        return machine.gpu_environment(self.recipe.bandwidth)

    def points(self) -> list[AttentionPoint]:
        return points(self.recipe)

    def facts(self, point: AttentionPoint) -> dict[str, Any]:
        return {key: getattr(point, key) for key in ("num_query_heads", "num_kv_heads", "context", "batch")}

    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        return point_text(point, result["bandwidth"]["used"])

    def closing(self, result: dict[str, Any]) -> str:
        return f"{break_even_lines(result)}\n{json.dumps(summary(result))}"

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
            launch, check = (SketchLaunch, check_sketch) if kind in SKETCHES else (SparseLaunch, check_sparse)
            yield self._variant(facts, partial(launch, point, sets, kind), partial(check, point, sets), len(sets))

    def _dense(self, point: AttentionPoint, sets: Sequence[Buffers]) -> Variants:
        if not self.recipe.baselines:
            return
        exact = exact_dense(point, sets[0])
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
