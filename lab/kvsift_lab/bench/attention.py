"""kvsift bench attention: ours against the best dense kernels, over shapes and context lengths; recipe and report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from kvsift_lab.bench import recipe as r
from kvsift_lab.bench import report
from kvsift_lab.bench.report import Point, Variant, cell, ratio, us
from kvsift_lab.numbers import spread, table, tokens

DENSE = "sdpa-flash,sdpa-cudnn,flashinfer,ours-dense"
CHART = "Draw the result here, SVG; needs matplotlib."
OURS_DENSE = "ours-dense"
NOT_EARLY = "single launch, not early"
SEPARATE = ("score_pages", "visible_pages", "page_attention")  # kernels that the single launch replaces
Shape = tuple[int, int]


@dataclass(frozen=True)
class AttentionRecipe(r.BenchRecipe):
    """Attention of one decode step in one layer: cold caches, all variants in turns, the floor beside them."""

    measured_by = "kvsift_lab.bench.attention_measure:AttentionBench"

    shapes: tuple[Shape, ...] = r.option(
        "32/32,32/8",
        "Query heads/KV heads.",
        parse=lambda text, flag: tuple(r.head_counts(w, flag) for w in r.names(text)),
    )
    contexts: tuple[int, ...] = r.contexts("4K,8K,16K,32K,64K,128K,256K,512K")
    batch: int = r.option(1, "Sequences.", minimum=1)
    head_dim: int = r.option(128, "Numbers per head.", minimum=8)
    page_size: int = r.option(16, "Tokens per page.", minimum=1)
    budget: int = r.option(2048, "Visible tokens per list of pages.", minimum=1)
    sketch_budget: int = r.option(1024, "Visible tokens per list of tokens, which sketches choose.", minimum=1)
    score_by: tuple[str, ...] = r.option("minmax,minmax_fp8,sketch1", "Kinds of page summary.", parse=r.names)
    baselines: tuple[str, ...] = r.option(DENSE, "Dense kernels, or none.", parse=r.names)
    breakdown: bool = r.option(False, "Also time the separate kernels.")
    repeats: int = r.repeats(15)
    bandwidth: float | None = r.bandwidth()
    max_seconds: float | None = r.max_seconds()
    seed: int = 0  # of the buffers
    chart_path: str | None = r.option(None, CHART, flag="--chart", kind=Path | None, stored=False)

    def __post_init__(self) -> None:
        from kvsift.kernels.page_summary import SUMMARIES
        from kvsift.kernels.sketch import SKETCHES
        from kvsift_lab.bench.attention_variants import BASELINES

        r.require_known("summary", self.score_by, (*SUMMARIES, *SKETCHES))
        r.require_known("baseline", self.baselines, BASELINES)
        r.require_some(self.score_by, self.shapes, self.contexts, names="shape, context and summary")
        self.points()

    def points(self) -> list[Any]:
        """Return the ``AttentionPoint`` of all shapes and contexts, shape by shape, short contexts first.

        Raises:
            InputError: for one that makes no sense.
        """
        from kvsift_lab.bench.attention_variants import AttentionPoint

        sizes = self.batch, self.head_dim, self.page_size, self.budget, self.sketch_budget
        return [AttentionPoint(*shape, context, *sizes) for shape in self.shapes for context in sorted(self.contexts)]


def labels(result: dict[str, Any]) -> dict[str, str]:
    """Return the labels of variants, with versions."""
    torch, libraries = result["versions"]["torch"], result.get("gpu", {}).get("libraries", {})
    number, flashinfer = int(libraries.get("cudnn") or 0), libraries.get("flashinfer")
    cudnn = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return {
        "sdpa-flash": f"SDPA flash (torch {torch})",
        "sdpa-cudnn": f"SDPA cuDNN (torch {torch}, cuDNN {cudnn})",
        "flashinfer": f"FlashInfer {flashinfer}",
        "flashinfer-tc": f"FlashInfer {flashinfer}, tensor cores",
        OURS_DENSE: "kvsift, all pages",
    }


def medians(point: Point, role: str | None = None) -> dict[str, float]:
    """Return the median seconds of every timed variant of a role, or of all."""
    roles = {variant["name"]: variant["role"] for variant in point.get("variants", [])}
    return {name: seconds for name, seconds in report.medians(point).items() if role in (None, roles[name])}


def best_dense(point: Point) -> tuple[str, float]:
    """Return the fastest dense variant, ours included, and its seconds; ("", inf) if none ran."""
    return min(medians(point, "dense").items(), key=lambda item: item[1], default=("", float("inf")))


def floors(point: Point, bandwidth: float) -> dict[str, float]:
    """Return the seconds that memory takes for the bytes of every variant."""
    return {variant["name"]: variant["bytes"] / bandwidth for variant in point.get("variants", [])}


def shapes(result: dict[str, Any]) -> dict[Shape, list[Point]]:
    """Return measured points by heads, contexts ascending."""
    groups: dict[Shape, list[Point]] = {}
    for point in result["points"]:
        if "variants" in point:
            groups.setdefault((point["num_query_heads"], point["num_kv_heads"]), []).append(point)
    return {shape: sorted(points, key=lambda point: point["context"]) for shape, points in groups.items()}


def measured(result: dict[str, Any]) -> Iterator[tuple[str, str, Point]]:
    """Return measured points with heads and context as text."""
    for points in shapes(result).values():
        yield from ((heads(point), tokens(point["context"]), point) for point in points)


def heads(point: Point) -> str:
    return f"{point['num_query_heads']}/{point['num_kv_heads']}"


def sparse_names(result: dict[str, Any]) -> list[str]:
    """Return the names of sparse variants."""
    return [sparse_name(kind) for kind in result["recipe"]["score_by"]]


def sparse_name(kind: str) -> str:
    """Return the name of the variant that ranks by a kind of page summary, or by a kind of sketch."""
    return f"sketch-bits{kind[-1]}" if kind.startswith("sketch") else f"quest-{kind}"


def attention_tables(result: dict[str, Any]) -> str:
    """Return a Markdown table per shape: the best dense kernel, ours, and sparse variants with floor and speed-up."""
    sparse, bandwidth = sparse_names(result), result["bandwidth"]["used"]
    columns = ["context", "best dense", "times its floor", "by", "ours, dense"]
    columns += [column for name in sparse for column in (name, "times its floor", "speed-up")]

    def row(point: Point) -> list[str]:
        best, dense = best_dense(point)
        seconds, floor = medians(point), floors(point, bandwidth)
        cells = [tokens(point["context"]), us(dense), ratio(dense, floor.get(best)), best or "-"]
        cells.append(us(seconds.get(OURS_DENSE)))
        for time, least in ((seconds.get(name), floor.get(name)) for name in sparse):
            cells += [us(time), ratio(time, least), ratio(dense, time, ".1f", "x")]
        return cells

    return "\n\n".join(
        f"{query_heads} query heads, {kv_heads} KV heads, microseconds:\n\n{table(columns, list(map(row, points)))}"
        for (query_heads, kv_heads), points in shapes(result).items()
    )


def dense_tables(result: dict[str, Any]) -> str:
    """Return a Markdown table per shape: every dense variant, and their common floor."""
    parts = []
    for points in shapes(result).values():
        names = [variant["name"] for variant in points[0]["variants"] if variant["role"] == "dense"]
        rows = []
        for point in points:
            seconds, floor = medians(point), floors(point, result["bandwidth"]["used"])
            common = max((floor[name] for name in names), default=None)
            rows.append([tokens(point["context"]), us(common), *(us(seconds.get(name)) for name in names)])
        parts.append(f"{heads(points[0])} heads:\n\n{table(['context', 'floor', *names], rows)}")
    return "\n\n".join(parts)


def break_even(contexts: Sequence[int], dense: Sequence[float], sparse: Sequence[float]) -> float | None:
    """Return the tokens from which sparse stays faster, by linear interpolation between contexts.

    Args:
        contexts: ascending.
        dense, sparse: seconds at these contexts.

    Returns:
        The length; 0 if sparse is faster at the shortest context and all others, None if it is not at the longest.
    """
    points = [(context, d - s) for context, d, s in zip(contexts, dense, sparse)]
    if not points or points[-1][1] <= 0:
        return None
    for (short, loss), (long, gain) in reversed(list(pairwise(points))):
        if loss <= 0:
            return short + (long - short) * -loss / (gain - loss)
    return 0.0


def break_evens(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens from which each sparse variant is faster than the best dense kernel and than ours."""
    rows = []
    for (query_heads, kv_heads), points in shapes(result).items():
        for name in sparse_names(result):
            timed = [point for point in points if name in medians(point)]
            contexts, sparse = [point["context"] for point in timed], [medians(point)[name] for point in timed]
            rivals = {
                "best dense": [best_dense(point)[1] for point in timed],
                OURS_DENSE: [medians(point).get(OURS_DENSE, float("inf")) for point in timed],
            }
            for rival, dense in rivals.items():
                if timed and max(dense) < float("inf"):
                    row = {"num_query_heads": query_heads, "num_kv_heads": kv_heads, "variant": name, "than": rival}
                    measured_range = {"shortest": contexts[0], "longest": contexts[-1]}
                    rows.append(row | {"tokens": break_even(contexts, dense, sparse)} | measured_range)
    return rows


def break_even_text(row: dict[str, Any]) -> str:
    """Render a number of tokens, or the side of the measured range."""
    if row["tokens"] is None:
        return f"beyond {tokens(row['longest'])}"
    return f"below {tokens(row['shortest'])}" if row["tokens"] == 0 else f"{row['tokens']:,.0f}"


def break_even_table(result: dict[str, Any]) -> str:
    """Return a Markdown table: a row per shape and variant."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in break_evens(result):
        cells.setdefault((heads(row), row["variant"]), {})[row["than"]] = break_even_text(row)
    rows = [[*key, *(than.get(rival, "-") for rival in ("best dense", OURS_DENSE))] for key, than in cells.items()]
    return table(["heads", "variant", "faster than the best dense kernel from", "than our own from"], rows)


def losses_table(result: dict[str, Any]) -> str:
    """Return a Markdown table of every point where a sparse variant is slower than the best dense kernel."""
    rows = []
    for shape, context, point in measured(result):
        name, dense = best_dense(point)
        for variant, seconds in medians(point, "sparse").items():
            if seconds > dense:
                times = ratio(seconds, dense, ".1f", "x")
                rows.append([shape, context, variant, us(seconds), f"{us(dense)} ({name})", times])
    if not rows:
        return "At no measured context is a sparse variant slower than the best dense kernel."
    return table(["heads", "context", "variant", "takes", "best dense", "times slower"], rows)


def breakdown_table(result: dict[str, Any]) -> str:
    """Return a Markdown table: the separate kernels, their sum, and the single launch; microseconds."""
    rows = []
    for shape, context, point in measured(result):
        for kind in (kind for kind in result["recipe"]["score_by"] if not kind.startswith("sketch")):
            pieces = {p["name"]: median(p["samples_s"]) for p in point["breakdown"] if p.get("score_by") == kind}
            total = sum(pieces[name] for name in SEPARATE) if pieces.keys() >= set(SEPARATE) else None
            early, floor = medians(point).get(f"quest-{kind}"), floors(point, result["bandwidth"]["used"])
            times = [*map(pieces.get, SEPARATE), total, pieces.get(NOT_EARLY), early, floor[f"quest-{kind}"]]
            rows.append([shape, context, kind, *map(us, times)])
    columns = ["heads", "context", "summary", "score", "choose", "attend", "sum", "one launch", "early", "floor"]
    return table(columns, rows)


def correctness(result: dict[str, Any]) -> dict[str, float]:
    """Return the worst of all points: distance from float32, share of the reference's pages and tokens, gap of other
    pages' scores below its last, and interquartile range over median."""
    timed = [v for point in result["points"] for v in point.get("variants", []) if v.get("samples_s")]
    sparse, dense = ([v for v in timed if v["role"] == role] for role in ("sparse", "dense"))
    nan = float("nan")
    return {
        "sparse_error": max((v["error"] for v in sparse), default=nan),
        "dense_error": max((v["error"] for v in dense), default=nan),
        "same_pages": min((v["same_pages"] for v in sparse if "same_pages" in v), default=nan),
        "same_tokens": min((v["same_tokens"] for v in sparse if "same_tokens" in v), default=nan),
        "score_gap": max((v["score_gap"] for v in sparse if "score_gap" in v), default=nan),
        "spread": max((spread(v["samples_s"]) for v in timed), default=nan),
    }


def left_out(result: dict[str, Any]) -> list[str]:
    """Return what was not measured with its reason, each once."""
    lines = []
    for point in result["points"]:
        if "reason" in point:
            lines.append(f"{heads(point)} heads at {tokens(point['context'])}: {point['reason']}")
        lines += [f"{v['name']}: {v['reason']}" for v in point.get("variants", []) if "reason" in v]
    return list(dict.fromkeys(lines))


def point_text(point: Point, bandwidth: float) -> str:
    """Render all variants of a point, in microseconds."""
    name, dense = best_dense(point)

    def cells(variant: Variant) -> dict[str, str]:
        seconds, floor = median(variant["samples_s"]), variant["bytes"] / bandwidth
        same = variant.get("same_pages", variant.get("same_tokens"))
        return {
            "us": cell(1e6 * seconds),
            "spread": report.spread_text(variant["samples_s"]),
            "floor": cell(1e6 * floor),
            "times it": ratio(seconds, floor),
            "speed-up": ratio(dense, seconds, ".2f", "x") if "role" in variant else "",
            "error": cell(variant["error"], ".1e") if "error" in variant else "",
            "same pages": "" if same is None else f"{same:.4f}",
        }

    title = f"{heads(point)} heads, {tokens(point['context'])} tokens, batch {point['batch']}"
    if "variants" in point:
        title += f", {point['num_sets']} sets of buffers, {point['seconds']} s, best dense {name or 'none ran'}"
    return report.point_text(title, point, cells)
