"""Resumable run of a recipe into a results directory."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, NamedTuple

from kvsift.threads import per_process
from kvsift_lab.eval.contexts import Contexts
from kvsift_lab.eval.recipe import Done, EvalRecipe, Job, Result
from kvsift_lab.eval.results import ResultsDirectory, document_of
from kvsift_lab.eval.summary import left_out, tables_of
from kvsift_lab.eval.workers import run_jobs


class RunProgress(NamedTuple):
    """Progress of a run.

    Attributes:
        contexts: finished contexts.
        total: contexts in all.
        share: finished share of the work, from 0 to 1; contexts count by length and by finished plans.
        cost: at the start of a run: tokens of the unfinished contexts, and those decoded after them at most.
    """

    contexts: int
    total: int
    share: float
    cost: tuple[int, int] | None = None


ProgressCallback = Callable[[RunProgress], None]


class Meter:
    """Counter of the progress of a run from its samples."""

    def __init__(self, jobs: Sequence[Job], num_rows: int) -> None:
        self._num_rows = num_rows
        lengths = [job.length for job in jobs if job.length is not None]
        mean = fmean(lengths) if lengths else 1.0  # the length of contexts of files is not known in advance
        self._weights = {job: job.length or mean for job in jobs}
        self._counts: dict[Job, int] = defaultdict(int)
        self._contexts, self._work = 0, 0.0

    def add(self, sample: Result) -> RunProgress:
        """Count a sample."""
        job, num_samples = Job.of(sample), sample["questions"] * self._num_rows
        self._counts[job] += 1
        self._contexts += self._counts[job] == num_samples
        self._work += self._weights.get(job, 0.0) / num_samples
        return self.progress

    @property
    def progress(self) -> RunProgress:
        """The progress so far."""
        total = sum(self._weights.values())
        return RunProgress(self._contexts, len(self._weights), min(self._work / total, 1.0) if total else 1.0)


def run(
    recipe: EvalRecipe, text: str, out: Path, workers: int = 1, stop_at: float | None = None,
    on_progress: ProgressCallback = lambda progress: None, threads: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Make the missing samples of a results directory, and its summary.

    Args:
        recipe: the recipe.
        text: of the recipe's file.
        out: the results directory, created if missing.
        workers: processes, each with one context at a time; they share the GPUs of the host in turns.
        stop_at: ``time.monotonic`` at which the run stops.
        on_progress: called at the start and after every sample.
        threads: of each process; by default OMP_NUM_THREADS, or a share of the processors. A single process decodes
            with fewer of them while other processes use the processors, as ``kvsift ask`` does.

    Returns:
        The tables of the summary.

    Raises:
        InputError: before anything is written, for an unusable model or device or a directory with other results; later
            for a context that cannot be made, a full disk or a dead worker. The samples so far are kept.
    """
    from kvsift.api.llm import LLM

    how = {"device": recipe.device, "dtype": recipe.dtype, "placement": recipe.placement}
    llm = LLM(recipe.model, "dense", dense_below=0, **how)  # type: ignore[arg-type]
    contexts = Contexts(recipe, llm.tokenizer)
    costs = {job: contexts.cost(job) for job in contexts.jobs()}
    results = ResultsDirectory(out, recipe, text)
    try:
        gpus = _gpus() if llm.device.type == "cuda" and recipe.device in ("auto", "cuda") else []
        session = _session(llm.device, workers)
        threads = threads or (per_process(workers) if workers > 1 else None)
        return _fill(recipe, results, costs, session, threads, stop_at, on_progress, gpus)
    finally:
        results.close()


def _fill(
    recipe: EvalRecipe, results: ResultsDirectory, costs: Mapping[Job, tuple[int, int]], session: dict[str, Any],
    threads: int | None, stop_at: float | None, on_progress: ProgressCallback, gpus: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    jobs, num_rows = list(costs), len(recipe.rows)
    started, meter, before = monotonic(), Meter(jobs, num_rows), len(results.samples)
    document, workers = document_of(recipe), session["workers"]
    for sample in results.samples:
        meter.add(sample)

    def summarise() -> dict[str, Any]:
        session.update(seconds=round(monotonic() - started, 1), samples=len(results.samples) - before)
        tables = tables_of(document, results.samples, jobs)
        results.write_summary(tables)
        return tables

    unfinished = {Job.of(context) for context in left_out(document, results.samples, jobs)}
    missing = [(job, results.done(job)) for job in jobs if job in unfinished]
    tokens, decoded = (sum(costs[job][part] for job, _ in missing) for part in (0, 1))
    on_progress(meter.progress._replace(cost=(tokens, num_rows * decoded)))
    if not missing:
        return summarise()  # without this session, which made no sample
    results.sessions.append(session)
    tables = summarise()  # names the recipe before the first sample exists
    try:
        for sample in run_jobs(evaluator, (recipe, threads), missing, workers, stop_at, gpus):
            results.append({**sample, "session": len(results.sessions) - 1})
            on_progress(meter.add(sample))
    finally:
        tables = summarise()
    return tables


def _gpus() -> list[str]:
    """Return the names of the visible GPUs, as in CUDA_VISIBLE_DEVICES."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def evaluator(recipe: EvalRecipe, threads: int | None) -> Callable[[Job, Done], Iterator[Result]]:
    """Return the function of a worker: from a job to its results."""
    from kvsift_lab.eval.evaluator import Evaluator

    return Evaluator(recipe, threads).results


def _session(device: Any, workers: int) -> dict[str, Any]:
    from kvsift.engine.provenance import versions_and_machine

    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {"started": started, "workers": workers, **versions_and_machine(device)}
