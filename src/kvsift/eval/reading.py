"""Results as they lie on a disk: directories of ``kvsift eval``, and the single files that came before them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvsift.errors import InputError
from kvsift.eval.appended import whole_lines
from kvsift.eval.packed import read_stored, stored
from kvsift.eval.recipe import Job
from kvsift.eval.results import SAMPLES, parse_samples, read_summary
from kvsift.eval.rows import rows_of
from kvsift.eval.summary import tables_of

KINDS = "quality", "recall"


def load_result(path: Path) -> dict[str, Any]:
    """One evaluation: where it is, recipe, rows, samples, sessions and the tables made from them.

    Raises:
        InputError: if it is neither a results directory nor an older result file.
    """
    if path.is_dir():
        return {**_directory(path), "path": str(path)}
    try:
        found: dict[str, Any] = json.loads(read_stored(path))
    except FileNotFoundError:
        raise InputError(f"the result {path} does not exist. Name a directory that kvsift eval wrote.") from None
    except (OSError, ValueError, RecursionError) as error:  # the last of JSON that is nested too deeply
        raise InputError(f"the result {path} cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("kind") not in KINDS:
        raise InputError(f"{path} is no result of an evaluation. Name the directory that kvsift eval wrote.")
    return {**upgraded(found), "path": str(path)}


def _directory(path: Path) -> dict[str, Any]:
    summary = read_summary(path)
    try:
        text = whole_lines(path / SAMPLES).decode(errors="replace")
    except OSError as error:
        raise InputError(f"{path / SAMPLES} cannot be read: {error.strerror}.") from None
    samples = parse_samples(text, stored(path / SAMPLES))
    jobs = [Job(*each) for each in summary["contexts"]]
    last = {key: summary["sessions"][-1][key] for key in ("commit", "versions", "machine")}
    tables = tables_of(summary["recipe"], samples, jobs)  # the summary is older where a run was killed
    return {**summary, **last, **tables, "rows": summary["recipe"]["rows"], "samples": samples}


def upgraded(found: dict[str, Any]) -> dict[str, Any]:
    """What an older file says, in the words of a newer one."""
    recipe = found["recipe"]
    plans, budgets = recipe["plans"], recipe["budgets"]
    rows = [asdict(row) for row in rows_of(plans, budgets, recipe["settings"], references=False)]
    length = recipe.get("length")
    setup = "sparse_prefill" if recipe.get("question_phase") == "prefill" else "question_decoded"
    news = {"length": length, "setup": setup, "questions": recipe.get("questions_per_context", 1)}
    samples = [{**news, **sample} for sample in found["samples"]]
    for sample in samples:
        if "correct" in sample:
            sample["score"] = float(sample["correct"])
    session = {key: found[key] for key in ("commit", "versions", "machine") if key in found}
    recipe = {**recipe, "lengths": recipe.get("lengths") or [length], "setup": setup, "rows": rows, "files": []}
    tables = tables_of(recipe, samples, []) if found["kind"] == "quality" else {}
    left = found.get("left_out", [])
    return {**found, **tables, "left_out": left, "recipe": recipe, "rows": rows, "samples": samples,
            "sessions": [{**session, "started": "", "workers": 1}]}  # fmt: skip
