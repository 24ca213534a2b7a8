"""Render the tables and examples of README, docs and results from code and results. ``--check`` only compares.

A page has markers; what stands between them is replaced. Pages of docs have the tables that a reader needs to decide;
all others stand on pages beside the results that they are of.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from kvsift.cli.methods import budget_knobs, budget_note, method_rows, own_budget, spelled, state_note
from kvsift.kernels import page_summary
from kvsift_lab.bench.numbers import table
from kvsift_lab.docs import host, papers, speed
from kvsift_lab.eval.packed import read_stored, stored
from kvsift_lab.eval.tables import (
    budget_table,
    fidelity_table,
    finished_by_all,
    prefill_table,
    quality_table,
    recall_table,
)
from kvsift_lab.eval.tasks import TASKS

ROOT = Path(__file__).parents[3]


def method_table() -> str:
    """Return the catalogue as a Markdown table."""
    heads = ("method", "chooses", "phases", "unit", "keeps", "state", "options", "source")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in method_rows():
        knobs = _code(spelled(row["knobs"])) + (f"; budget: {_code(own)}" if (own := own_budget(row)) else "")
        phases, state = ", ".join(row["phases"]), f"{row['state_bytes_per_token']:,.0f} B"
        about = (f"`{row['name']}`", row["summary"], phases, row["granularity"], row["keeps"], state)
        lines.append(f"| {' | '.join((*about, knobs, row['source']))} |")
    return "\n".join(lines) + f"\n\n{state_note()} {budget_note(_code(spelled(budget_knobs())))}"


README_METHODS = (
    "sketch",
    "quest",
    "retrieval_attention",
    "infllm",
    "quoka",
    "critiprefill",
    "keydiff",
    "snapkv",
    "streaming_llm",
    "oracle_tokens",
)


def some_methods() -> str:
    """Return ten lines of the catalogue, and the names of the other methods."""
    rows = {row["name"]: row for row in method_rows()}
    lines = ["| method | chooses | phases | source |", "|---|---|---|---|"]
    for row in (rows.pop(name) for name in README_METHODS):
        lines.append(f"| `{row['name']}` | {row['summary']} | {', '.join(row['phases'])} | {row['source']} |")
    return "\n".join(lines) + f"\n\nAlso {_code(rows)}."


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def task_table() -> str:
    """Return the tasks as a Markdown table."""
    lines = ["| task | question | scorer |", "|---|---|---|"]
    for task in TASKS.values():
        scorer = "exp of minus the mean NLL" if task.kind == "perplexity" else f"`{task.style.scorer}`"
        lines.append(f"| `{task.name}` | {task.about} | {scorer} |")
    return "\n".join(lines)


RESULT = "selection-32k"
STUDY = "sketch-study.json"
README_BUDGET = 512
README_PLANS = ("dense", "oracle_tokens", "sketch", "quest", "streaming_llm")


def quality() -> str:
    """Return every cell of the quality result."""
    return f"{quality_table(papers.result_of(RESULT))}\n\nExact match {_made(RESULT)}"


def fidelity(name: str) -> Callable[[], str]:
    """Return a block: divergence from dense predictions by plan and budget."""

    def render() -> str:
        result = papers.result_of(name)
        contexts = {(sample["length"], sample["seed"]) for sample in finished_by_all(result)}
        return f"{fidelity_table(result)}\n\nMeans over contexts, {len(contexts)} in all, {_made(name)}"

    return render


def cheaper_answers() -> str:
    """Return exact match with cheaper summaries."""
    name = "summaries-32k"
    return f"{quality_table(papers.result_of(name))}\n\nExact match {_made(name)}"


def cheaper_recall() -> str:
    """Return the recall of cheaper summaries."""
    name = "summary-recall-32k.json"
    return f"{recall_table(papers.result_of(name))}\n\nMeans over questions, steps, layers and heads {_made(name)}"


def prefilled(name: str) -> Callable[[], str]:
    """Return a block: exact match of plans that are sparse in prefill."""

    def render() -> str:
        result = papers.result_of(name)
        left = sorted({job["task"] for job in result["left_out"]} - {s["task"] for s in result["samples"]})
        missing = f" Not asked for lack of time: {', '.join(left)}." if left else ""
        return (
            f"{prefill_table(result)}\n\nExact match, budget {result['recipe']['budgets'][0]}, {_made(name)}{missing}"
        )

    return render


def headline() -> str:
    """Return the quality result at one budget, plans of the README only."""
    head, line, *rows = budget_table(papers.result_of(RESULT), README_BUDGET).splitlines()
    by_plan = {row.split("|")[1].strip(): row for row in rows}
    own = [by_plan[plan] for plan in README_PLANS]
    return "\n".join([head, line, *own, "", f"Exact match {_made(RESULT)}"])


def _made(name: str) -> str:
    return _made_by(papers.result_of(name), name)


def _made_by(result: dict[str, Any], name: str) -> str:
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("torch", "transformers"))
    machines = " and ".join(dict.fromkeys(session["machine"] for session in result["sessions"]))
    return (
        f"at {' and '.join(f'{length:,}' for length in result['recipe']['lengths'])} tokens on the embedded model; "
        f"{speed.place(name)}: {machines}, {versions}, {papers.commits([result])}."
    )


def sketch_study() -> str:
    """Return what the parts of a sketch are worth: a row per variant, means over questions."""
    result = json.loads(read_stored(papers.RESULTS / STUDY))
    measures = [key for key in result["samples"][0] if key not in ("task", "seed", "question", "variant")]
    rows = []
    for variant, num_bytes in result["bytes"].items():
        own = [sample for sample in result["samples"] if sample["variant"] == variant]
        means = [fmean(sample[measure] for sample in own) for measure in measures]
        rows.append([variant, f"{num_bytes:.0f}", *(f"{mean:.3f}" for mean in means)])
    questions = {(sample["task"], sample["seed"], sample["question"]) for sample in result["samples"]}
    contexts = {key[:2] for key in questions}
    return (
        f"{table(['', 'B', *measures], rows)}\n\nMeans over {len(questions)} questions on {len(contexts)} contexts "
        f"{_made_by({**result, 'sessions': [result]}, STUDY)}"
    )


def when_measured(name: str, render: Callable[[], str]) -> Callable[[], str]:
    """Return a block that is empty as long as there is no result of this name."""
    return lambda: render() if stored(papers.RESULTS / name).exists() else "Not measured yet."


def example() -> str:
    """Return the example of adding-a-method.md."""
    return f"```python\n{(ROOT / 'examples' / 'page_mean.py').read_text()}```"


def summary_kinds() -> str:
    """Return the table of summary kinds, from the docstring of their module."""
    lines = [line for line in (page_summary.__doc__ or "").splitlines() if line.startswith("|")]
    bars = [column for column, letter in enumerate(lines[1]) if letter == "|"]
    rows = [[line[start + 1 : stop].strip() for start, stop in pairwise(bars)] for line in (lines[0], *lines[2:])]
    heads, *rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    return table(["`score_by`", *heads[1:]], [[f"`{kind}`", *cells] for kind, *cells in rows])


def contracts() -> str:
    """Return the contracts of methods, by the names and docstrings of their tests."""
    module = ast.parse((ROOT / "tests" / "contracts" / "checks.py").read_text())
    lines = []
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and [argument.arg for argument in node.args.args] == ["make", "phase"]:
            text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            lines.append(f"- *{node.name.replace('_', ' ').capitalize()}.* {text}")
    return "\n".join(lines)


def _page(name: str) -> str:
    return f"results/{name}/README.md"


BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"methods": some_methods, "results": headline},
    "docs/methods.md": {"methods": method_table},
    "docs/quality.md": {
        "quality": quality,
        "fidelity": fidelity("fidelity"),
        "fidelity-prefill": when_measured("fidelity-prefill", fidelity("fidelity-prefill")),
        "sketches": when_measured("sketch-32k", papers.grid(["sketch-32k"], papers.by_task, "mean")),
        "one-choice": papers.grid(["one-choice-32k"], papers.by_task, "mean"),
        "anchors": papers.grid(["anchors-32k"], papers.by_task, "mean"),
        "dropping": papers.grid(["dropping-32k"], papers.by_task, "mean"),
    },
    "docs/adding-a-method.md": {"example": example},
    "docs/architecture.md": {"contracts": contracts},
    "docs/concepts.md": {"kinds": summary_kinds},
    "docs/tasks.md": {"tasks": task_table},
    _page("budgets-32k"): {"budgets": papers.grid(["budgets-32k"], papers.by_task, "mean")},
    _page("ruler"): {"published": papers.tasks_by_plan("ruler")},
    _page("prefill-32k"): {"prefill-document": prefilled("prefill-32k")},
    _page("prefill-question-256-32k"): {"prefill-question-256": prefilled("prefill-question-256-32k")},
    _page("prefill-question-32k"): {"prefill-question": prefilled("prefill-question-32k")},
    _page("summaries-32k"): {"cheaper-answers": cheaper_answers},
    "results/sketch-study.md": {"sketch-study": when_measured(STUDY, sketch_study)},
    "results/summary-recall-32k.md": {"cheaper-recall": cheaper_recall},
}
for _blocks in (speed.BLOCKS, host.BLOCKS, papers.BLOCKS):
    for _file, _own in _blocks.items():
        BLOCKS[_file] = {**BLOCKS.get(_file, {}), **_own}


def rendered(text: str, name: str, content: str) -> str:
    """Return ``text`` with ``content`` between the markers of ``name``."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin not in text or end not in text:
        raise SystemExit(f"the markers {begin} and {end} are missing")
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{content}\n{end}", text, flags=re.DOTALL)


def main() -> None:
    stale = []
    for file, blocks in BLOCKS.items():
        path = ROOT / file
        before = after = path.read_text()
        for name, render in blocks.items():
            after = rendered(after, name, render())
        if after != before:
            stale.append(file)
            if "--check" not in sys.argv:
                path.write_text(after)
    for path, result in speed.stale_charts():
        stale.append(path.name)
        if "--check" not in sys.argv:
            speed.draw(path, result)
    if stale and "--check" in sys.argv:
        raise SystemExit(f"stale: {', '.join(stale)}; run make docs")


if __name__ == "__main__":
    main()
