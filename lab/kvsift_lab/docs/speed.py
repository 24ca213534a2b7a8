"""Measured speed for README, docs/speed.md and the pages beside the results; without a result, how to make one."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from kvsift_lab.bench import attention as attention_report
from kvsift_lab.bench import chart
from kvsift_lab.bench import decode as decode_report
from kvsift_lab.bench import prefill as prefill_report
from kvsift_lab.bench import serve as serve_report
from kvsift_lab.bench.numbers import tokens
from kvsift_lab.eval.packed import read_stored, stored

ROOT = Path(__file__).parents[3]
ATTENTION, DECODE = "attention-h200.json", "decode-h200.json"
SKETCH_ATTENTION, SKETCH_DECODE = "attention-sketch-h200.json", "decode-sketch-h200.json"
ANCHORS_DECODE = "decode-anchors-h200.json"
PREFILL = ("prefill-h200.json", "prefill-256k-h200.json")  # points of one table
PREFILL_LAYER, PREFILL_CHUNK = "prefill-layer-h200.json", "prefill-chunk-cpu.json"
PREFILL_LAYER_CPU = "prefill-layer-cpu.json"
SERVE = ("serve-cpu.json", "serve-32k-cpu.json")  # points of one table
CHATS = (  # studies/chats.py
    "chats-h200.json", "chats-shared-h200.json", "chats-cpu.json",
)  # fmt: skip
CHAT_TIMES = "all_tokens_per_s", "second_question_alone_s", "second_question_s"
IN_VLLM = "vllm-h200.json"  # studies/vllm_decode.py, once for each engine
EXACT, CAPTURED_EXACT = "exact-cpu.json", "exact-h200.json"
ACCEPTED, CAPTURED_ACCEPTED = "exact-acceptance-cpu.json", "exact-acceptance-h200.json"
STUDIES = {  # that make these
    IN_VLLM: "vllm_decode", EXACT: "exact_decoding", CAPTURED_EXACT: "exact_captured",
    ACCEPTED: "exact_acceptance", CAPTURED_ACCEPTED: "exact_acceptance",
}  # fmt: skip
TIMES = "seconds", "draft_s", "verify_s"  # of exact decoding
CHART = "docs/attention-h200.svg"
README_HEADS, README_CONTEXT = (32, 8), 128 << 10  # of one layer, and of prefill


def load(name: str) -> dict[str, Any] | None:
    """Read a result of a benchmark; None if there is none."""
    path = ROOT / "results" / name
    return json.loads(read_stored(path)) if stored(path).is_file() else None


def place(name: str) -> str:
    """Return the path of a result, packed or not."""
    return f"`results/{stored(ROOT / 'results' / name).name}`"


def shown(name: str, *parts: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
    """Return a block of parts over one result."""

    def render() -> str:
        result = load(name)
        if result is None:
            bench = f"kvsift bench {name.partition('-')[0]} --out results/{name}"
            command = f"python -m kvsift_lab.studies.{STUDIES[name]}" if name in STUDIES else bench
            return f"Not measured yet: `{command}`, then `make docs`."
        return "\n\n".join(filter(None, (part(result) for part in parts)))

    return render


def made(name: str) -> Callable[[dict[str, Any]], str]:
    """Return a part: machine, versions and commit of a result."""

    def render(result: dict[str, Any]) -> str:
        gpu, recipe, speed = result["gpu"], result["recipe"], result["bandwidth"]
        power = f", {gpu['power.limit']}" if "power.limit" in gpu else ""
        commit = commit_of(result)
        return (
            f"{place(name)}: {gpu['name']}{power}, torch {result['versions']['torch']}, commit {commit}; medians of "
            f"{recipe['repeats']} samples; floors at {speed['used'] / 1e12:.2f} TB/s ({speed['source']}), a large read "
            f"in the same run reached {speed['measured'] / 1e12:.2f} TB/s."
        )

    return render


def picture(result: dict[str, Any]) -> str:
    """Link the chart from docs/."""
    return f"![Microseconds and speed-up over context length]({Path(CHART).name})"


def baselines(result: dict[str, Any]) -> str:
    """List the dense variants with their versions, and what was left out."""
    known = attention_report.labels(result)
    names = {v["name"] for point in result["points"] for v in point.get("variants", []) if v["role"] == "dense"}
    lines = [f"- `{name}`: {known[name]}" for name in known if name in names]
    missing = [f"- not measured: {reason}" for reason in attention_report.left_out(result)]
    return "\n".join(lines + missing)


def right(result: dict[str, Any]) -> str:
    """State the errors of the timed outputs and the spread of the samples."""
    worst = attention_report.correctness(result)
    return (
        "In the same run, every output was compared with float32. Largest distance relative to its length: sparse "
        f"{worst['sparse_error']:.1e}, over the pages that it chose; dense {worst['dense_error']:.1e}. At least "
        f"{100 * worst['same_pages']:.2f} % of the reference's pages were chosen; the others' scores are at most "
        f"{worst['score_gap']:.1e} below its last one, relatively. The interquartile range is at most "
        f"{100 * worst['spread']:.1f} % of the median."
    )


def end_to_end(result: dict[str, Any]) -> str:
    """Return the decode table, in milliseconds."""
    anchors = result["recipe"].get("anchors")
    selecting = f", {anchors} of its layers select" if anchors else ""
    title = f"Milliseconds per token, {_shape(result)}, `{result['recipe']['plan']}`{selecting}:"
    return f"{title}\n\n{decode_report.decode_table(result)}"


def measured_on(name: str) -> Callable[[dict[str, Any]], str]:
    """Return a part: machine, versions and commit of a result without floors."""

    def render(result: dict[str, Any]) -> str:
        commit = commit_of(result)
        power = f", {result['gpu']['power.limit']}" if "power.limit" in result.get("gpu", {}) else ""
        samples = result["recipe"].get("repeats") or result["recipe"]["tokens"]
        return (
            f"{place(name)}: {result['machine']}{power}, torch {result['versions']['torch']}, commit {commit}; "
            f"{f'medians of {samples} samples' if samples > 1 else 'one sample after a warm-up'}."
        )

    return render


def first_tokens() -> str:
    """Return the time to the first token, all results in one table."""
    results = {name: result for name in PREFILL if (result := load(name)) is not None}
    if not results:
        return shown(PREFILL[0])()
    points = [point for result in results.values() for point in result["points"]]
    together = {**next(iter(results.values())), "points": points}
    sources = [measured_on(name)(result) for name, result in results.items()]
    return "\n\n".join(["Seconds:", prefill_report.ttft_table(together), *sources])


def served() -> str:
    """Return the numbers of servers under load, all results in one table."""
    results = {name: result for name in SERVE if (result := load(name)) is not None}
    if not results:
        return f"Not measured yet: `kvsift bench serve --out results/{SERVE[0]}`, then `make docs`."
    table = serve_report.serve_table([point for result in results.values() for point in result["points"]])
    return "\n\n".join([table, *(conditions_of(name, result) for name, result in results.items())])


def commit_of(result: dict[str, Any]) -> str:
    """Return the commit of a result, and whether its tree had changes."""
    return result["commit"][:10] + (" with changes" if result["commit"].endswith("+changes") else "")


def chatted() -> str:
    """Return what chats beside each other get, all results in one table."""
    results = {name: result for name in CHATS if (result := load(name)) is not None}
    if not results:
        return f"Not measured yet: `python -m kvsift_lab.studies.chats gpu results/{CHATS[0]}`, then `make docs`."
    rows = [row for result in results.values() for row in _chats(result)]
    head = "| | chats | documents | plan | tokens/s | over dense | second question alone | beside the others |"
    sources = [f"{place(name)}: {result['machine']}, commit {commit_of(result)}" for name, result in results.items()]
    return "\n".join([head, "|---" * 8 + "|", *rows, "", "; ".join(sources) + "."])


def _chats(result: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each plan, medians of the rounds."""
    recipe, found = result["recipe"], dict[str, list[dict[str, Any]]]()
    for round_ in result["rounds"]:
        found.setdefault(round_["plan"], []).append(round_)
    documents = f"{recipe['documents']} of {tokens(recipe['tokens'])}"
    [machine] = re.findall(r"H\d+|\d+ cores", result["machine"])
    middle = {
        plan: {key: median(round_[key] for round_ in rounds) for key in CHAT_TIMES} for plan, rounds in found.items()
    }
    for plan in dict.fromkeys([*recipe["plans"], *found]):  # vLLM's rounds are of no plan of the recipe
        speed, *questions = middle[plan].values()
        ratio = "" if plan == "dense" else f"{speed / middle['dense'][CHAT_TIMES[0]]:.2f}x"
        times = " | ".join(f"{seconds:.2f} s" for seconds in questions)
        yield f"| {machine} | {recipe['chats']} | {documents} | `{plan}` | {speed:,.0f} | {ratio} | {times} |"


def conditions_of(name: str, result: dict[str, Any]) -> str:
    """Return machine, versions and commit of a result of a server, its turns, and how busy the machine was."""
    point, recipe = result["points"][0], result["recipe"]
    alone = {plan: serve_report.overhead(point, plan) for plan in serve_report.plans_of(point)}
    direct = ", ".join(f"{ratio:.2f}x (`{plan}`)" for plan, ratio in alone.items() if ratio is not None)
    cost = f" The engine alone, in the same turns: {direct} the tokens per second." if direct else ""
    return (
        f"{place(name)}: {result['machine']}, torch {result['versions']['torch']}, commit {result['commit'][:10]}; "
        f"{recipe['clients']} clients, {recipe['tokens']} tokens each, {recipe['repeats']} turns of each plan; "
        f"{serve_report.busy(point)}.{cost}"
    )


def one_token(result: dict[str, Any]) -> str:
    """Return a line on decode steps at batch 1, those that lose included."""
    steps = []
    for point in result["points"]:
        dense, sparse = (decode_report.tpot_s(point, name) for name in ("dense", "sifted"))
        if point["batch"] == 1 and dense and sparse:
            times = f"{1e3 * sparse:.2f} ms, dense {1e3 * dense:.2f} ({dense / sparse:.2f}x)"
            steps.append(f"{tokens(point['context'])} {times}")
    what = f"**One token** of {_shape(result)} under `{result['recipe']['plan']}`"
    return f"- {what}: {'; '.join(steps)}. {_source(DECODE, result)}"


def one_layer(result: dict[str, Any]) -> str:
    """Return a line on attention of one layer."""
    points = attention_report.shapes(result)[README_HEADS]
    point = min(points, key=lambda point: abs(point["context"] - README_CONTEXT))
    name, dense = attention_report.best_dense(point)
    times = attention_report.medians(point, "sparse")
    sparse = [f"`{name}` {1e6 * times[name]:.1f} us ({dense / times[name]:.1f}x)" for name in times]
    what = f"**Attention of one layer** for one token, {'/'.join(map(str, README_HEADS))} heads"
    rival = f"fastest dense kernel ({name}) {1e6 * dense:.1f} us"
    return f"- {what}, {tokens(point['context'])}: {', '.join(sparse)}; {rival}. {_source(ATTENTION, result)}"


def first_token(result: dict[str, Any]) -> str:
    """Return a line on the time to the first token."""
    head, _, *rows = [line.strip("| ").split(" | ") for line in prefill_report.ttft_table(result).splitlines()]
    cells = next((row for row in rows if row[0] == tokens(README_CONTEXT)), rows[-1])
    sparse = [f"{head[i]} {cells[i]} s ({cells[i + 1]})" for i in range(len(head)) if head[i].startswith("`")]
    what = f"**First token** of {_shape(result)}, {cells[0]}"
    return f"- {what}: {', '.join(sparse)}; dense {cells[1]} s. {_source(PREFILL[0], result)}"


def _shape(result: dict[str, Any]) -> str:
    recipe = result["recipe"]
    name = recipe.get("shape") or recipe["model"]
    return f"the shape of {name} with random weights" if "shape" in recipe or recipe["random"] else str(name)


def _source(name: str, result: dict[str, Any]) -> str:
    return f"{place(name)}: {result['gpu']['name']}, commit {result['commit'][:10]}."


def longest_kernels(result: dict[str, Any]) -> str:
    """Return the kernel tables of the longest context."""
    longest = max(point["context"] for point in result["points"])
    points = [point for point in result["points"] if point["context"] == longest]
    return decode_report.kernel_tables({**result, "points": points})


def in_vllm(result: dict[str, Any]) -> str:
    """Return milliseconds per token in vLLM, its own attention beside plans in the same run, and kvsift.LLM's there."""
    lines = [
        "| plan | context | batch | vLLM's own | with the plan | | `kvsift.LLM` |",
        "|---|---|---|---|---|---|---|",
    ]
    stock = {run["call"]: run["points"] for run in result["runs"] if run["plan"] == "stock"}
    of_llm = dict[tuple[Any, ...], str]()
    for point in result["kvsift_llm"]["points"]:
        for variant in point["variants"]:
            key = (result["kvsift_llm"]["call"], variant["plan"], round(point["context"] / 1024), point["batch"])
            of_llm[key] = f"{1e3 * median(variant['tpot_s']):.2f}"
    for run in (run for run in result["runs"] if run["plan"] != "stock" and run["call"] in stock):
        for own, point in zip(stock[run["call"]], run["points"]):
            times, where = (own["tpot_ms"], point["tpot_ms"]), f"{tokens(point['context'])} | {point['batch']}"
            llm = of_llm.get((run["call"], run["plan"], round(point["context"] / 1024), point["batch"]), "")
            lines.append(
                f"| `{run['plan']}` | {where} | {times[0]:.2f} | {times[1]:.2f} | {times[0] / times[1]:.2f}x | {llm} |"
            )
    return "\n".join(lines)


def exactly(result: dict[str, Any]) -> str:
    """Return accepted drafts and the speed of exact decoding over dense decoding, by task and plan."""
    heads = "| text | drafts by | accepted | speed-up | without repeats | tokens a pass |"
    lines = [heads, "|---|---|---|---|---|---|"]
    for row in result["rows"]:
        passes = sum(sum(report["verified"].values()) for report in row["last"])
        accepted = "" if row["accepted"] is None else f"{row['accepted']:.3f}"
        plan = f"`{row['plan']}`" if row["accepted"] is not None else "none"
        times = f"{row['speedup']:.2f}x | {row['speedup_without_repeats']:.2f}x"
        lines.append(f"| {row['task']} | {plan} | {accepted} | {times} | {row['tokens'] / max(passes, 1):.1f} |")
    return "\n".join(lines)


def made_exactly(result: dict[str, Any]) -> str:
    """Return machine and commit of that result."""
    dense = sorted(result["rows"][0]["dense_seconds"])
    return (
        f"{place(EXACT)}: {result['context']:,} tokens, embedded model in bfloat16, {result['machine']['threads']} "
        f"threads, {result['machine']['level']}, commit {result['commit']}; medians of {len(dense)} rounds in turns "
        f"with dense decoding, {1e3 * dense[0]:.1f} to {1e3 * dense[-1]:.1f} ms a token of greedy prose."
    )


def exactly_captured(result: dict[str, Any]) -> str:
    """Return the speed of exact decoding over the fastest dense decoding, at acceptances that were imposed."""
    heads = ["tokens", "rows", "decoding", "accepted", "ms per token", "speed-up", "drafts", "ms each", "ms to verify"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case in sorted(result["cases"], key=lambda case: (case["tokens"], case["rows"])):
        run, _, share = case["run"].rpartition(" ") if case["run"][-1].isdigit() else (case["run"], "", "")
        samples = case["samples"]
        ms = [1e3 * median(sample[name] for sample in samples) if name in samples[0] else None for name in TIMES]
        verified = Counter[str]()
        for sample in samples:
            verified.update(sample.get("verified", {}))
        mean = sum(int(drafts) * count for drafts, count in verified.items()) / max(sum(verified.values()), 1)
        numbers = [f"{ms[0]:.2f}", f"{case['ratio']:.2f}x", f"{mean:.1f}" if verified else ""]
        numbers += ["" if each is None else f"{each:.2f}" for each in ms[1:]]
        plan = f"`{run}`" if share else run
        lines.append(f"| {tokens(case['tokens'])} | {case['rows']} | {plan} | {share} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def made_in_steps(result: dict[str, Any]) -> str:
    """Return machine and commit of that result."""
    machine = f"{result['machine']}, {result['gpu']['power.limit']}, torch {result['versions']['torch']}"
    rounds = sorted({len(case["samples"]) for case in result["cases"]})
    commits = sorted({case.get("commit", result["commit"])[:10] for case in result["cases"]})
    return (
        f"{place(CAPTURED_EXACT)}: {machine}, commit {' and '.join(commits)}; "
        f"{' to '.join(map(str, rounds[:: max(len(rounds) - 1, 1)]))} round{'s' * (rounds[-1] > 1)} after "
        "one that captures."
    )


def accepted_drafts(name: str) -> Callable[[dict[str, Any]], str]:
    """Return a part: shares of drafts that were accepted, by length, text and plan; RULER's tasks together."""

    def part(result: dict[str, Any]) -> str:
        known, own = Counter[tuple[str, str, str, str]](), ("needle", "facts")
        for case in result["cases"]:
            task = case["task"] if case["task"] in own or case["task"].startswith("prose") else "RULER, 13 tasks"
            length = f"{case['length']:,}" + (", float32" if case.get("dtype") == "float32" else "")
            for key, count in case.items():
                if isinstance(count, int):
                    known[length, task, case["plan"], key] += count
        plans = list(dict.fromkeys(case["plan"] for case in result["cases"]))
        heads = ["tokens", "text", "answers", *(f"`{plan}`" for plan in plans), "repeats"]
        lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for length, task in dict.fromkeys(key[:2] for key in known):
            of = {key: known[length, task, plans[0], key] for key in ("tokens", "repeated", "repeats_accepted")}
            shares = []
            for plan in plans:
                right, wrong = (known[length, task, plan, f"drafts_{key}"] for key in ("accepted", "wrong"))
                shares.append(f"{right / (right + wrong):.3f} of {right + wrong}" if right + wrong else "")
            repeats = f"{of['repeats_accepted'] / of['repeated']:.2f} of {of['repeated']}" if of["repeated"] else ""
            lines.append(f"| {length} | {task} | {of['tokens']} | {' | '.join(shares)} | {repeats} |")
        total = sum(case["tokens"] for case in result["cases"])
        return "\n".join(lines) + f"\n\n{place(name)}: {total:,} tokens, all equal to dense decoding's."

    return part


def readme() -> str:
    """Return a line per benchmark, as far as they are measured."""
    rows = [shown(DECODE, one_token), shown(ATTENTION, one_layer), shown(PREFILL[0], first_token)]
    return "\n".join(render() for render in rows)


BLOCKS = {
    "README.md": {"speed": readme},
    "docs/speed.md": {
        "attention": shown(ATTENTION, picture, attention_report.attention_tables, made(ATTENTION), right),
        "break-even": shown(ATTENTION, attention_report.break_even_table),
        "losses": shown(ATTENTION, attention_report.losses_table),
        "decode": shown(DECODE, end_to_end, made(DECODE)),
        "sketch-decode": shown(SKETCH_DECODE, end_to_end, made(SKETCH_DECODE)),
        "anchors-decode": shown(ANCHORS_DECODE, end_to_end, made(ANCHORS_DECODE)),
        "engine": shown(DECODE, decode_report.engine_table),
        "kernels": shown(DECODE, longest_kernels),
        "prefill": first_tokens,
        "prefill-layer": shown(PREFILL_LAYER, prefill_report.layer_table, measured_on(PREFILL_LAYER)),
        "prefill-layer-cpu": shown(PREFILL_LAYER_CPU, prefill_report.layer_table, measured_on(PREFILL_LAYER_CPU)),
        "chats": chatted,
        "serve": served,
    },
    "docs/vllm.md": {
        "vllm": shown(
            IN_VLLM,
            in_vllm,
            lambda result: f"{place(IN_VLLM)}: {result['machine']}, vLLM {result['versions']['vllm']}.",
        )
    },
    "results/exact-cpu.md": {
        "exact": shown(EXACT, exactly, made_exactly),
        "exact-acceptance": shown(ACCEPTED, accepted_drafts(ACCEPTED)),
    },
    "results/exact-h200.md": {
        "exact-captured": shown(CAPTURED_EXACT, exactly_captured, made_in_steps),
        "exact-acceptance-captured": shown(CAPTURED_ACCEPTED, accepted_drafts(CAPTURED_ACCEPTED)),
    },
    "results/prefill-chunk-cpu.md": {
        "prefill-chunk": shown(PREFILL_CHUNK, prefill_report.layer_table, measured_on(PREFILL_CHUNK))
    },
    "results/attention-h200.md": {
        "dense": shown(ATTENTION, baselines, attention_report.dense_tables),
        "breakdown": shown(ATTENTION, attention_report.breakdown_table),
        "sketches": shown(SKETCH_ATTENTION, attention_report.attention_tables, made(SKETCH_ATTENTION)),
    },
}


def stale_charts() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield charts that do not match their result, with that result."""
    result, path = load(ATTENTION), ROOT / CHART
    if result is not None and not (path.is_file() and chart.digest(result) in path.read_text()):
        yield path, result


def draw(path: Path, result: dict[str, Any]) -> None:
    """Replace a chart."""
    path.write_bytes(chart.attention_chart(result))
