"""kvsift bench decode: the engine's decode loop end to end, dense and sparse on one model and one set of pools; recipe
and report."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from kvsift.errors import UnsupportedPlan
from kvsift_lab.bench import recipe as r
from kvsift_lab.bench import report
from kvsift_lab.bench.report import Point, Variant, ms, ratio
from kvsift_lab.numbers import table, tokens

MODEL = "Hugging Face model directory, or a model's name on huggingface.co, such as Qwen/Qwen3-4B; replaces --shape."
LABELS = {"dense": "dense", "sifted": "sparse", "auto": "auto"}  # of variants, by their names in results
LEAST_SHARE = 0.01  # of a step: kernels below it are summed up


def _directory(model: str, flag: str) -> tuple[str, bool]:
    return model, False


@dataclass(frozen=True)
class DecodeRecipe(r.BenchRecipe):
    """Decoding on an NVIDIA GPU, dense and by a plan in turns, on random keys and values; --model replaces --shape."""

    measured_by = "kvsift_lab.bench.decode_measure:DecodeBench"

    model: str = r.shape()
    random: bool = r.option(
        None, MODEL, flag="--model", kind=str | None, value=True, parse=_directory, targets=("model", "random")
    )
    quantize: str | None = r.quantize()
    kv_dtype: str = r.option("auto", "Of keys and values: auto, the model's, or int8.")
    contexts: tuple[int, ...] = r.contexts("32K,128K")
    batches: tuple[int, ...] = r.option("1,4", "Sequences, for instance 1,4.", flag="--batch", parse=r.counts)
    plan: str = r.option("quest:budget=2048", "Plan that is compared with dense.")
    anchors: int | None = r.anchors()
    steps: int = r.option(32, "Tokens decoded for a sample.", minimum=2)
    repeats: int = r.repeats(5)
    profile: bool = r.option(False, "Also sum the kernels of a step by name.")
    bandwidth: float | None = r.bandwidth()
    max_seconds: float | None = r.max_seconds()

    def __post_init__(self) -> None:
        from kvsift.layer.paged_decode import reason_against, rule_of
        from kvsift.plan.syntax import parse_plan
        from kvsift.stores.paged import KV_DTYPES
        from kvsift_lab.bench.random_models import SHAPES
        from kvsift_lab.bench.spaced_anchors import require_anchored

        r.require_known("shape", [self.model] if self.random else [], SHAPES)
        r.require_quantize(self.quantize)
        r.require_known("kv_dtype", [self.kv_dtype], KV_DTYPES)
        r.require_some(self.contexts, self.batches, names="context and batch")
        plan = parse_plan(self.plan)
        reason = reason_against(plan)
        if rule_of(plan) is None:
            in_prefill = plan.prefill is not None and not plan.prefill.traits.unbounded
            alone = "it has a rule for prefill alone, which kvsift bench prefill measures"
            reason = alone if in_prefill else "it skips nothing"
        if reason is not None:
            raise UnsupportedPlan(f"plan {self.plan!r} cannot be measured against dense captured steps: {reason}.")
        require_anchored(self.anchors, plan, self.plan)


def tpot_s(point: Point, name: str) -> float | None:
    """Return the median seconds per token of a variant; None if it was not measured."""
    return report.medians(point, "tpot_s").get(name)


def decode_table(result: dict[str, Any]) -> str:
    """Return a Markdown table: a row per point; milliseconds per token, over the floor, and how many times faster."""
    rows = []
    for point in _measured(result):
        variants = {variant["name"]: variant for variant in point["variants"]}
        cells = [tokens(point["context"]), str(point["batch"])]
        for name in ("dense", "sifted"):
            floor = variants[name]["bytes"] / result["bandwidth"]["used"]
            cells += [ms(tpot_s(point, name)), ms(floor), ratio(tpot_s(point, name), floor)]
        cells.append(ratio(tpot_s(point, "dense"), tpot_s(point, "sifted"), unit="x"))
        rows.append([*cells, f"{variants['sifted']['density']:.3f}"])
    columns = ["context", "batch", "dense", "floor", "times it", "sparse", "floor", "times it", "speed-up", "density"]
    return table(columns, rows)


def engine_table(result: dict[str, Any]) -> str:
    """Return a Markdown table: the context from which the engine decodes by the plan, and the cost of its choice."""
    rows = []
    for point in _measured(result):
        seconds = report.medians(point, "tpot_s")
        chosen = "auto" if "auto" in seconds else "sifted"
        cost = f"{100 * (seconds[chosen] / seconds['dense'] - 1):+.1f} %"
        decodes = "dense" if chosen == "auto" else LABELS[chosen]
        rows.append([tokens(point["context"]), str(point["batch"]), f"{point['dense_below']:,}", decodes, cost])
    return table(["context", "batch", "sparse from", "decodes", "against the dense plan"], rows)


def _measured(result: dict[str, Any]) -> list[Point]:
    return [point for point in result["points"] if "variants" in point]


def kernel_tables(result: dict[str, Any]) -> str:
    """Return Markdown tables of the slowest kernels of a step; "" without a profile."""
    parts = []
    for point in _measured(result):
        for variant in point["variants"]:
            if variant.get("kernels") and variant["name"] != "auto":  # the same kernels as dense
                title = f"{tokens(point['context'])}, batch {point['batch']}, {LABELS[variant['name']]}:"
                parts.append(f"{title}\n\n{_kernel_table(variant['kernels'])}")
    return "\n\n".join(parts)


def _kernel_table(kernels: list[dict[str, Any]]) -> str:
    total = sum(kernel["seconds"] for kernel in kernels)
    shown = [kernel | {"name": f"`{kernel['name']}`"} for kernel in kernels if kernel["seconds"] >= LEAST_SHARE * total]
    if rest := [kernel for kernel in kernels if kernel["seconds"] < LEAST_SHARE * total]:
        sums = {key: sum(kernel[key] for kernel in rest) for key in ("launches", "seconds")}
        shown.append({"name": f"{len(rest)} below {LEAST_SHARE:.0%} each", **sums})
    rows = [
        [k["name"], f"{k['launches']:.3g}", f"{k['seconds'] * 1e6:.0f}", f"{k['seconds'] / total:.0%}"] for k in shown
    ]
    return table(["kernel", "launches", "us per step", "share"], rows)


def point_text(point: Point, bandwidth: float) -> str:
    """Render all variants of a point, in milliseconds per token."""

    def cells(variant: Variant) -> dict[str, str]:
        seconds, floor = float(median(variant["tpot_s"])), variant["bytes"] / bandwidth
        return {
            "ms/token": ms(seconds),
            "spread": report.spread_text(variant["tpot_s"]),
            "replayed": ms(median(variant["replay_s"]) if variant["replay_s"] else None),
            "floor": ms(floor),
            "times it": ratio(seconds, floor),
            "speed-up": ratio(tpot_s(point, "dense"), seconds, unit="x"),
        }

    title = f"{tokens(point['context'])} tokens, batch {point['batch']}"
    if "variants" in point:
        title += f", the engine sifts from {point['dense_below']:,} tokens on, {point['seconds']} s"
    return report.point_text(title, point, cells)
