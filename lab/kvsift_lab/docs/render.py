"""Render the tables and examples of README, docs and results from code and results. ``--check`` only compares.

A page has markers; what stands between them is replaced. Pages of docs have the tables that a reader needs to decide;
all others stand on pages beside the results that they are of.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

from kvsift.cli.methods import budget_knobs, budget_note, method_rows, own_budget, spelled, state_note
from kvsift.kernels import page_summary
from kvsift_lab.docs import models, quality, real_model, speed
from kvsift_lab.eval.tasks import TASKS
from kvsift_lab.numbers import table

ROOT = Path(__file__).parents[3]


def method_table() -> str:
    """Return the catalogue as a Markdown table."""
    rows = []
    for row in method_rows():
        knobs = _code(spelled(row["knobs"])) + (f"; budget: {_code(own)}" if (own := own_budget(row)) else "")
        phases, state = ", ".join(row["phases"]), f"{row['state_bytes_per_token']:,.0f} B"
        about = [f"`{row['name']}`", row["summary"], phases, row["granularity"], row["keeps"], state]
        rows.append([*about, knobs, row["source"]])
    heads = ["method", "chooses", "phases", "unit", "keeps", "state", "options", "source"]
    return f"{table(heads, rows)}\n\n{state_note()} {budget_note(_code(spelled(budget_knobs())))}"


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
    known = {row["name"]: row for row in method_rows()}
    own = [known.pop(name) for name in README_METHODS]
    rows = [[f"`{row['name']}`", row["summary"], ", ".join(row["phases"]), row["source"]] for row in own]
    return f"{table(['method', 'chooses', 'phases', 'source'], rows)}\n\nAlso {_code(known)}."


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def task_table() -> str:
    """Return the tasks as a Markdown table."""
    scorers = {
        task.name: "exp of minus the mean NLL" if task.kind == "perplexity" else f"`{task.style.scorer}`"
        for task in TASKS.values()
    }
    rows = [[f"`{task.name}`", task.about, scorers[task.name]] for task in TASKS.values()]
    return table(["task", "question", "scorer"], rows)


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


BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"methods": some_methods},
    "docs/methods.md": {"methods": method_table},
    "docs/adding-a-method.md": {"example": example},
    "docs/architecture.md": {"contracts": contracts},
    "docs/concepts.md": {"kinds": summary_kinds},
    "docs/tasks.md": {"tasks": task_table},
}
for _file, _own in [*models.BLOCKS.items(), *quality.BLOCKS.items(), *real_model.BLOCKS.items(), *speed.BLOCKS.items()]:
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
