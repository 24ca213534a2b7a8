"""kvsift bench prefill: time to first token of a model, or prefill attention of one layer, dense and by plans;
recipes and report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvsift.errors import Conflict, InvalidValue, UnsupportedPlan
from kvsift_lab.bench import recipe as r
from kvsift_lab.bench import report
from kvsift_lab.bench.report import Point, Variant, ms, ratio
from kvsift_lab.numbers import table, tokens

PLANS = "prefill=quoka:budget=1024:chunk=512:dense_layers=none;prefill=critiprefill:budget=1024:page_size=32"
PART = "ttft: the whole model. layer: attention of one layer. chunk: of one chunk in it."
CEILING = "no attention"  # a variant without


@dataclass(frozen=True)
class PrefillRecipe(r.BenchRecipe):
    """Prefill: time to first token of a model with random weights, or attention in one layer alone."""

    measured_by = "kvsift_lab.bench.prefill_measure:PrefillBench"

    contexts: tuple[int, ...] = r.contexts("32K,64K,128K")
    plans: tuple[str, ...] = r.plans(PLANS)
    part: str = r.option("ttft", PART, stored=False)
    shape: str = r.shape()
    quantize: str | None = r.quantize()
    heads: str = r.option("32/8", "Of a layer: query heads/KV heads.", stored=False)
    chunks: tuple[int, ...] = r.option(
        "2048,8192", "Tokens per forward pass; dense prefill takes the best of several.", flag="--chunk", parse=r.counts
    )
    repeats: int = r.repeats(3)
    device: str = r.device()
    max_seconds: float | None = r.max_seconds()

    def __post_init__(self) -> None:
        from kvsift_lab.bench.random_models import SHAPES

        r.require_known("shape", [self.shape], SHAPES)
        r.require_some(self.contexts, self.plans, self.chunks, names="context, plan and chunk size")
        r.require_quantize(self.quantize)
        refuse_dense(self.plans)

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> r.BenchRecipe:
        """Return the recipe of a model, or that of a layer."""
        if given["part"] not in ("ttft", "layer", "chunk"):
            raise InvalidValue(f"--part {given['part']} must be ttft, layer or chunk.")
        if given["part"] == "ttft":
            return super().from_options(given)
        return PrefillLayerRecipe.from_options(given)


@dataclass(frozen=True)
class PrefillLayerRecipe(r.BenchRecipe):
    """Attention of prefill in one layer: all chunks of a prompt, or with ``whole`` False one chunk behind a context."""

    measured_by = "kvsift_lab.bench.prefill_measure:PrefillLayerBench"

    contexts: tuple[int, ...]
    plans: tuple[str, ...]
    chunk: int
    whole: bool
    num_query_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    repeats: int = 5
    device: str = r.device()

    def __post_init__(self) -> None:
        r.require_some(self.contexts, self.plans, names="context and plan")
        r.check_groups(self.num_query_heads, self.num_kv_heads)
        refuse_dense(self.plans)

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> PrefillLayerRecipe:
        if given["max_seconds"] is not None:
            raise Conflict(
                f"--max-seconds works with --part ttft only; leave it out, or give fewer --contexts to {given['part']}."
            )
        specs = PrefillRecipe.options()
        contexts, plans, chunks = (
            specs[name].values(name, given[name])[name] for name in ("contexts", "plans", "chunks")
        )
        sizes = r.head_counts(given["heads"], "--heads")
        return cls(contexts, plans, chunks[-1], given["part"] == "layer", *sizes, repeats=given["repeats"],
                   device=given["device"])  # fmt: skip


def refuse_dense(plans: tuple[str, ...]) -> None:
    """Refuse plans that prefill densely.

    Raises:
        InputError: with what to write instead.
    """
    from kvsift.plan.syntax import parse_plan

    for plan in plans:
        rule = parse_plan(plan).prefill
        if rule is None or rule.method.traits.unbounded:
            raise UnsupportedPlan(f"plan {plan!r} prefills densely; write, for instance, prefill=quoka:budget=1024.")


def ttft_table(result: dict[str, Any]) -> str:
    """Return a Markdown table: a row per context; time to first token, and speed-up over the best dense variant."""
    plans, rows = result["recipe"]["plans"], []
    for point in (point for point in result["points"] if "variants" in point):
        times = report.medians(point, "ttft_s")
        best = min((name for name in times if name.startswith("dense")), key=times.__getitem__)
        cells = [tokens(point["context"]), f"{times[best]:.3f}", best.removeprefix("dense, ")]
        for plan in plans:
            cells += [f"{times[plan]:.3f}", ratio(times[best], times[plan], unit="x")]
        rows.append([*cells, ratio(times[best], times[CEILING], unit="x")])
    titles = [title for plan in plans for title in (_label(plan), "faster")]
    return table(["context", "dense", "in", *titles, "ceiling"], rows)


def layer_table(result: dict[str, Any]) -> str:
    """Return a Markdown table: a row per context and variant; milliseconds in one layer, and speed-up over the best
    dense variant."""
    plans, rows = result["recipe"]["plans"], []
    for point in result["points"]:
        times = report.medians(point)
        best = min(seconds for name, seconds in times.items() if name not in plans)
        for name, seconds in times.items():
            rate = "" if name in plans else f"{point['flops'] / seconds / 1e12:.1f}"
            label = _label(name) if name in plans else name
            rows.append([tokens(point["context"]), label, ms(seconds), rate, ratio(best, seconds, unit="x")])
    return table(["context", "", "ms", "TFLOP/s", "over the best dense"], rows)


def _label(plan: str) -> str:
    return f"`{plan}`"


def point_text(point: Point) -> str:
    """Render all variants of a context: the median, and the interquartile range as a share of it."""

    def cells(variant: Variant) -> dict[str, str]:
        samples = variant.get("ttft_s") or variant["samples_s"]
        row = {"ms": ms(median(samples)), "spread": report.spread_text(samples)}
        return row | ({"density": f"{variant['density']:.1%}"} if "density" in variant else {})

    return report.point_text(f"{tokens(point['context'])} tokens", point, cells)
