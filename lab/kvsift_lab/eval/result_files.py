"""Readers of results: directories of ``kvsift eval``, and the single files of earlier versions."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvsift.errors import InputError
from kvsift_lab.eval.plan_rows import plan_rows
from kvsift_lab.eval.recipe import Job
from kvsift_lab.eval.results import (
    SAMPLES,
    SUMMARY,
    parse_samples,
    read_json,
    read_summary,
    stored,
    whole_lines,
)
from kvsift_lab.eval.summary import tables_of

KINDS = "quality", "recall"


def result_paths(path: Path) -> list[Path]:
    """Return a result, or the results directories inside of a directory that is none, by name: what ``--out`` names."""
    if not path.is_dir() or stored(path / SUMMARY).exists():
        return [path]
    return sorted(inner for inner in path.iterdir() if stored(inner / SUMMARY).exists()) or [path]


def load_result(path: Path) -> dict[str, Any]:
    """Return one evaluation: path, recipe, rows, samples, sessions and tables.

    Raises:
        InputError: if it is neither a results directory nor an older result file.
    """
    if path.is_dir():
        return {**_directory(path), "path": str(path)}
    try:
        result: dict[str, Any] = read_json(path)
    except FileNotFoundError:
        raise InputError(f"the result {path} does not exist. Name a directory that kvsift eval wrote.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"the result {path} cannot be read: {error}") from None
    if not isinstance(result, dict) or result.get("kind") not in KINDS:
        raise InputError(f"{path} is not a result of an evaluation. Name the directory that kvsift eval wrote.")
    return {**upgraded(result), "path": str(path)}


def _directory(path: Path) -> dict[str, Any]:
    summary = read_summary(path)
    try:
        text = whole_lines(path / SAMPLES).decode(errors="replace")
    except OSError as error:
        raise InputError(f"{path / SAMPLES} cannot be read: {error.strerror}.") from None
    samples = parse_samples(text, stored(path / SAMPLES))
    jobs = [Job(*job) for job in summary["contexts"]]
    last = {key: summary["sessions"][-1][key] for key in ("commit", "versions", "machine")}
    tables = tables_of(summary["recipe"], samples, jobs)  # the summary of a killed run is older than its samples
    return {**summary, **last, **tables, "rows": summary["recipe"]["rows"], "samples": samples}


def upgraded(old: dict[str, Any]) -> dict[str, Any]:
    """Return the content of an older file in today's format."""
    recipe = old["recipe"]
    plans, budgets = recipe["plans"], recipe["budgets"]
    rows = [asdict(row) for row in plan_rows(plans, budgets, recipe["settings"], references=False)]
    length = recipe.get("length")
    setup = "sparse_prefill" if recipe.get("question_phase") == "prefill" else "question_decoded"
    defaults = {"length": length, "setup": setup, "questions": recipe.get("questions_per_context", 1)}
    samples = [{**defaults, **sample} for sample in old["samples"]]
    for sample in samples:
        if "correct" in sample:
            sample["score"] = float(sample["correct"])
    session = {key: old[key] for key in ("commit", "versions", "machine") if key in old}
    recipe = {**recipe, "lengths": recipe.get("lengths") or [length], "setup": setup, "rows": rows, "files": []}
    tables = tables_of(recipe, samples, []) if old["kind"] == "quality" else {}
    left = old.get("left_out", [])
    return {**old, **tables, "left_out": left, "recipe": recipe, "rows": rows, "samples": samples,
            "sessions": [{**session, "started": "", "workers": 1}]}  # fmt: skip
