"""Tables of the papers' shape from results of ``kvsift eval``, on the pages beside these results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from kvsift_lab.eval.intervals import wilson
from kvsift_lab.eval.result_files import load_result

RESULTS = Path(__file__).parents[3] / "results"
Sample = dict[str, Any]


@lru_cache(maxsize=3)
def result_of(name: str) -> dict[str, Any]:
    """Load an evaluation by its name; tables and the words under them come from the same."""
    return load_result(RESULTS / name)


def grid(names: Iterable[str], column: Callable[[Sample], str], last: str | None = None) -> Callable[[], str]:
    """Return a block: a row per plan, a column per value of ``column``, means in percent; "smaller / larger" where a
    recipe has several budgets and they are no column. ``last`` heads a column with the mean of all others."""

    def render() -> str:
        results = [result_of(name) for name in names]
        budgets = results[0]["recipe"]["budgets"]
        joined = column is not by_budget and len(budgets) > 1
        plans = {row["plan"]: row["name"] for result in results for row in result["rows"]}
        cells: dict[tuple[str, str, int | None], list[float]] = defaultdict(list)
        for result in results:
            for sample in result["samples"]:
                budget = sample["budget"] if joined else None
                where = column(sample) if sample["budget"] is not None or column is not by_budget else ""
                cells[plans[sample["plan"]], where, budget].append(100 * sample["score"])
        heads = list(dict.fromkeys(where for _, where, _ in cells if where))
        if column is by_budget:
            heads.sort(key=int)
        elif column is not by_length:
            heads.sort()
        lines = [
            f"| | {' | '.join([*heads, *([last] if last else [])])} |",
            "|---" * (len(heads) + 1 + bool(last)) + "|",
        ]
        for name in dict.fromkeys(plans.values()):
            row = [_cell(cells, name, head, budgets if joined else [None]) for head in heads]
            if last:
                row.append(_mean(cells, name, heads, budgets if joined else [None]))
            lines.append(f"| {name} | {' | '.join(row)} |")
        return "\n".join([*lines, "", _made(results)])

    return render


def tasks_by_plan(name: str) -> Callable[[], str]:
    """Return a block: a row per task, a column per plan, means in percent by length, "8K / 32K" where they differ."""

    def render() -> str:
        result = result_of(name)
        plans = {row["plan"]: _short_name(row["name"], result["rows"]) for row in result["rows"]}
        cells: dict[tuple[str, str, int], list[float]] = defaultdict(list)
        for sample in result["samples"]:
            cells[sample["task"], plans[sample["plan"]], sample["length"]].append(100 * sample["score"])
        names, lengths = list(plans.values()), sorted({length for _, _, length in cells})
        rows = [_lengths(cells, task, names, lengths) for task in dict.fromkeys(task for task, _, _ in cells)]
        means = [_mean_of_tasks(cells, plan, lengths) for plan in names]
        lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|", *sorted(rows)]
        return "\n".join([*lines, f"| mean | {' | '.join(means)} |", "", _made([result])])

    return render


def _short_name(name: str, rows: list[Sample]) -> str:
    """Return the method alone, unless another row has the same one."""
    method = name.partition(":")[0]
    names = {row["name"] for row in rows if row["name"].partition(":")[0] == method}
    return method if len(names) == 1 else name


def _lengths(cells: dict[tuple[str, str, int], list[float]], task: str, names: list[str], lengths: list[int]) -> str:
    row = [_joined([cells.get((task, plan, length), []) for length in lengths]) for plan in names]
    return f"| {task} | {' | '.join(row)} |"


def _mean_of_tasks(cells: dict[tuple[str, str, int], list[float]], plan: str, lengths: list[int]) -> str:
    return _joined(
        [[fmean(scores) for key, scores in cells.items() if key[1:] == (plan, length)] for length in lengths], 1
    )


def _joined(scores: list[list[float]], digits: int = 0) -> str:
    texts = [f"{fmean(cell):.{digits}f}" if cell else "-" for cell in scores]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def by_budget(sample: Sample) -> str:
    return str(sample["budget"])


def by_task(sample: Sample) -> str:
    return str(sample["task"])


def by_length(sample: Sample) -> str:
    return f"{sample['length'] / 1024:.0f}K"


def by_task_and_length(sample: Sample) -> str:
    return f"{by_task(sample)} {by_length(sample)}"


def _cell(cells: dict[Any, list[float]], name: str, head: str, budgets: list[int | None]) -> str:
    return _joined(
        [
            cells.get((name, head, budget)) or cells.get((name, head, None)) or cells.get((name, "", None)) or []
            for budget in budgets
        ]
    )


def _mean(cells: dict[Any, list[float]], name: str, heads: list[str], budgets: list[int | None]) -> str:
    texts = []
    for budget in budgets:
        columns = [cells.get((name, head, budget)) or cells.get((name, head, None)) for head in heads]
        texts.append(f"{fmean(fmean(scores) for scores in columns if scores):.1f}" if any(columns) else "-")
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def _made(results: list[dict[str, Any]]) -> str:
    """State the results of a table, and the uncertainty of a cell."""
    paths, of_cell = [], []
    for result in results:
        paths.append(f"`results/{Path(result['path']).name}`" if "path" in result else "")
        counts: dict[Any, int] = defaultdict(int)
        for sample in result["samples"]:
            counts[sample["plan"], sample["task"], sample["length"]] += 1
        of_cell.append(max(counts.values(), default=0))
        left = result["left_out"]
        if left:
            paths[-1] += f" ({len(left)} contexts left out for lack of time)"
    first, questions = results[0], max(of_cell)
    effects: dict[str, float | None] = {}
    for task, effect in (each for result in results for each in result["design_effects"].items()):
        effects[task] = None if effect is None else max(effect, effects.get(task) or 1.0)
    return (
        f"{' and '.join(paths)}: {questions} questions per plan, task and length; at one half, the 95 % interval of "
        f"so many is {_at_half(questions, effects)}. {first['machine']}, {commits(results)}."
    )


def commits(results: Iterable[dict[str, Any]]) -> str:
    """Return the commits of the sessions that have samples."""
    named = []
    for result in results:
        used = {sample.get("session", 0) for sample in result["samples"]}
        named += [session["commit"] for number, session in enumerate(result["sessions"]) if number in used]
    short = dict.fromkeys(f"{c[:10]}{' with changes' if c.endswith('+changes') else ''}" for c in named)
    return f"{'commit' if len(short) == 1 else 'commits'} {', '.join(short)}"


def _at_half(questions: int, effects: dict[str, float | None]) -> str:
    """Return the interval in percent, by task where questions share contexts."""
    tasks: dict[str, list[str]] = defaultdict(list)
    for task, effect in effects.items():
        low, high = wilson(questions / 2 / (effect or 1), questions / (effect or 1))
        tasks[f"{100 * low:.0f} to {100 * high:.0f}"].append(task)
    by_task = (f"{', '.join(names)} {interval}" for interval, names in sorted(tasks.items()))
    text = next(iter(tasks)) if len(tasks) == 1 else "; ".join(by_task)
    return text if all(effects.values()) else f"{text}, for questions of the one context that they share"


BLOCKS = {
    "results/quest-table1/README.md": {
        "quest-10k": grid(["quest-table1"], by_budget),
        "quest-64k": grid(["quest-table1-long"], by_budget),
    },
    "results/retrieval-tables/README.md": {
        "retrieval-tasks": grid(["retrieval-tables", "retrieval-tables-index"], by_task, "mean"),
        "retrieval-lengths": grid(["retrieval-tables", "retrieval-tables-index"], by_length, "mean"),
    },
    "results/quoka-table/README.md": {"quoka": grid(["quoka-table"], by_length, "mean")},
    "results/critiprefill-ablation/README.md": {
        "critiprefill": grid(["critiprefill-ablation"], by_task_and_length, "mean"),
    },
}
