"""Render what README and docs show but code and results know: tables and examples. ``--check`` only compares."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import host_docs
import paper_docs
import speed_docs

from kvsift.cli.methods import budget_knobs, budget_note, method_rows, own_budget, spelled, state_note
from kvsift.eval.tables import budget_table, prefill_table, quality_table, recall_table

ROOT = Path(__file__).parent.parent


def method_table() -> str:
    """The catalogue as Markdown."""
    heads = ("method", "chooses", "phases", "unit", "keeps", "state", "knobs", "source")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in method_rows():
        knobs = _code(spelled(row["knobs"])) + (f"; budget: {_code(own)}" if (own := own_budget(row)) else "")
        phases, state = ", ".join(row["phases"]), f"{row['state_bytes_per_token']:,.0f} B"
        about = (f"`{row['name']}`", row["summary"], phases, row["granularity"], row["keeps"], state)
        lines.append(f"| {' | '.join((*about, knobs, row['source']))} |")
    return "\n".join(lines) + f"\n\n{state_note()} {budget_note(_code(spelled(budget_knobs())))}"


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


RESULT = "selection-32k"
HEADLINE_BUDGET = 512


def quality() -> str:
    """Every cell of the shipped quality result."""
    return f"{quality_table(paper_docs.result_of(RESULT))}\n\nExact match {_made(RESULT)}"


def cheaper_answers() -> str:
    """Exact match with cheaper summaries."""
    name = "summaries-32k"
    return f"{quality_table(paper_docs.result_of(name))}\n\nExact match {_made(name)}"


def cheaper_recall() -> str:
    """What cheaper summaries miss."""
    name = "summary-recall-32k.json"
    return f"{recall_table(paper_docs.result_of(name))}\n\nMeans over questions, steps, layers and heads {_made(name)}"


def prefilled(name: str) -> Callable[[], str]:
    """Exact match of plans that sift in prefill."""

    def render() -> str:
        result = paper_docs.result_of(name)
        left = sorted({each["task"] for each in result["left_out"]} - {s["task"] for s in result["samples"]})
        missing = f" Not asked for lack of time: {', '.join(left)}." if left else ""
        return (
            f"{prefill_table(result)}\n\nExact match, budget {result['recipe']['budgets'][0]}, {_made(name)}{missing}"
        )

    return render


def headline() -> str:
    """The quality result at one budget."""
    return f"{budget_table(paper_docs.result_of(RESULT), HEADLINE_BUDGET)}\n\nExact match {_made(RESULT)}"


def _made(name: str) -> str:
    result = paper_docs.result_of(name)
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("torch", "transformers"))
    return (
        f"at {result['recipe']['lengths'][0]:,} tokens on the embedded model; "
        f"{speed_docs.place(name)}: {result['machine']}, {versions}, {paper_docs.commits([result])}."
    )


def example() -> str:
    """The example of adding-a-method.md."""
    return f"```python\n{(ROOT / 'examples' / 'page_mean.py').read_text()}```"


BLOCKS = {
    "README.md": {"methods": method_table, "results": headline, **speed_docs.BLOCKS["README.md"]},
    "docs/methods.md": {"methods": method_table},
    "docs/quality.md": {
        "quality": quality,
        "published": paper_docs.tasks_by_plan("ruler"),
        "one-choice": paper_docs.grid(["one-choice-32k"], paper_docs.by_task, "mean"),
        "dropping": paper_docs.grid(["dropping-32k"], paper_docs.by_task, "mean"),
        "budgets": paper_docs.grid(["budgets-32k"], paper_docs.by_task, "mean"),
        "cheaper-recall": cheaper_recall,
        "cheaper-answers": cheaper_answers,
        "prefill-document": prefilled("prefill-32k"),
        "prefill-question": prefilled("prefill-question-32k"),
        "prefill-question-256": prefilled("prefill-question-256-32k"),
    },
    "docs/speed.md": speed_docs.BLOCKS["docs/speed.md"],
    "docs/host.md": host_docs.BLOCKS,
    "docs/papers.md": paper_docs.BLOCKS,
    "docs/adding-a-method.md": {"example": example},
}


def rendered(text: str, name: str, content: str) -> str:
    """``text`` with what stands between the markers of ``name`` replaced."""
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
    for path, result in speed_docs.stale_charts():
        stale.append(path.name)
        if "--check" not in sys.argv:
            speed_docs.draw(path, result)
    if stale and "--check" in sys.argv:
        raise SystemExit(f"stale: {', '.join(stale)}; run make docs")


if __name__ == "__main__":
    main()
