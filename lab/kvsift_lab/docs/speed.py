"""Measured speed, for README, docs and the pages beside the results; without a result, how to make one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from kvsift.errors import MissingFile
from kvsift_lab import stored
from kvsift_lab.bench import BENCHES, chart
from kvsift_lab.bench import attention as attention_report
from kvsift_lab.bench import decode as decode_report
from kvsift_lab.bench import host as host_report
from kvsift_lab.bench import index as index_report
from kvsift_lab.bench import prefill as prefill_report
from kvsift_lab.bench import serve as serve_report
from kvsift_lab.bench.report import commit_of
from kvsift_lab.docs.quality import result_of
from kvsift_lab.eval.tables import budget_table
from kvsift_lab.numbers import table, tokens
from kvsift_lab.studies.busy import busy_table, conditions
from kvsift_lab.studies.chats import chats_table
from kvsift_lab.studies.exact import acceptance_table, exact_table
from kvsift_lab.studies.exact_captured import captured_table
from kvsift_lab.studies.recall import generation_table
from kvsift_lab.studies.vllm_decode import vllm_table

ROOT = Path(__file__).parents[3]
ATTENTION, DECODE, PREFILL, EXACT = "attention-h200", "decode-h200", "prefill-h200", "exact-native-cpu"
CHATS = "chats-h200", "chats-shared-h200", "chats-cpu"
MADE_BY = {
    "exact-h200": "exact-captured",
    "vllm-h200": "vllm-decode",
    "vllm-sketch-h200": "vllm-decode",
}  # others begin with the name of their bench
CHART = "docs/attention-h200.svg"
README_HEADS, README_CONTEXT = (32, 8), 128 << 10  # of one layer, and of prefill
Result = dict[str, Any]
Render = Callable[[], str]


def load(name: str) -> Result | None:
    """Read a result, and add its name; None if there is none."""
    path = ROOT / "results" / name
    return {**stored.load(path), "name": name} if path.is_dir() else None


def shown(names: str | tuple[str, ...], *parts: Callable[..., str]) -> Render:
    """Return a block of parts over one result or, in one table, over several."""
    names = (names,) if isinstance(names, str) else names

    def render() -> str:
        results = [result for name in names if (result := load(name)) is not None]
        if not results:
            bench = MADE_BY.get(names[0]) or max(filter(names[0].startswith, BENCHES), key=len, default=None)
            if bench is None:
                raise MissingFile(f"results/{names[0]} is missing, and no bench makes it any more: take it from git.")
            return f"Not measured yet: `kvsift bench {bench} --out results/{names[0]}`, then `make docs`."
        return "\n\n".join(filter(None, (part(*results) for part in parts)))

    return render


def place(result: Result) -> str:
    return f"`results/{result['name']}`"


def made(result: Result) -> str:
    """State machine, versions, commit and floors of a result."""
    gpu, speed = result["gpu"], result["bandwidth"]
    power = f", {gpu['power.limit']}" if "power.limit" in gpu else ""
    return (
        f"{place(result)}: {gpu['name']}{power}, torch {result['versions']['torch']}, commit {commit_of(result)}; "
        f"medians of {result['recipe']['repeats']} samples; floors at {speed['used'] / 1e12:.2f} TB/s "
        f"({speed['source']}), a large read in the same run reached {speed['measured'] / 1e12:.2f} TB/s."
    )


def measured_on(*results: Result) -> str:
    """State machine, versions and commit of results without floors."""
    lines = []
    for result in results:
        power = f", {result['gpu']['power.limit']}" if "power.limit" in result.get("gpu", {}) else ""
        samples = result["recipe"].get("repeats") or result["recipe"]["tokens"]
        number = f"medians of {samples} samples" if samples > 1 else "one sample after a warm-up"
        where = f"{result['machine']}{power}, torch {result['versions']['torch']}, commit {commit_of(result)}"
        lines.append(f"{place(result)}: {where}; {number}.")
    return "\n\n".join(lines)


def briefly_made(result: Result) -> str:
    return f"{place(result)}: {result['machine']}, commit {result['commit'][:10]}."


def points(text: Callable[[Result], str]) -> Callable[[Result], str]:
    """Return a part: the text of every point of a result."""
    return lambda result: "\n\n".join(text(point).strip() for point in result["points"])


def joined(*results: Result) -> list[Result]:
    return [point for result in results for point in result["points"]]


def picture(result: Result) -> str:
    """Link the chart from docs/."""
    return f"![Microseconds and speed-up over context length]({Path(CHART).name})"


def baselines(result: Result) -> str:
    """List the dense variants with their versions, and what was left out."""
    known = attention_report.labels(result)
    names = {v["name"] for point in result["points"] for v in point.get("variants", []) if v["role"] == "dense"}
    lines = [f"- `{name}`: {known[name]}" for name in known if name in names]
    missing = [f"- not measured: {reason}" for reason in attention_report.left_out(result)]
    return "\n".join(lines + missing)


def right(result: Result) -> str:
    """State the errors of the timed outputs and the spread of the samples."""
    worst = attention_report.correctness(result)
    return (
        "In the same run, every output was compared with float32. Largest distance relative to its length: sparse "
        f"{worst['sparse_error']:.1e}, over the pages that it chose; dense {worst['dense_error']:.1e}. At least "
        f"{100 * worst['same_pages']:.2f} % of the reference's pages were chosen; the others' scores are at most "
        f"{worst['score_gap']:.1e} below its last one, relatively. The interquartile range is at most "
        f"{100 * worst['spread']:.1f} % of the median."
    )


def end_to_end(result: Result) -> str:
    """Return the decode table, in milliseconds."""
    anchors = result["recipe"].get("anchors")
    selecting = f", {anchors} of its layers select" if anchors else ""
    title = f"Milliseconds per token, {_shape(result)}, `{result['recipe']['plan']}`{selecting}:"
    return f"{title}\n\n{decode_report.decode_table(result)}"


def ttft_table(*results: Result) -> str:
    return f"Seconds:\n\n{prefill_report.ttft_table({**results[0], 'points': joined(*results)})}"


def served(*results: Result) -> str:
    """Return the numbers of servers under load: machine, versions, turns, and how busy the machine was."""
    lines = []
    for result in results:
        point, recipe = result["points"][0], result["recipe"]
        alone = {plan: serve_report.overhead(point, plan) for plan in serve_report.plans_of(point)}
        direct = ", ".join(f"{ratio:.2f}x (`{plan}`)" for plan, ratio in alone.items() if ratio is not None)
        cost = f" The engine alone, in the same turns: {direct} the tokens per second." if direct else ""
        where = f"{result['machine']}, torch {result['versions']['torch']}, commit {result['commit'][:10]}"
        turns = f"{recipe['clients']} clients, {recipe['tokens']} tokens each, {recipe['repeats']} turns of each plan"
        lines.append(f"{place(result)}: {where}; {turns}; {serve_report.busy(point)}.{cost}")
    return "\n\n".join([serve_report.serve_table(joined(*results)), *lines])


def chatted(*results: Result) -> str:
    """Return what chats beside each other get, vLLM's of the same loads among them where they have results."""
    vllm = [load(result["name"].replace("chats", "chats-vllm", 1)) for result in results]
    with_vllm = [each for pair in zip(results, vllm) for each in pair if each is not None]
    sources = [f"{place(result)}: {result['machine']}, commit {commit_of(result)}" for result in with_vllm]
    return f"{chats_table(with_vllm)}\n\n{'; '.join(sources)}."


def one_token(result: Result) -> str:
    """Return a line on decode steps at batch 1, those that lose included."""
    steps = []
    for point in result["points"]:
        dense, sparse = (decode_report.tpot_s(point, name) for name in ("dense", "sifted"))
        if point["batch"] == 1 and dense and sparse:
            times = f"{1e3 * sparse:.2f} ms, dense {1e3 * dense:.2f} ({dense / sparse:.2f}x)"
            steps.append(f"{tokens(point['context'])} {times}")
    what = f"**One token** of {_shape(result)} under `{result['recipe']['plan']}`"
    return f"- {what}: {'; '.join(steps)}. {_source(result)}"


def one_layer(result: Result) -> str:
    """Return a line on attention of one layer."""
    points = attention_report.shapes(result)[README_HEADS]
    point = min(points, key=lambda point: abs(point["context"] - README_CONTEXT))
    name, dense = attention_report.best_dense(point)
    times = attention_report.medians(point, "sparse")
    sparse = [f"`{name}` {1e6 * times[name]:.1f} us ({dense / times[name]:.1f}x)" for name in times]
    what = f"**Attention of one layer** for one token, {'/'.join(map(str, README_HEADS))} heads"
    rival = f"fastest dense kernel ({name}) {1e6 * dense:.1f} us"
    return f"- {what}, {tokens(point['context'])}: {', '.join(sparse)}; {rival}. {_source(result)}"


def first_token(result: Result) -> str:
    """Return a line on the time to the first token."""
    head, _, *rows = [line.strip("| ").split(" | ") for line in prefill_report.ttft_table(result).splitlines()]
    cells = next((row for row in rows if row[0] == tokens(README_CONTEXT)), rows[-1])
    sparse = [f"{head[i]} {cells[i]} s ({cells[i + 1]})" for i in range(len(head)) if head[i].startswith("`")]
    what = f"**First token** of {_shape(result)}, {cells[0]}"
    return f"- {what}: {', '.join(sparse)}; dense {cells[1]} s. {_source(result)}"


def _shape(result: Result) -> str:
    recipe = result["recipe"]
    name = recipe.get("shape") or recipe["model"]
    return f"the shape of {name} with random weights" if "shape" in recipe or recipe["random"] else str(name)


def _source(result: Result) -> str:
    return f"{place(result)}: {result['gpu']['name']}, commit {result['commit'][:10]}."


def longest_kernels(result: Result) -> str:
    """Return the kernel tables of the longest context."""
    longest = max(point["context"] for point in result["points"])
    points = [point for point in result["points"] if point["context"] == longest]
    return decode_report.kernel_tables({**result, "points": points})


def made_exactly(result: Result) -> str:
    """State machine, commit and the speed of dense decoding of a result of exact decoding."""
    dense = sorted(result["points"][0]["dense_seconds"])
    return (
        f"{place(result)}: {result['recipe']['tokens']:,} tokens, embedded model in bfloat16, {result['threads']} "
        f"threads, {result['level']}, commit {result['commit'][:10]}; medians of {len(dense)} rounds in turns "
        f"with dense decoding, {1e3 * dense[0]:.1f} to {1e3 * dense[-1]:.1f} ms a token of greedy prose."
    )


def made_in_steps(result: Result) -> str:
    """State machine, commits and rounds of a result of captured exact decoding."""
    machine = f"{result['machine']}, {result['gpu']['power.limit']}, torch {result['versions']['torch']}"
    rounds = sorted({len(case["samples"]) for case in result["points"]})
    commits = sorted({case.get("commit", result["commit"])[:10] for case in result["points"]})
    return (
        f"{place(result)}: {machine}, commit {' and '.join(commits)}; "
        f"{' to '.join(map(str, rounds[:: max(len(rounds) - 1, 1)]))} round{'s' * (rounds[-1] > 1)} after "
        "one that captures."
    )


def all_equal(result: Result) -> str:
    return f"{place(result)}: {sum(c['tokens'] for c in result['points']):,} tokens, all equal to dense decoding's."


def in_vllm(result: Result, of_llm: Result | None = None) -> str:
    """Return milliseconds per token in vLLM, and kvsift.LLM's in the same call."""
    source = f"{place(result)}: {result['machine']}, vLLM {result['versions']['vllm']}."
    return f"{vllm_table(result, of_llm)}\n\n{source}"


def split_table(result: Result) -> str:
    """Return milliseconds per token by context and index."""
    layers, rows = result["recipe"].get("layers"), []
    for point in result["points"]:
        for variant in point["variants"]:
            cells = [variant.get("reason", ""), "", ""]
            if "reason" not in variant:
                gib = variant["kv_bytes_on_device"] / (1 << 30)
                cells = [
                    f"{1e3 * median(variant['samples_s']):.1f}", f"{1e3 * variant['host_s']:.1f}", f"{gib:.2f} GiB"
                ]  # fmt: skip
            rows.append([f"{point['context']:,}", variant["name"], *cells])
    context = f"context, {layers} layers" if layers else "context"
    return table([context, "index", "ms per token", "host ms", "KV on the device"], rows)


def split_tables(*results: Result) -> str:
    """Return the tables of several results."""
    return "\n\n".join(f"{split_table(result)}\n\n{measured_on(result)}" for result in results)


def busy(*results: Result) -> str:
    """Return the time per token beside busy loops, for each measured machine."""
    return "\n\n".join(f"{busy_table(result)}\n\n{place(result)}: {conditions(result)}" for result in results)


def block_table(result: dict[str, Any]) -> str:
    """Return what indexes by block found, read and took, by context."""
    by_context: dict[tuple[str, int], list[list[str]]] = defaultdict(list)
    for point in result["points"]:
        shares = [f"{point[key]:.3f}" for key in ("found", "heaviest", "recovery")]
        cells = [f"`{point['plan']}`", *shares, f"{point['kib']:,}", f"{point['ms']:.2f}", f"{point['build_s']:.1f}"]
        by_context[point["task"], point["length"]].append(cells)
    heads = ["found", "ten best", "recovery", "KiB read", "ms", "build s"]
    return "\n\n".join(
        table([f"{task}, {length:,} tokens", *heads], rows) for (task, length), rows in by_context.items()
    )


def answers(*names: str) -> Render:
    """Return a block: exact match of evaluations with indexes."""
    return lambda: "\n\n".join(
        budget_table(each, budget) for each in map(result_of, names) for budget in each["recipe"]["budgets"]
    )


def readme() -> str:
    """Return a line per benchmark, as far as they are measured."""
    return "\n".join(shown(*each)() for each in ((DECODE, one_token), (ATTENTION, one_layer), (PREFILL, first_token)))


BLOCKS: dict[str, dict[str, Render]] = {
    "README.md": {"speed": readme},
    "docs/speed.md": {
        "attention": shown(ATTENTION, picture, attention_report.attention_tables, made, right),
        "break-even": shown(ATTENTION, attention_report.break_even_table),
        "losses": shown(ATTENTION, attention_report.losses_table),
        "decode": shown(DECODE, end_to_end, made),
        "sketch-decode": shown("decode-sketch-h200", end_to_end, made),
        "anchors-decode": shown("decode-anchors-h200", end_to_end, made),
        "engine": shown(DECODE, decode_report.engine_table),
        "kernels": shown(DECODE, longest_kernels),
        "prefill": shown((PREFILL, "prefill-256k-h200"), ttft_table, measured_on),
        "prefill-layer": shown("prefill-layer-h200", prefill_report.layer_table, measured_on),
        "prefill-layer-cpu": shown("prefill-layer-cpu", prefill_report.layer_table, measured_on),
        "chats": shown(CHATS, chatted),
        "serve": shown(("serve-cpu", "serve-32k-cpu"), served),
    },
    "docs/vllm.md": {
        "vllm": shown(("vllm-h200", "decode-beside-vllm-h200"), in_vllm),
        "vllm-sketch": shown("vllm-sketch-h200", in_vllm),
    },
    "docs/host.md": {
        "busy": shown("busy-machine", busy),
        "answers": answers("retrieval-32k", "retrieval-host-32k"),
        "written": shown("generation-recall-cpu", generation_table, briefly_made),
        "split": shown(("split-sketch-h200", "split-sketch-1m-h200"), split_tables),
    },
    "docs/exact.md": {"exact": shown(EXACT, exact_table, made_exactly)},
    "results/exact-acceptance-cpu/README.md": {
        "exact-acceptance": shown("exact-acceptance-cpu", acceptance_table, all_equal)
    },
    "results/exact-h200/README.md": {
        "exact-captured": shown("exact-h200", captured_table, made_in_steps),
        "exact-acceptance-captured": shown("exact-acceptance-h200", acceptance_table, all_equal),
    },
    "results/prefill-chunk-cpu/README.md": {
        "prefill-chunk": shown("prefill-chunk-cpu", prefill_report.layer_table, measured_on)
    },
    "results/attention-h200/README.md": {
        "dense": shown(ATTENTION, baselines, attention_report.dense_tables),
        "breakdown": shown(ATTENTION, attention_report.breakdown_table),
        "sketches": shown("attention-sketch-h200", attention_report.attention_tables, made),
    },
    "results/block-recall-cpu/README.md": {
        "by-block": shown("block-recall-cpu", block_table, briefly_made),
        "by-block-answers": answers("retrieval-blocks-32k"),
    },
    "results/split-h200/README.md": {"split": shown(("split-h200", "split-512k-h200", "split-1m-h200"), split_tables)},
    "results/host-cpu/README.md": {
        "host": shown("host-cpu", points(host_report.point_text), measured_on),
        "sketches": shown("host-sketch-cpu", points(host_report.point_text), measured_on),
    },
    "results/index-st-cpu/README.md": {"index-st": shown("index-st-cpu", points(index_report.point_text), measured_on)},
    "results/index-p-cpu/README.md": {"index-p": shown("index-p-cpu", points(index_report.point_text), measured_on)},
}


def stale_charts() -> Iterator[tuple[Path, Result]]:
    """Yield charts that do not match their result, with that result."""
    source, path = ROOT / "results" / ATTENTION, ROOT / CHART
    result = stored.load(source) if source.is_dir() else None
    if result is not None and not (path.is_file() and chart.digest(result) in path.read_text()):
        yield path, result


def draw(path: Path, result: Result) -> None:
    """Replace a chart."""
    path.write_bytes(chart.attention_chart(result))
