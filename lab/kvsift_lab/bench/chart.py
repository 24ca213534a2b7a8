"""Attention over context length as a picture: microseconds with floors, and speed-up over the best dense kernel."""

from __future__ import annotations

import hashlib
import json
from io import BytesIO
from typing import Any

from kvsift.errors import MissingInput
from kvsift_lab.bench.attention import OURS_DENSE, best_dense, floors, labels, medians, shapes, sparse_names
from kvsift_lab.numbers import tokens

COLOURS = {"quest-minmax": "#0b6e4f", "quest-minmax_fp8": "#d1495b", "sketch-bits1": "#3d5a98", OURS_DENSE: "#333333"}
GREYS = {"sdpa-flash": "#9aa5b1", "sdpa-cudnn": "#5f7c99", "flashinfer": "#c3a86b", "flashinfer-tc": "#a07d2c"}
SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "kvsift",
    "svg.fonttype": "none",
    "font.size": 9,
    "font.family": "sans-serif",
}


def digest(result: dict[str, Any]) -> str:
    """Return a name of a result, which its chart contains."""
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()[:16]


def attention_chart(result: dict[str, Any], file_format: str = "svg") -> bytes:
    """Draw a column per shape: times above, speed-up below.

    Raises:
        InputError: without a measured point.
    """
    import matplotlib
    from matplotlib.figure import Figure

    columns = shapes(result)
    if not columns:
        raise MissingInput("no point of this result was measured; there is nothing to draw.")
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(1 + 4 * len(columns), 6.6), layout="constrained")
        axes = figure.subplots(2, len(columns), sharex="col", sharey="row", squeeze=False)
        for column, ((query_heads, kv_heads), points) in enumerate(columns.items()):
            _draw_times(axes[0, column], result, points)
            _draw_speed_ups(axes[1, column], result, points)
            axes[0, column].set_title(f"{query_heads} query heads, {kv_heads} KV heads")
            axes[1, column].set_xlabel("context, tokens")
        axes[0, 0].set_ylabel("microseconds per step and layer")
        axes[1, 0].set_ylabel("times faster than the best dense kernel")
        handles, names = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        return _saved(figure, result, file_format)


def _draw_times(axis: Any, result: dict[str, Any], points: list[dict[str, Any]]) -> None:
    known, bandwidth = labels(result), result["bandwidth"]["used"]
    names = [variant["name"] for variant in points[0]["variants"]]
    for name in names:
        timed = [(point["context"], 1e6 * medians(point)[name]) for point in points if name in medians(point)]
        if not timed:
            continue
        ours = name in COLOURS
        axis.plot(
            *zip(*timed), color=COLOURS.get(name) or GREYS.get(name, "#777777"), marker="o" if ours else ".",
            markersize=4, linewidth=1.8 if ours else 1.0, label=known.get(name, name), zorder=3 if ours else 2,
        )  # fmt: skip
    contexts = [point["context"] for point in points]
    for name in [*sparse_names(result), next((name for name in names if name not in sparse_names(result)), "")]:
        bounds = [1e6 * floors(point, bandwidth)[name] for point in points if name in floors(point, bandwidth)]
        if bounds:
            label = f"floor, {name if name in sparse_names(result) else 'dense'}"
            colour = COLOURS.get(name, "#777777") if name in sparse_names(result) else "#777777"
            axis.plot(contexts, bounds, color=colour, linestyle=":", linewidth=1.2, label=label)
    axis.set_yscale("log")
    _finish(axis, contexts)


def _draw_speed_ups(axis: Any, result: dict[str, Any], points: list[dict[str, Any]]) -> None:
    for name in sparse_names(result):
        timed = [(p["context"], best_dense(p)[1] / medians(p)[name]) for p in points if name in medians(p)]
        timed = [(context, factor) for context, factor in timed if factor < float("inf")]
        if timed:
            axis.plot(*zip(*timed), color=COLOURS.get(name), marker="o", markersize=4, linewidth=1.8)
            axis.annotate(f"{timed[-1][1]:.1f}x", timed[-1], xytext=(7, -3), textcoords="offset points")
    axis.axhline(1, color="#777777", linewidth=1, linestyle="--")
    axis.set_yscale("log")
    ticks = [0.5, 1, 2, 4, 8, 16, 32]
    axis.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    _finish(axis, [point["context"] for point in points])


def _finish(axis: Any, contexts: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xlim(contexts[0] / 1.2, contexts[-1] * 1.6)  # room for the label of the last point
    axis.set_xticks(contexts, [tokens(context) for context in contexts])
    axis.minorticks_off()
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _saved(figure: Any, result: dict[str, Any], file_format: str) -> bytes:
    picture, about = BytesIO(), {"Creator": "kvsift", "Date": None, "Description": f"result {digest(result)}"}
    figure.savefig(picture, format=file_format, dpi=110, metadata=about if file_format == "svg" else None)
    lines = picture.getvalue()
    return lines if file_format != "svg" else b"".join(line.rstrip() + b"\n" for line in lines.splitlines())
