"""Time per token and time of a job on a quiet machine and beside busy loops, by the wait of OpenMP's threads.

The embedded model reads a document and writes tokens, sparse and dense. Every setting has its own process
(``busy_worker.py``), as the OpenMP runtime reads its settings once; processes measure in turns, and each round starts
with another one. The job is that of ``kvsift demo`` without set-up: prefill of the document, and answers under both
plans. ``--cores 2`` keeps everything, the busy loops too, on two processors of a larger machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

from kvsift.errors import unknown
from kvsift_lab.bench import machine
from kvsift_lab.bench.bench import Study
from kvsift_lab.bench.host_timing import OtherProcesses
from kvsift_lab.bench.report import FEWEST_QUIET, commit_of, quiet_rounds
from kvsift_lab.bench.timing import rotated
from kvsift_lab.numbers import table
from kvsift_lab.studies.busy_worker import PLANS
from kvsift_lab.studies.recipes import BusyRecipe

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
QUIET = 0.1  # share of the processors in other processes: rounds without loops that have more do not count
WORKER = "kvsift_lab.studies.busy_worker"


class Setting(NamedTuple):
    """Environment of a process, and whether it imports torch before kvsift."""

    label: str
    environment: dict[str, str]
    torch_first: bool = False


SETTINGS = {
    "spin": Setting("libgomp's default, 300,000 spins", {"GOMP_SPINCOUNT": "300000"}),
    "passive": Setting("`OMP_WAIT_POLICY=passive`", {"OMP_WAIT_POLICY": "passive"}),
    "kvsift": Setting("kvsift", {}),
    "torch-first": Setting("kvsift, imported after torch", {}, torch_first=True),
    "one": Setting("`OMP_NUM_THREADS=1`", {"OMP_NUM_THREADS": "1"}),
}


def setting_of(name: str) -> Setting:
    """Return a setting by name; a number is a spin count.

    Raises:
        InputError: for an unknown name.
    """
    if name.isdecimal():
        return Setting(f"`GOMP_SPINCOUNT={name}`", {"GOMP_SPINCOUNT": name})
    if name not in SETTINGS:
        raise unknown("setting", name, SETTINGS)
    return SETTINGS[name]


class MeasuringProcess:
    """A process with one setting."""

    def __init__(self, setting: Setting, context: int) -> None:
        environment = {name: text for name, text in os.environ.items() if name not in VARIABLES}
        command = [sys.executable, "-m", WORKER, str(context), *["torch-first"] * setting.torch_first]
        self.process = subprocess.Popen(
            command, env=environment | setting.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.threads = self._answer()

    def measure(self, tokens: int, questions: int) -> dict[str, Any]:
        """Return samples, and the share of the processors that other processes used."""
        load = OtherProcesses(self.process.pid, os.sched_getaffinity(0))
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"tokens": tokens, "questions": questions}) + "\n")
        self.process.stdin.flush()
        sample = self._answer()
        return {**sample, "others": load.share()}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("kvsift bench busy: the process of a setting ended; its error is above")
        return dict(json.loads(line))


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run other processes that never sleep."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.5 if count else 0.0)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class BusyBench(Study):
    """Quiet rounds, then rounds beside the loops; every fifth quiet and every second busy one has a job."""

    kind = "busy"
    recipe: BusyRecipe

    def __init__(self, recipe: BusyRecipe) -> None:
        super().__init__(recipe)
        if recipe.cores:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: recipe.cores])
        settings = {name: setting_of(name) for name in recipe.settings}
        self._workers = {name: MeasuringProcess(each, recipe.context) for name, each in settings.items()}

    def environment(self) -> dict[str, Any]:
        settings = [
            {"name": name, "label": setting_of(name).label, "threads": worker.threads}
            for name, worker in self._workers.items()
        ]
        return machine.host_environment() | {"processors": len(os.sched_getaffinity(0)), "settings": settings}

    def run(self) -> Iterator[dict[str, Any]]:
        recipe, names = self.recipe, list(self._workers)
        try:
            for number in range(recipe.rounds + recipe.busy_rounds):
                busy = number >= recipe.rounds
                asks = recipe.questions if number % (2 if busy else 5) == 0 else 0
                tokens = recipe.tokens // 3 if busy else recipe.tokens
                with busy_loops(recipe.loops if busy else 0):
                    samples = {name: self._workers[name].measure(tokens, asks) for name in rotated(names, number)}
                yield {"busy": busy, "samples": samples}
        finally:
            for worker in self._workers.values():
                worker.end()

    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        return f"round {len(result['points'])}{', beside the loops' if point['busy'] else ''}"

    def closing(self, result: dict[str, Any]) -> str:
        return f"{busy_table(result)}\n\n{conditions(result)}"


def busy_table(result: dict[str, Any]) -> str:
    """Return milliseconds per token and seconds of the job, quiet and beside the loops, by setting."""
    rows = []
    for each in result["settings"]:
        cells, name = [each["label"]], each["name"]
        for plan in PLANS:
            quiet, busy = (_itl_ms(result, name, plan, busy) for busy in (False, True))
            cells += [_with_cost(result, name, plan, quiet), _with_ratio(busy, quiet, "ms")]
        quiet, busy = (_job_s(result, name, busy) for busy in (False, True))
        rows.append([*cells, "-" if quiet is None else f"{quiet:.1f} s", _with_ratio(busy, quiet, "s")])
    heads = [f"{plan}, {what}" for plan in (f"`{PLANS[0]}`", "dense") for what in ("quiet", "beside loops")]
    return table(["threads that wait", *heads, "job, quiet", "beside loops"], rows)


def conditions(result: dict[str, Any]) -> str:
    """Return a line on the machine and the rounds."""
    recipe, name = result["recipe"], result["settings"][0]["name"]
    quiet = sum(each["samples"][name]["others"] <= QUIET for each in result["points"] if not each["busy"])
    counted = f"{quiet} of {recipe['rounds']} rounds without loops were quiet and count"
    if quiet < FEWEST_QUIET:
        counted = (
            f"THE MACHINE WAS BUSY: only {quiet} of {recipe['rounds']} rounds without loops were quiet, and all count"
        )
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("python", "torch"))
    return (
        f"{result['machine']}, {result['processors']} of them used; {recipe['loops']} busy loops; a context of "
        f"{recipe['context']:,} tokens; {versions}, commit {commit_of(result)}. Medians; {counted}. "
        "In brackets: quiet, against libgomp's default in the same round; beside the loops, against the quiet machine."
    )


def rounds_of(result: dict[str, Any], name: str, busy: bool) -> list[dict[str, Any]]:
    """Return the samples of the rounds that count for this setting: the quiet ones, or all if these are too few."""
    samples = [each["samples"] for each in result["points"] if each["busy"] == busy]
    counted = range(len(samples)) if busy else quiet_rounds([each[name]["others"] for each in samples], QUIET)
    return [samples[number] for number in counted]


def _itl_ms(result: dict[str, Any], name: str, plan: str, busy: bool) -> float | None:
    samples = [gap for each in rounds_of(result, name, busy) for gap in each[name]["itl_s"][plan]]
    return 1e3 * median(samples) if samples else None


def _job_s(result: dict[str, Any], name: str, busy: bool) -> float | None:
    samples = [each[name]["job_s"] for each in rounds_of(result, name, busy) if "job_s" in each[name]]
    return median(samples) if samples else None


def _with_cost(result: dict[str, Any], name: str, plan: str, quiet: float | None) -> str:
    """Return the time on the quiet machine, and its excess over libgomp's default, round by round."""
    if quiet is None:
        return "-"
    ratios = [
        median(each[name]["itl_s"][plan]) / median(each["spin"]["itl_s"][plan])
        for each in rounds_of(result, name, busy=False)
        if "spin" in each and name != "spin"
    ]
    return f"{quiet:.2f} ms" + (f" ({median(ratios) - 1:+.1%})" if ratios else "")


def _with_ratio(busy: float | None, quiet: float | None, unit: str) -> str:
    if busy is None:
        return "-"
    return f"{busy:.1f} {unit}" + ("" if quiet is None else f" ({busy / quiet:.1f}x)")
