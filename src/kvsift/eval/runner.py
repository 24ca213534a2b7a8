"""Run a recipe into a results directory, from wherever it was left."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, NamedTuple

from kvsift.eval.contexts import Contexts
from kvsift.eval.fingerprint import document_of
from kvsift.eval.recipe import Job, Recipe
from kvsift.eval.results import Done, Result, ResultsDirectory, job_of
from kvsift.eval.summary import left_out, tables_of
from kvsift.eval.workers import run_jobs
from kvsift.threads import per_process


class Progress(NamedTuple):
    """How far a run is.

    Attributes:
        contexts: that have been asked everything.
        of: contexts in all.
        share: of the work, from 0 to 1. A context counts by its length, and in part once some plans have been asked.
    """

    contexts: int
    of: int
    share: float


Told = Callable[[Progress], None]


class Meter:
    """Progress from samples."""

    def __init__(self, jobs: Sequence[Job], num_rows: int) -> None:
        self._num_rows = num_rows
        known = [job.length for job in jobs if job.length is not None]
        usual = fmean(known) if known else 1.0  # contexts of files have a length only when they are made
        self._weights = {job: job.length or usual for job in jobs}
        self._counts: dict[Job, int] = defaultdict(int)
        self._contexts, self._work = 0, 0.0

    def add(self, sample: Result) -> Progress:
        """One more sample."""
        job, wanted = job_of(sample), sample["questions"] * self._num_rows
        self._counts[job] += 1
        self._contexts += self._counts[job] == wanted
        self._work += self._weights.get(job, 0.0) / wanted
        return self.progress

    @property
    def progress(self) -> Progress:
        """Where the run stands."""
        total = sum(self._weights.values())
        return Progress(self._contexts, len(self._weights), min(self._work / total, 1.0) if total else 1.0)


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
        told: called at the start and with every sample.
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
        gpus = _gpus() if llm.device.type == "cuda" and recipe.device in ("auto", "cuda") else []
        session, told = _session(llm.device, workers), told or (lambda progress: None)
        return _fill(recipe, results, jobs, session, threads or per_process(workers), stop_at, told, gpus)
    finally:
        results.close()


def _fill(
    recipe: Recipe, results: ResultsDirectory, jobs: Sequence[Job], session: dict[str, Any], threads: int,
    stop_at: float | None, told: Told, gpus: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    started, meter, before = monotonic(), Meter(jobs, len(recipe.rows)), len(results.samples)
    document, workers = document_of(recipe), session["workers"]
    for sample in results.samples:
        meter.add(sample)
    told(meter.progress)

    def summarise() -> dict[str, Any]:
        session.update(seconds=round(monotonic() - started, 1), samples=len(results.samples) - before)
        tables = tables_of(document, results.samples, jobs)
        results.write_summary(tables)
        return tables

    unfinished = {Job(*(each[key] for key in Job._fields)) for each in left_out(document, results.samples, jobs)}
    missing = [(job, results.done(job)) for job in jobs if job in unfinished]
    if not missing:
        return summarise()  # without this session, in which nothing was done
    results.sessions.append(session)
    tables = summarise()  # names the recipe before the first sample is there
    try:
        for sample in run_jobs(asker, (recipe, threads), missing, workers, stop_at, gpus):
            results.append({**sample, "session": len(results.sessions) - 1})
            told(meter.add(sample))
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
