"""Run a recipe into a results directory, from wherever it was left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from kvsift.eval.contexts import Contexts
from kvsift.eval.fingerprint import document_of
from kvsift.eval.recipe import Job, Recipe
from kvsift.eval.results import Done, Result, ResultsDirectory
from kvsift.eval.summary import tables_of
from kvsift.eval.workers import run_jobs
from kvsift.threads import per_process

Told = Callable[[float, int], None]
"""(cells done, cells in all), a cell being a plan on a context."""


def run(
    recipe: Recipe, text: str, out: Path, workers: int = 1, stop_at: float | None = None, told: Told | None = None,
    threads: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Make the samples that a directory lacks, and its summary.

    Args:
        recipe: what to run.
        text: of its file.
        out: the results directory, made if it is not there.
        workers: contexts in parallel, a process each; on a host with several GPUs they take them in turns.
        stop_at: ``time.monotonic`` after which nothing more is made.
        told: called with every sample.
        threads: of each process; by default OMP_NUM_THREADS, or a share of the processors.

    Returns:
        The tables of the summary.

    Raises:
        InputError: before anything is written, for a model or device that cannot be used or a directory with other
            results; later for a context that cannot be made, a full disk or a worker that dies. What was made is kept.
    """
    from kvsift.engine.llm import LLM

    llm = LLM(recipe.model, "dense", device=recipe.device, dtype=recipe.dtype, placement=recipe.placement)
    jobs = Contexts(recipe, llm.tokenizer).jobs()
    results = ResultsDirectory(out, recipe, text)
    try:
        results.sessions.append(_session(llm.device, workers))
        gpus = _gpus() if llm.device.type == "cuda" and recipe.device in ("auto", "cuda") else []
        told = told or (lambda done, total: None)
        return _fill(recipe, results, jobs, workers, threads or per_process(workers), stop_at, told, gpus)
    finally:
        results.close()


def _fill(
    recipe: Recipe, results: ResultsDirectory, jobs: Sequence[Job], workers: int, threads: int,
    stop_at: float | None, told: Told, gpus: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    started, total = monotonic(), len(jobs) * len(recipe.rows)
    session, document = results.sessions[-1], document_of(recipe)
    done = sum(1 / sample["questions"] for sample in results.samples)
    told(done, total)

    def summarise() -> dict[str, Any]:
        session.update(seconds=round(monotonic() - started, 1), samples=len(results.samples) - before)
        tables = tables_of(document, results.samples, jobs)
        results.write_summary(tables)
        return tables

    before = len(results.samples)
    tables = summarise()  # names the recipe before the first sample is there
    unfinished = {Job(*(each[key] for key in Job._fields)) for each in tables["left_out"]}
    missing = [(job, results.done(job)) for job in jobs if job in unfinished]
    if not missing:
        results.sessions.pop()  # nothing was done in it
        return summarise()
    try:
        for sample in run_jobs(asker, (recipe, threads), missing, workers, stop_at, gpus):
            results.append({**sample, "session": len(results.sessions) - 1})
            done += 1 / sample["questions"]
            told(done, total)
    finally:
        tables = summarise()
    return tables


def _gpus() -> list[str]:
    """Names of the GPUs that this process sees, as CUDA_VISIBLE_DEVICES has them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def asker(recipe: Recipe, threads: int) -> Callable[[Job, Done], Iterator[Result]]:
    """What every worker does with the contexts that it is given."""
    from kvsift.eval.answering import Asker

    return Asker(recipe, threads).results


def _session(device: Any, workers: int) -> dict[str, Any]:
    from kvsift.engine.provenance import versions_and_machine

    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {"started": started, "workers": workers, **versions_and_machine(device)}
