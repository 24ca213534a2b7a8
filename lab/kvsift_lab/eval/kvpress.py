"""Results in kvpress's folder layout, for its plots and leaderboard.

    <dataset>__<data_dir>__<model>__<press>__<compression ratio>[__query_aware]/
        predictions.csv   one line per question, without the context
        metrics.json      task -> metric -> score, as RULER's: 0 to 100
        config.yaml       the keys of its evaluation

The dataset is the family of the tasks, ``data_dir`` their length, the press the row of a plan. The compression ratio is
the counted share of the context that is *not* visible to a query, since most plans evict nothing.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from kvsift.atomic_files import reason, write_atomically
from kvsift.errors import UnwritableFile
from kvsift_lab.eval.tasks import TASKS

COLUMNS = "task", "question", "answer", "predicted_answer", "length", "depth", "compression_ratio"
QUERY_AWARE_SETUPS = "whole_prompt", "sparse_prefill"


def write_folders(results: Iterable[tuple[str, dict[str, Any]]], out: Path) -> list[Path]:
    """Write a folder per data set, length, model and row; files of the same name are replaced.

    Raises:
        InputError: if writing fails.
    """
    groups = [(result, group) for _, result in results for group in _groups(result).values()]
    folders = [out / name for name in _folder_names(groups)]
    try:
        for folder, (result, group) in zip(folders, groups, strict=True):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "predictions.csv", _predictions(result, group))
            write_atomically(folder / "metrics.json", json.dumps(_metrics(group), indent=4))
            write_atomically(folder / "config.yaml", _config(result, group))
    except OSError as error:
        raise UnwritableFile(f"--kvpress {out}: {reason(error)}.") from None
    return folders


def _folder_names(groups: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]]) -> list[str]:
    """Return a unique name for each group: ratios that are equal at two decimals have four, and names that are still
    equal are numbered."""
    short = [_folder_name(*group, decimals=2) for group in groups]
    counts = Counter(short)
    names = [name if counts[name] == 1 else _folder_name(*group, decimals=4) for name, group in zip(short, groups)]
    used: Counter[str] = Counter()
    for index, name in enumerate(names):
        used[name] += 1
        names[index] = name if used[name] == 1 else f"{name}__{used[name]}"
    return names


def _groups(result: dict[str, Any]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Group samples by data set, length and plan."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for sample in result["samples"]:
        if "answer" in sample:
            groups[_dataset(sample["task"]), sample["length"] or 0, sample["plan"]].append(sample)
    return groups


def _dataset(task: str) -> str:
    family = TASKS[task].family if task in TASKS else task
    return "kvsift" if family == "own" else family


def _name(plan: str, result: dict[str, Any]) -> str:
    row = next(row for row in result["rows"] if row["plan"] == plan)
    if row["phase"] is None:
        return "no_press"
    name: str = row["name"]
    return name.replace(":", "-").replace("=", "-").replace(",", "-")


def _ratio(result: dict[str, Any], samples: Sequence[dict[str, Any]]) -> float:
    phase = next(row["phase"] for row in result["rows"] if row["plan"] == samples[0]["plan"])
    key = "prefill_density" if phase == "prefill" else "density"
    return round(1 - fmean(sample.get(key) or 1.0 for sample in samples), 4)


def _is_query_aware(result: dict[str, Any]) -> bool:
    return result["recipe"]["setup"] in QUERY_AWARE_SETUPS


def _model(result: dict[str, Any]) -> str:
    return result["recipe"].get("model") or "kvsift/embedded"


def _folder_name(result: dict[str, Any], group: Sequence[dict[str, Any]], decimals: int) -> str:
    first = group[0]
    parts = [_dataset(first["task"]), str(first["length"] or ""), _model(result).replace("/", "--")]
    parts += [_name(first["plan"], result), f"{_ratio(result, group):.{decimals}f}"]
    parts += ["query_aware"] if _is_query_aware(result) else []
    return _one_folder("__".join(filter(None, parts)))


def _one_folder(name: str) -> str:
    """Return a name without separators of paths, whatever the names of tasks, models and plans."""
    return re.sub(r"[^\w.+-]", "-", name)


def _predictions(result: dict[str, Any], group: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    ratio = _ratio(result, group)
    for sample in group:
        references = sample.get("references") or [sample["expected"]]
        row = [
            sample["task"],
            sample.get("asked", ""),
            references,
            sample["answer"],
            sample["length"],
            sample["depth"],
            ratio,
        ]
        writer.writerow(row)
    return text.getvalue()


def _metrics(group: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in group:
        scorer = sample.get("scorer", "exact")
        scores[sample["task"]]["string_match" if scorer.startswith("string_match") else scorer].append(sample["score"])
    return {task: {name: round(100 * fmean(values), 2) for name, values in own.items()} for task, own in scores.items()}


def _config(result: dict[str, Any], group: Sequence[dict[str, Any]]) -> str:
    """Return YAML of one level with values in JSON, which is a subset of YAML."""
    first, recipe = group[0], result["recipe"]
    config = {
        "dataset": _dataset(first["task"]),
        "data_dir": str(first["length"] or ""),
        "model": _model(result),
        "device": recipe.get("device"),
        "press_name": _name(first["plan"], result),
        "compression_ratio": _ratio(result, group),
        "fraction": 1.0,
        "max_new_tokens": None,
        "max_context_length": None,
        "query_aware": _is_query_aware(result),
        "model_kwargs": {},
        "press_init_command": f"kvsift {first['plan']}",
        "seed": recipe.get("seed", 0),
    }
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in config.items())
