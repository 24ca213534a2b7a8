"""Attention results as tables and text. Numbers are rendered, never typed."""

from __future__ import annotations

from statistics import median
from typing import Any

from kvsift.benchmarks.break_even import break_even
from kvsift.benchmarks.numbers import spread, table, tokens

OURS_DENSE = "ours-dense"
Points = list[dict[str, Any]]
Shape = tuple[int, int]


def labels(result: dict[str, Any]) -> dict[str, str]:
    """Name of a variant -> what it is, with its version."""
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
    """Seconds of every variant that was timed."""
    timed = [v for v in point.get("variants", []) if v.get("samples_s") and role in (None, v["role"])]
    return {variant["name"]: median(variant["samples_s"]) for variant in timed}


def best_dense(point: dict[str, Any]) -> tuple[str, float]:
    """The fastest dense variant, ours among them, and its seconds; ("", inf) if none ran."""
    dense = medians(point, "dense")
    return min(dense.items(), key=lambda each: each[1], default=("", float("inf")))


def floors(point: dict[str, Any], bandwidth: float) -> dict[str, float]:
    """Seconds that the bytes of every variant need."""
    return {variant["name"]: variant["bytes"] / bandwidth for variant in point.get("variants", [])}


def shapes(result: dict[str, Any]) -> dict[Shape, Points]:
    """Measured points by heads, contexts ascending."""
    found: dict[Shape, Points] = {}
    for point in result["points"]:
        if "variants" in point:
            found.setdefault((point["num_query_heads"], point["num_kv_heads"]), []).append(point)
    return {shape: sorted(points, key=lambda point: point["context"]) for shape, points in found.items()}


def sparse_names(result: dict[str, Any]) -> list[str]:
    """Of our variants."""
    return [f"quest-{kind}" for kind in result["recipe"]["score_by"]]


def attention_tables(result: dict[str, Any]) -> str:
    """A Markdown table per shape: the best dense kernel, ours, and every sparse variant with floor and speed-up."""
    columns = ["context", "best dense", "times its floor", "by", "ours, dense"]
    for name in sparse_names(result):
        columns += [name, "times its floor", "speed-up"]
    parts = []
    for (query_heads, kv_heads), points in shapes(result).items():
        rows = [_row(point, sparse_names(result), result["bandwidth"]["used"]) for point in points]
        parts.append(f"{query_heads} query heads, {kv_heads} KV heads, microseconds:\n\n{table(columns, rows)}")
    return "\n\n".join(parts)


def _row(point: dict[str, Any], sparse: list[str], bandwidth: float) -> list[str]:
    name, dense = best_dense(point)
    seconds, floor = medians(point), floors(point, bandwidth)
    cells = [tokens(point["context"]), _us(dense), _ratio(dense, floor.get(name)), name or "-"]
    cells.append(_us(seconds.get(OURS_DENSE)))
    for each in sparse:
        cells += [_us(seconds.get(each)), _ratio(seconds.get(each), floor.get(each)), _times(dense, seconds.get(each))]
    return cells


def dense_tables(result: dict[str, Any]) -> str:
    """A Markdown table per shape: every dense variant, and the floor they share."""
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
    """One Markdown table of the points with these contexts."""
    rows = []
    for (query_heads, kv_heads), points in shapes(result).items():
        for point in points:
            if point["context"] in contexts:
                name, dense = best_dense(point)
                seconds = medians(point)
                ours = [
                    f"{_us(seconds.get(each))} ({_times(dense, seconds.get(each))})" for each in sparse_names(result)
                ]
                heads = f"{query_heads}/{kv_heads}"
                rows.append([heads, tokens(point["context"]), f"{_us(dense)} ({name})", *ours])
    return table(["heads", "context", "best dense", *sparse_names(result)], rows)


def break_evens(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Tokens from which each sparse variant is faster, per shape: than the best dense kernel, and than ours."""
    found = []
    for shape, points in shapes(result).items():
        for name in sparse_names(result):
            both = [point for point in points if name in medians(point)]
            rivals = {
                "best dense": [best_dense(point)[1] for point in both],
                OURS_DENSE: [medians(point).get(OURS_DENSE, float("inf")) for point in both],
            }
            for rival, dense in rivals.items():
                if both and max(dense) < float("inf"):
                    contexts, sparse = [p["context"] for p in both], [medians(p)[name] for p in both]
                    here = {"num_query_heads": shape[0], "num_kv_heads": shape[1], "variant": name, "than": rival}
                    at = break_even(contexts, dense, sparse)
                    found.append(here | {"tokens": at, "shortest": contexts[0], "longest": contexts[-1]})
    return found


def break_even_text(found: dict[str, Any]) -> str:
    """A number of tokens, or on which side of what was measured it lies."""
    if found["tokens"] is None:
        return f"beyond {tokens(found['longest'])}"
    return f"below {tokens(found['shortest'])}" if found["tokens"] == 0 else f"{found['tokens']:,.0f}"


def break_even_table(result: dict[str, Any]) -> str:
    """A Markdown table: a row per shape and variant."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for found in break_evens(result):
        key = f"{found['num_query_heads']}/{found['num_kv_heads']}", found["variant"]
        cells.setdefault(key, {})[found["than"]] = break_even_text(found)
    rows = [[*key, *(than.get(rival, "-") for rival in ("best dense", OURS_DENSE))] for key, than in cells.items()]
    return table(["heads", "variant", "faster than the best dense kernel from", "than our own from"], rows)


def losses_table(result: dict[str, Any]) -> str:
    """A Markdown table of every point where a sparse variant is slower than the best dense kernel."""
    rows = []
    for (query_heads, kv_heads), points in shapes(result).items():
        for point in points:
            name, dense = best_dense(point)
            for each, seconds in medians(point, "sparse").items():
                if seconds > dense:
                    here = [f"{query_heads}/{kv_heads}", tokens(point["context"]), each]
                    rows.append([*here, _us(seconds), f"{_us(dense)} ({name})", _times(seconds, dense)])
    if not rows:
        return "At no measured context is a sparse variant slower than the best dense kernel."
    return table(["heads", "context", "variant", "takes", "best dense", "times slower"], rows)


def breakdown_table(result: dict[str, Any]) -> str:
    """A Markdown table: the separate kernels, their sum, and the single launch; microseconds."""
    rows = []
    for (query_heads, kv_heads), points in shapes(result).items():
        for point in points:
            for kind in result["recipe"]["score_by"]:
                pieces = {p["name"]: median(p["samples_s"]) for p in point["breakdown"] if p.get("score_by") == kind}
                kernels = [pieces.get(name) for name in ("score_pages", "visible_pages", "page_attention")]
                total = None if None in kernels else sum(each for each in kernels if each is not None)
                early = medians(point).get(f"quest-{kind}")
                floor = floors(point, result["bandwidth"]["used"])[f"quest-{kind}"]
                alone = pieces.get("single launch, not early")
                here = [f"{query_heads}/{kv_heads}", tokens(point["context"]), kind]
                rows.append([*here, *map(_us, [*kernels, total, alone, early, floor])])
    columns = ["heads", "context", "summary", "score", "choose", "attend", "sum", "one launch", "early", "floor"]
    return table(columns, rows)


def correctness(result: dict[str, Any]) -> dict[str, float]:
    """The worst of all points: distance from float32, share of the reference's pages, how far the scores of others are
    below its last, and interquartile range over median."""
    measured = [v for point in result["points"] for v in point.get("variants", []) if v.get("samples_s")]
    errors = {role: [v["error"] for v in measured if v["role"] == role] for role in ("sparse", "dense")}
    return {
        "sparse_error": max(errors["sparse"], default=float("nan")),
        "dense_error": max(errors["dense"], default=float("nan")),
        "same_pages": min((v["same_pages"] for v in measured if v["role"] == "sparse"), default=float("nan")),
        "score_gap": max((v["score_gap"] for v in measured if v["role"] == "sparse"), default=float("nan")),
        "spread": max((spread(v["samples_s"]) for v in measured), default=float("nan")),
    }


def left_out(result: dict[str, Any]) -> list[str]:
    """What was not measured and why, each said once."""
    found = []
    for point in result["points"]:
        where = f"{point['num_query_heads']}/{point['num_kv_heads']} heads at {tokens(point['context'])}"
        if "reason" in point:
            found.append(f"{where}: {point['reason']}")
        found += [f"{v['name']}: {v['reason']}" for v in point.get("variants", []) if "reason" in v]
    return list(dict.fromkeys(found))


def _us(seconds: float | None) -> str:
    return "-" if seconds is None or seconds == float("inf") else f"{seconds * 1e6:.1f}"


def _ratio(seconds: float | None, floor: float | None) -> str:
    return "-" if seconds is None or not floor or seconds == float("inf") else f"{seconds / floor:.2f}"


def _times(slow: float | None, fast: float | None) -> str:
    return "-" if not fast or slow is None or slow == float("inf") else f"{slow / fast:.1f}x"
