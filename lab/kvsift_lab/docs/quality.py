"""Tables of evaluations, for README, docs/quality.md and, in the papers' shapes, for the pages beside the results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from kvsift_lab import stored
from kvsift_lab.bench.report import commit_of
from kvsift_lab.eval.intervals import wilson
from kvsift_lab.eval.results import load_result
from kvsift_lab.eval.tables import budget_table, fidelity_table, prefill_table, quality_table
from kvsift_lab.numbers import grouped, table
from kvsift_lab.studies.recall import summary_table

RESULTS = Path(__file__).parents[3] / "results"
RESULT = "selection-32k"
README_BUDGET = 512
README_PLANS = ("dense", "oracle_tokens", "sketch", "quest", "streaming_llm")
Sample = dict[str, Any]
Render = Callable[[], str]
Cells = dict[tuple[str, str, int | None], list[float]]  # name of the row, column, budget -> scores in percent


@lru_cache(maxsize=3)
def result_of(name: str) -> dict[str, Any]:
    """Load an evaluation by its name; tables and the words under them come from the same."""
    return load_result(RESULTS / name)


def by_budget(sample: Sample) -> str:
    return str(sample["budget"])


def by_task(sample: Sample) -> str:
    return str(sample["task"])


def by_length(sample: Sample) -> str:
    return f"{sample['length'] / 1024:.0f}K"


def by_task_and_length(sample: Sample) -> str:
    return f"{by_task(sample)} {by_length(sample)}"


def grid(names: Iterable[str], column: Callable[[Sample], str], last: str | None = None) -> Render:
    """Return a block: a row per plan, a column per value of ``column``, means in percent; "smaller / larger" where a
    recipe has several budgets and they are no column. ``last`` heads a column with the mean of all others."""

    def render() -> str:
        results = [result_of(name) for name in names]
        budgets = results[0]["recipe"]["budgets"]
        is_joined = column is not by_budget and len(budgets) > 1
        plans = {row["plan"]: row["name"] for result in results for row in result["rows"]}
        cells: Cells = defaultdict(list)
        for sample in (sample for result in results for sample in result["samples"]):
            budget = sample["budget"] if is_joined else None
            where = column(sample) if sample["budget"] is not None or column is not by_budget else ""
            cells[plans[sample["plan"]], where, budget].append(100 * sample["score"])
        heads = list(dict.fromkeys(where for _, where, _ in cells if where))
        if column is not by_length:
            heads.sort(key=int if column is by_budget else str)
        rows = []
        for name in dict.fromkeys(plans.values()):
            # a row without a budget stands for all of them
            found = [
                [
                    cells.get((name, head, budget))
                    or cells.get((name, head, None))
                    or cells.get((name, "", None))
                    or []
                    for head in heads
                ]
                for budget in (budgets if is_joined else [None])
            ]
            row = [_joined(list(per_budget)) for per_budget in zip(*found)]
            if last:
                row.append(_joined([[fmean(own) for own in columns if own] for columns in found], 1))
            rows.append([name, *row])
        return f"{table(['', *heads, *([last] if last else [])], rows)}\n\n{_uncertainty(results)}"

    return render


def tasks_by_plan(name: str) -> Render:
    """Return a block: a row per task, a column per plan, means in percent by length, "8K / 32K" where they differ."""

    def render() -> str:
        result = result_of(name)
        methods = defaultdict[str, set[str]](set)
        for row in result["rows"]:
            methods[row["name"].partition(":")[0]].add(row["name"])
        plans = {row["plan"]: row["name"] for row in result["rows"]}
        cells: Cells = defaultdict(list)
        for sample in result["samples"]:
            cells[sample["task"], plans[sample["plan"]], sample["length"]].append(100 * sample["score"])
        names, lengths = list(plans.values()), sorted({length for _, _, length in cells if length})
        rows = [
            [task, *(_joined([cells.get((task, plan, length), []) for length in lengths]) for plan in names)]
            for task in sorted({task for task, _, _ in cells})
        ]
        means = [
            _joined([[fmean(own) for key, own in cells.items() if key[1:] == (plan, length)] for length in lengths], 1)
            for plan in names
        ]
        short = [method if len(methods[method := name.partition(":")[0]]) == 1 else name for name in names]
        return f"{table(['', *short], [*rows, ['mean', *means]])}\n\n{_uncertainty([result])}"

    return render


def _joined(scores: list[list[float]], digits: int = 0) -> str:
    texts = [f"{fmean(cell):.{digits}f}" if cell else "-" for cell in scores]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def _uncertainty(results: list[dict[str, Any]]) -> str:
    """State the results of a table, and the uncertainty of a cell."""
    paths, most = [], 0
    for result in results:
        counts = map(len, grouped(result["samples"], "plan", "task", "length").values())
        most, left = max(most, *counts), result["left_out"]
        missing = f" ({len(left)} contexts left out for lack of time)" if left else ""
        paths.append(f"`results/{Path(result['path']).name}`{missing}")
    effects: dict[str, float | None] = {}
    for task, effect in (each for result in results for each in result["design_effects"].items()):
        effects[task] = None if effect is None else max(effect, effects.get(task) or 1.0)
    return (
        f"{' and '.join(paths)}: {most} questions per plan, task and length; at one half, the 95 % interval of "
        f"so many is {_at_half(most, effects)}. {machines(results)}, {commits(results)}."
    )


def _at_half(questions: int, effects: dict[str, float | None]) -> str:
    """Return the interval in percent, by task where questions share contexts."""
    tasks: dict[str, list[str]] = defaultdict(list)
    for task, effect in effects.items():
        low, high = wilson(questions / 2 / (effect or 1), questions / (effect or 1))
        tasks[f"{100 * low:.0f} to {100 * high:.0f}"].append(task)
    by_interval = (f"{', '.join(names)} {interval}" for interval, names in sorted(tasks.items()))
    text = next(iter(tasks)) if len(tasks) == 1 else "; ".join(by_interval)
    return text if all(effects.values()) else f"{text}, for questions of the one context that they share"


def commits(results: Iterable[dict[str, Any]]) -> str:
    """Return the commits of the sessions that have samples."""
    short = dict.fromkeys(commit_of(session) for result in results for session in _with_samples(result))
    return f"{'commit' if len(short) == 1 else 'commits'} {', '.join(short)}"


def machines(results: Iterable[dict[str, Any]]) -> str:
    """Return the machines of the sessions that have samples."""
    return " and ".join(dict.fromkeys(session["machine"] for result in results for session in _with_samples(result)))


def _with_samples(result: dict[str, Any]) -> list[dict[str, Any]]:
    used = {sample.get("session", 0) for sample in result["samples"]}
    return [session for number, session in enumerate(result["sessions"]) if number in used]


def _made(name: str, result: dict[str, Any], lengths: Iterable[int]) -> str:
    sessions = _with_samples(result)
    versions = ", ".join(
        f"{name} {' and '.join(dict.fromkeys(session['versions'][name] for session in sessions))}"
        for name in ("torch", "transformers")
    )
    at, model = " and ".join(f"{length:,}" for length in lengths), result["recipe"].get("model")
    where = f"on `{model}`" if model else f"at {at} tokens on the embedded model"
    left = f" {len(result['left_out'])} contexts are not finished." if result.get("left_out") and model else ""
    return f"{where}; `results/{name}`: {machines([result])}, {versions}, {commits([result])}.{left}"


def evaluated(name: str, tables: Callable[[dict[str, Any]], str], about: str) -> Render:
    """Return a block: tables of an evaluation, what they hold, and how it was made. {budget} in ``about`` is the
    evaluation's."""

    def render() -> str:
        result = result_of(name)
        text = about.format(budget=result["recipe"]["budgets"][0])
        left = sorted({job["task"] for job in result["left_out"]} - {s["task"] for s in result["samples"]})
        missing = f" Not asked for lack of time: {', '.join(left)}." if left and tables is prefill_table else ""
        return f"{tables(result)}\n\n{text} {_made(name, result, result['recipe']['lengths'])}{missing}"

    return render


def readme_table(result: dict[str, Any]) -> str:
    """Return the quality result at one budget, plans of the README only."""
    head, line, *rows = budget_table(result, README_BUDGET).splitlines()
    by_plan = {row.split("|")[1].strip(): row for row in rows}
    return "\n".join([head, line, *(by_plan[plan] for plan in README_PLANS)])


def cheaper_recall() -> str:
    """Return the recall of cheaper summaries."""
    name = "summary-recall-32k"
    result = _as_evaluation(stored.load(RESULTS / name))
    lengths = result["evaluation"]["lengths"]
    return f"{summary_table(result)}\n\nMeans over questions, steps, layers and heads {_made(name, result, lengths)}"


def sketch_study() -> str:
    """Return what the parts of a sketch are worth: a row per variant, means over questions."""
    name = "sketch-study"
    result = _as_evaluation(stored.load(RESULTS / name))
    measures = [key for key in result["points"][0] if key not in ("variant", "bytes", "samples")]
    rows = [
        [point["variant"], f"{point['bytes']:.0f}", *(f"{point[measure]:.3f}" for measure in measures)]
        for point in result["points"]
    ]
    questions = {(sample["task"], sample["seed"], sample["question"]) for sample in result["samples"]}
    return (
        f"{table(['', 'B', *measures], rows)}\n\nMeans over {len(questions)} questions on "
        f"{len({key[:2] for key in questions})} contexts {_made(name, result, result['recipe']['lengths'])}"
    )


def _as_evaluation(result: dict[str, Any]) -> dict[str, Any]:
    """Return a study with the samples and the one session of an evaluation."""
    samples = [sample for point in result["points"] for sample in point["samples"]]
    return {**result, "samples": samples, "sessions": [result]}


EXACT_MATCH = "Exact match"
DIVERGENCE = (
    "KL(dense || plan) in nats (95 % interval by bootstrap over contexts), how often the likeliest token is the same, "
    "and NLL above that of dense attention,"
)
IN_PREFILL = "Exact match, budget {budget},"
RETRIEVAL_TABLES = ["retrieval-tables", "retrieval-tables-index"]
BLOCKS: dict[str, dict[str, Render]] = {
    "docs/quality.md": {
        "quality": evaluated(RESULT, quality_table, EXACT_MATCH),
        "fidelity": evaluated("fidelity", fidelity_table, DIVERGENCE),
        "fidelity-prefill": evaluated("fidelity-prefill", fidelity_table, DIVERGENCE),
        "sketches": grid(["sketch-32k"], by_task, "mean"),
        "one-choice": grid(["one-choice-32k"], by_task, "mean"),
        "anchors": grid(["anchors-32k"], by_task, "mean"),
        "dropping": grid(["dropping-32k"], by_task, "mean"),
    },
    "results/budgets-32k/README.md": {"budgets": grid(["budgets-32k"], by_task, "mean")},
    "results/ruler/README.md": {"published": tasks_by_plan("ruler")},
    "results/prefill-32k/README.md": {"prefill-document": evaluated("prefill-32k", prefill_table, IN_PREFILL)},
    "results/prefill-question-256-32k/README.md": {
        "prefill-question-256": evaluated("prefill-question-256-32k", prefill_table, IN_PREFILL)
    },
    "results/prefill-question-32k/README.md": {
        "prefill-question": evaluated("prefill-question-32k", prefill_table, IN_PREFILL)
    },
    "results/summaries-32k/README.md": {"cheaper-answers": evaluated("summaries-32k", quality_table, EXACT_MATCH)},
    "results/sketch-study/README.md": {"sketch-study": sketch_study},
    "results/summary-recall-32k/README.md": {"cheaper-recall": cheaper_recall},
    "results/quest-table1/README.md": {
        "quest-10k": grid(["quest-table1"], by_budget),
        "quest-64k": grid(["quest-table1-long"], by_budget),
    },
    "results/retrieval-tables/README.md": {
        "retrieval-tasks": grid(RETRIEVAL_TABLES, by_task, "mean"),
        "retrieval-lengths": grid(RETRIEVAL_TABLES, by_length, "mean"),
    },
    "results/quoka-table/README.md": {"quoka": grid(["quoka-table"], by_length, "mean")},
    "results/critiprefill-ablation/README.md": {
        "critiprefill": grid(["critiprefill-ablation"], by_task_and_length, "mean"),
    },
}
