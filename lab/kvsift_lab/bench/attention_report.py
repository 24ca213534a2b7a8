"""Attention results as Markdown tables, as text for a terminal, and as one line of JSON."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from statistics import median
from typing import Any

from kvsift_lab.bench.numbers import break_even, spread, table, tokens

OURS_DENSE = "ours-dense"
Points = list[dict[str, Any]]
Shape = tuple[int, int]


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


def medians(point: dict[str, Any], role: str | None = None) -> dict[str, float]:
    """Return the median seconds of every timed variant."""
    timed = [v for v in point.get("variants", []) if v.get("samples_s") and role in (None, v["role"])]
    return {variant["name"]: median(variant["samples_s"]) for variant in timed}


def best_dense(point: dict[str, Any]) -> tuple[str, float]:
    """Return the fastest dense variant, ours included, and its seconds; ("", inf) if none ran."""
    dense = medians(point, "dense")
    return min(dense.items(), key=lambda item: item[1], default=("", float("inf")))


def floors(point: dict[str, Any], bandwidth: float) -> dict[str, float]:
    """Return the seconds that memory takes for the bytes of every variant."""
    return {variant["name"]: variant["bytes"] / bandwidth for variant in point.get("variants", [])}


def shapes(result: dict[str, Any]) -> dict[Shape, Points]:
    """Return measured points by heads, contexts ascending."""
    groups: dict[Shape, Points] = {}
    for point in result["points"]:
        if "variants" in point:
            groups.setdefault((point["num_query_heads"], point["num_kv_heads"]), []).append(point)
    return {shape: sorted(points, key=lambda point: point["context"]) for shape, points in groups.items()}


def measured(result: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Return measured points with heads and context as text."""
    for (query_heads, kv_heads), points in shapes(result).items():
        yield from ((f"{query_heads}/{kv_heads}", tokens(point["context"]), point) for point in points)


def sparse_names(result: dict[str, Any]) -> list[str]:
    """Return the names of sparse variants."""
    return [sparse_name(kind) for kind in result["recipe"]["score_by"]]


def sparse_name(kind: str) -> str:
    """Return the name of the variant that ranks by a kind of page summary, or by a kind of sketch."""
    return f"sketch-bits{kind[-1]}" if kind.startswith("sketch") else f"quest-{kind}"


def attention_tables(result: dict[str, Any]) -> str:
    """Return a Markdown table per shape: the best dense kernel, ours, and sparse variants with floor and speed-up."""
    columns = ["context", "best dense", "times its floor", "by", "ours, dense"]
    for name in sparse_names(result):
        columns += [name, "times its floor", "speed-up"]
    parts = []
    for (query_heads, kv_heads), points in shapes(result).items():
        rows = [_row(point, sparse_names(result), result["bandwidth"]["used"]) for point in points]
        parts.append(f"{query_heads} query heads, {kv_heads} KV heads, microseconds:\n\n{table(columns, rows)}")
    return "\n\n".join(parts)


def _row(point: dict[str, Any], sparse: list[str], bandwidth: float) -> list[str]:
    best, dense = best_dense(point)
    seconds, floor = medians(point), floors(point, bandwidth)
    cells = [tokens(point["context"]), _us(dense), _ratio(dense, floor.get(best)), best or "-"]
    cells.append(_us(seconds.get(OURS_DENSE)))
    for name in sparse:
        cells += [_us(seconds.get(name)), _ratio(seconds.get(name), floor.get(name)), _times(dense, seconds.get(name))]
    return cells


def dense_tables(result: dict[str, Any]) -> str:
    """Return a Markdown table per shape: every dense variant, and their common floor."""
    parts = []
    for (query_heads, kv_heads), points in shapes(result).items():
        names = [variant["name"] for variant in points[0]["variants"] if variant["role"] == "dense"]
        rows = []
        for point in points:
            seconds, floor = medians(point), floors(point, result["bandwidth"]["used"])
            common = max((floor[name] for name in names), default=None)
            rows.append([tokens(point["context"]), _us(common), *(_us(seconds.get(name)) for name in names)])
        parts.append(f"{query_heads}/{kv_heads} heads:\n\n{table(['context', 'floor', *names], rows)}")
    return "\n\n".join(parts)


def headline_table(result: dict[str, Any], contexts: list[int]) -> str:
    """Return one Markdown table of the points with these contexts."""
    rows, sparse = [], sparse_names(result)
    for heads, context, point in measured(result):
        if point["context"] in contexts:
            (name, dense), seconds = best_dense(point), medians(point)
            ours = [f"{_us(seconds.get(each))} ({_times(dense, seconds.get(each))})" for each in sparse]
            rows.append([heads, context, f"{_us(dense)} ({name})", *ours])
    return table(["heads", "context", "best dense", *sparse], rows)


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
        key = f"{row['num_query_heads']}/{row['num_kv_heads']}", row["variant"]
        cells.setdefault(key, {})[row["than"]] = break_even_text(row)
    rows = [[*key, *(than.get(rival, "-") for rival in ("best dense", OURS_DENSE))] for key, than in cells.items()]
    return table(["heads", "variant", "faster than the best dense kernel from", "than our own from"], rows)


def losses_table(result: dict[str, Any]) -> str:
    """Return a Markdown table of every point where a sparse variant is slower than the best dense kernel."""
    rows = []
    for heads, context, point in measured(result):
        name, dense = best_dense(point)
        for variant, seconds in medians(point, "sparse").items():
            if seconds > dense:
                times = [_us(seconds), f"{_us(dense)} ({name})", _times(seconds, dense)]
                rows.append([heads, context, variant, *times])
    if not rows:
        return "At no measured context is a sparse variant slower than the best dense kernel."
    return table(["heads", "context", "variant", "takes", "best dense", "times slower"], rows)


def breakdown_table(result: dict[str, Any]) -> str:
    """Return a Markdown table: the separate kernels, their sum, and the single launch; microseconds."""
    rows, names = [], ("score_pages", "visible_pages", "page_attention")
    for heads, context, point in measured(result):
        for kind in (kind for kind in result["recipe"]["score_by"] if not kind.startswith("sketch")):
            pieces = {p["name"]: median(p["samples_s"]) for p in point["breakdown"] if p.get("score_by") == kind}
            total = sum(pieces[name] for name in names) if pieces.keys() >= set(names) else None
            early = medians(point).get(f"quest-{kind}")
            floor = floors(point, result["bandwidth"]["used"])[f"quest-{kind}"]
            times = [*map(pieces.get, names), total, pieces.get("single launch, not early"), early, floor]
            rows.append([heads, context, kind, *map(_us, times)])
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
        heads = f"{point['num_query_heads']}/{point['num_kv_heads']}"
        if "reason" in point:
            lines.append(f"{heads} heads at {tokens(point['context'])}: {point['reason']}")
        lines += [f"{v['name']}: {v['reason']}" for v in point.get("variants", []) if "reason" in v]
    return list(dict.fromkeys(lines))


def point_text(point: dict[str, Any], bandwidth: float) -> str:
    """Render all variants of a point, one per line."""
    heads = f"{point['num_query_heads']}/{point['num_kv_heads']} heads"
    title = f"{heads}, {tokens(point['context'])} tokens, batch {point['batch']}"
    if "reason" in point:
        return f"{title}: not measured, {point['reason']}"
    name, dense = best_dense(point)
    lines = [f"{title}: {point['num_sets']} sets of buffers, {point['seconds']} s"]
    lines.append(f"  {'':35}{'us':>9}{'spread':>8}{'floor':>9}{'of floor':>10}{'speed-up':>10}{'error':>9}  pages")
    lines += [f"  {_line(variant, bandwidth, dense)}" for variant in [*point["variants"], *point["breakdown"]]]
    return "\n".join([*lines, f"  best dense: {name or 'none ran'}"])


def _line(variant: dict[str, Any], bandwidth: float, dense: float) -> str:
    name = f"{variant['score_by']} {variant['name']}" if "score_by" in variant else variant["name"]
    if "samples_s" not in variant:
        return f"{name:35}not measured: {variant['reason']}"
    seconds, floor = median(variant["samples_s"]), variant["bytes"] / bandwidth
    cells = f"{seconds * 1e6:>9.2f}{100 * spread(variant['samples_s']):>6.1f} %{floor * 1e6:>9.2f}"
    cells += f"{seconds / floor:>10.2f}" if floor else f"{'-':>10}"
    cells += f"{dense / seconds:>9.2f}x" if "role" in variant and isfinite(dense) else f"{'':10}"
    cells += f"{variant['error']:>9.1e}" if "error" in variant else ""
    same = variant.get("same_pages", variant.get("same_tokens"))
    return f"{name:35}{cells}" + ("" if same is None else f"  {same:.4f}")


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result without samples, for the last line of the output."""
    points = []
    for heads, _, point in measured(result):
        name, dense = best_dense(point)
        us = {name: round(seconds * 1e6, 2) for name, seconds in medians(point).items()}
        sparse = medians(point, "sparse").items() if name else ()
        speed_up = {name: round(dense / seconds, 2) for name, seconds in sparse}
        row = {"heads": heads, "context": point["context"], "best_dense": name, "us": us, "speed_up": speed_up}
        points += [row] if us else []
    head = {key: result[key] for key in ("kind", "bandwidth")}
    return head | {"points": points, "break_even": break_evens(result), "left_out": left_out(result)}


def break_even_lines(result: dict[str, Any]) -> str:
    """Render one line per shape, variant and rival."""
    return "\n".join(
        f"{row['num_query_heads']}/{row['num_kv_heads']} heads: {row['variant']} is faster than {row['than']} "
        f"from {break_even_text(row)} tokens on"
        for row in break_evens(result)
    )


def _us(seconds: float | None) -> str:
    return "-" if seconds is None or seconds == float("inf") else f"{seconds * 1e6:.1f}"


def _ratio(seconds: float | None, floor: float | None) -> str:
    return "-" if seconds is None or not floor or seconds == float("inf") else f"{seconds / floor:.2f}"


def _times(slow: float | None, fast: float | None) -> str:
    return "-" if not fast or slow is None or slow == float("inf") else f"{slow / fast:.1f}x"
