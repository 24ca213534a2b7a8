"""Readers of results directories of ``kvsift eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvsift.errors import InputError
from kvsift_lab.eval.recipe import Job
from kvsift_lab.eval.results import (
    SAMPLES,
    SUMMARY,
    parse_samples,
    read_summary,
    stored,
    whole_lines,
)
from kvsift_lab.eval.summary import tables_of


def result_paths(path: Path) -> list[Path]:
    """Return a result, or the results directories inside of a directory that is none, by name: what ``--out`` names."""
    if not path.is_dir() or stored(path / SUMMARY).exists():
        return [path]
    return sorted(inner for inner in path.iterdir() if stored(inner / SUMMARY).exists()) or [path]


def load_result(path: Path) -> dict[str, Any]:
    """Return one evaluation: path, recipe, rows, samples, sessions and tables.

    Raises:
        InputError: if it is no results directory.
    """
    if not path.exists():
        raise InputError(f"the result {path} does not exist. Name a directory that kvsift eval wrote.")
    summary = read_summary(path)
    try:
        text = whole_lines(path / SAMPLES).decode(errors="replace")
    except OSError as error:
        raise InputError(f"{path / SAMPLES} cannot be read: {error.strerror}.") from None
    samples = parse_samples(text, stored(path / SAMPLES))
    jobs = [Job(*job) for job in summary["contexts"]]
    last = {key: summary["sessions"][-1][key] for key in ("commit", "versions", "machine")}
    tables = tables_of(summary["recipe"], samples, jobs)  # the summary of a killed run is older than its samples
    return {**summary, **last, **tables, "rows": summary["recipe"]["rows"], "samples": samples,
            "path": str(path)}  # fmt: skip
