"""What README and docs/speed.md show of measured speed. Without a result they say how to make one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvsift.benchmarks import attention_report, chart, decode_report, prefill_report
from kvsift.eval.packed import read_stored, stored

ROOT = Path(__file__).parent.parent
ATTENTION, DECODE = "attention-h200.json", "decode-h200.json"
PREFILL = ("prefill-h200.json", "prefill-256k-h200.json")  # points of one table
PREFILL_LAYER, PREFILL_CHUNK = "prefill-layer-h200.json", "prefill-chunk-cpu.json"
PREFILL_LAYER_CPU = "prefill-layer-cpu.json"
CHART = "docs/attention-h200.svg"
HEADLINE_CONTEXTS = [32 << 10, 128 << 10, 512 << 10]


def load(name: str) -> dict[str, Any] | None:
    """A result of a benchmark; None if it is not there."""
    path = ROOT / "results" / name
    return json.loads(read_stored(path)) if stored(path).is_file() else None


def place(name: str) -> str:
    """Where a result lies, packed or not."""
    return f"`results/{stored(ROOT / 'results' / name).name}`"


def shown(name: str, *parts: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
    """Parts of a page over one result."""

    def render() -> str:
        result = load(name)
        if result is None:
            command = f"kvsift bench {name.partition('-')[0]} --out results/{name}"
            return f"Not measured yet: `{command}` on an H200, then `make docs`."
        return "\n\n".join(filter(None, (part(result) for part in parts)))

    return render


def made(name: str) -> Callable[[dict[str, Any]], str]:
    """Where a result is from."""

    def render(result: dict[str, Any]) -> str:
        gpu, recipe, speed = result["gpu"], result["recipe"], result["bandwidth"]
        power = f", {gpu['power.limit']}" if "power.limit" in gpu else ""
        commit = result["commit"][:10] + (" with changes" if result["commit"].endswith("+changes") else "")
        return (
            f"{place(name)}: {gpu['name']}{power}, torch {result['versions']['torch']}, commit {commit}; medians of "
            f"{recipe['repeats']} samples; floors at {speed['used'] / 1e12:.2f} TB/s ({speed['source']}), a large read "
            f"in the same run reached {speed['measured'] / 1e12:.2f} TB/s."
        )

    return render


def picture(result: dict[str, Any]) -> str:
    """The chart, seen from docs/."""
    return f"![Microseconds and speed-up over context length]({Path(CHART).name})"


def baselines(result: dict[str, Any]) -> str:
    """Every dense variant with its version, and what was left out."""
    known = attention_report.labels(result)
    names = {v["name"] for point in result["points"] for v in point.get("variants", []) if v["role"] == "dense"}
    lines = [f"- `{name}`: {known[name]}" for name in known if name in names]
    missing = [f"- not measured: {each}" for each in attention_report.left_out(result)]
    return "\n".join(lines + missing)


def right(result: dict[str, Any]) -> str:
    """How right what was timed is, and how much the samples vary."""
    worst = attention_report.correctness(result)
    return (
        "In the same run, every output was compared with float32. Largest distance relative to its length: sparse "
        f"{worst['sparse_error']:.1e}, over the pages that it chose; dense {worst['dense_error']:.1e}. At least "
        f"{100 * worst['same_pages']:.2f} % of the reference's pages were chosen; the others' scores are at most "
        f"{worst['score_gap']:.1e} below its last one, relatively. The interquartile range is at most "
        f"{100 * worst['spread']:.1f} % of the median."
    )


def headline(result: dict[str, Any]) -> str:
    """Attention at the contexts that the README shows."""
    table = attention_report.headline_table(result, HEADLINE_CONTEXTS)
    return f"One layer's attention for one token, microseconds, budget {result['recipe']['budget']:,}:\n\n{table}"


def end_to_end(result: dict[str, Any]) -> str:
    """Decoding, milliseconds."""
    recipe = result["recipe"]
    model = f"the shape of {recipe['model']} with random weights" if recipe["random"] else recipe["model"]
    return f"Milliseconds per token, {model}, `{recipe['plan']}`:\n\n{decode_report.decode_table(result)}"


def measured_on(name: str) -> Callable[[dict[str, Any]], str]:
    """Where a result without floors is from."""

    def render(result: dict[str, Any]) -> str:
        commit = result["commit"][:10] + (" with changes" if result["commit"].endswith("+changes") else "")
        power = f", {result['gpu']['power.limit']}" if "power.limit" in result.get("gpu", {}) else ""
        samples = result["recipe"].get("repeats") or result["recipe"]["tokens"]
        return (
            f"{place(name)}: {result['machine']}{power}, torch {result['versions']['torch']}, commit {commit}; "
            f"{f'medians of {samples} samples' if samples > 1 else 'one sample after a warm-up'}."
        )

    return render


def first_tokens() -> str:
    """Time to the first token, all results as one table."""
    found = {name: result for name in PREFILL if (result := load(name)) is not None}
    if not found:
        return shown(PREFILL[0])()
    points = [point for result in found.values() for point in result["points"]]
    together = {**next(iter(found.values())), "points": points}
    sources = [measured_on(name)(result) for name, result in found.items()]
    return "\n\n".join(["Seconds:", prefill_report.ttft_table(together), *sources])


def readme() -> str:
    """The headlines, as far as they are measured."""
    attention = shown(ATTENTION, headline, made(ATTENTION))()
    first = f"Seconds to the first token, shape of llama-3-8b with random weights:\n\n{first_tokens()}"
    return "\n\n".join([attention, shown(DECODE, end_to_end, made(DECODE))(), first.replace("Seconds:\n\n", "")])


BLOCKS = {
    "README.md": {"speed": readme},
    "docs/speed.md": {
        "attention": shown(ATTENTION, picture, attention_report.attention_tables, made(ATTENTION), right),
        "dense": shown(ATTENTION, baselines, attention_report.dense_tables),
        "break-even": shown(ATTENTION, attention_report.break_even_table),
        "breakdown": shown(ATTENTION, attention_report.breakdown_table),
        "losses": shown(ATTENTION, attention_report.losses_table),
        "decode": shown(DECODE, end_to_end, made(DECODE)),
        "engine": shown(DECODE, decode_report.engine_table),
        "kernels": shown(DECODE, decode_report.kernel_tables),
        "prefill": first_tokens,
        "prefill-layer": shown(PREFILL_LAYER, prefill_report.layer_table, measured_on(PREFILL_LAYER)),
        "prefill-layer-cpu": shown(PREFILL_LAYER_CPU, prefill_report.layer_table, measured_on(PREFILL_LAYER_CPU)),
        "prefill-chunk": shown(PREFILL_CHUNK, prefill_report.layer_table, measured_on(PREFILL_CHUNK)),
    },
}


def stale_charts() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Charts that are not of the result beside them, with that result."""
    result, path = load(ATTENTION), ROOT / CHART
    if result is not None and not (path.is_file() and chart.digest(result) in path.read_text()):
        yield path, result


def draw(path: Path, result: dict[str, Any]) -> None:
    """Replace a chart."""
    path.write_bytes(chart.attention_chart(result))
