"""Time per token and time of a job on a quiet machine and beside busy loops, by the wait of OpenMP's threads.

    python -m kvsift_lab.studies.busy_machine results/busy-machine.json [--cores 2]

The embedded model reads a document and writes tokens, sparse and dense. Every setting has its own process,
as the OpenMP runtime reads its settings once; processes measure in turns, and each round starts with another one. The
job is that of ``kvsift demo`` without set-up: prefill of the document, and answers under both plans. ``--cores 2``
keeps everything, the busy loops too, on two processors of a larger machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
PLANS = ("quest:budget=256", "dense")
SENTENCE = "The harbour master of the northern port counted ninety-seven crates before noon. "
QUESTION = "How many crates did the harbour master count?"
QUIET = 0.1  # share of the processors in other processes: rounds without loops that have more do not count
FEWEST_QUIET = 3  # rounds; with fewer, all count, and the table says so


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
    """Return a setting by name; a number is a spin count."""
    if name.isdecimal():
        return Setting(f"`GOMP_SPINCOUNT={name}`", {"GOMP_SPINCOUNT": name})
    return SETTINGS[name]


# --- the process of a setting


def serve(torch_first: bool, context: int) -> None:
    """Measure for each line of stdin: {"tokens": per plan, "questions": of the job, 0 for none}."""
    if torch_first:
        import torch  # noqa: F401
    from kvsift import LLM, threads

    class Endless(LLM):
        """An engine that generates beyond the end of an answer."""

        def _end_ids(self) -> frozenset[int]:
            return frozenset()

    llm, endless = LLM(probe_every=0), Endless(probe_every=0)
    ids = llm.tokenizer(SENTENCE * (context // 8), verbose=False)["input_ids"][:context]
    text = llm.tokenizer.decode(ids, skip_special_tokens=True)
    document = endless.read(text)

    def itl_s(plan: str, tokens: int) -> list[float]:
        ids = document.check(QUESTION, tokens, plan)
        return list(document.go_on(ids, plan=plan, max_new_tokens=tokens).itl_s)

    def job_s(questions: int) -> float:
        llm.load()
        started = time.perf_counter()
        read = llm.read(text)
        for plan in PLANS * questions:
            read.ask(QUESTION, plan=plan)
        return time.perf_counter() - started

    for plan in PLANS:
        itl_s(plan, 3)
    print(json.dumps(threads.report()), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        sample: dict[str, Any] = {"itl_s": {plan: itl_s(plan, request["tokens"] + 1) for plan in PLANS}}
        if request["questions"]:
            sample["job_s"] = job_s(request["questions"])
        print(json.dumps(sample), flush=True)


class MeasuringProcess:
    """A process with one setting."""

    def __init__(self, setting: Setting, context: int) -> None:
        environment = {name: text for name, text in os.environ.items() if name not in VARIABLES}
        command = [sys.executable, __file__, "--serve", str(context), *["--torch-first"] * setting.torch_first]
        self.process = subprocess.Popen(
            command, env=environment | setting.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.threads = self._answer()

    def measure(self, tokens: int, questions: int) -> dict[str, Any]:
        """Return samples, and the share of the processors that other processes used."""
        started, busy, own = time.perf_counter(), busy_s(), self._own_s()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"tokens": tokens, "questions": questions}) + "\n")
        self.process.stdin.flush()
        sample = self._answer()
        others = busy_s() - busy - (self._own_s() - own)
        processors = len(os.sched_getaffinity(0))
        return {**sample, "others": round(max(0.0, others / processors / (time.perf_counter() - started)), 3)}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("busy_machine: the process of a setting ended; its error is above")
        return dict(json.loads(line))

    def _own_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def busy_s() -> float:
    """Return the busy seconds of this process's processors since the system started."""
    own, total = {f"cpu{number}" for number in os.sched_getaffinity(0)}, 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in own:
            user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
            total += user + nice + system + irq + softirq + steal
    return total / os.sysconf("SC_CLK_TCK")


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


# --- all settings in turns


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, and return the result file's document."""
    names = arguments.settings.split(",")
    workers: dict[str, MeasuringProcess] = {}
    try:
        for name in names:
            workers[name] = MeasuringProcess(setting_of(name), arguments.context)
        settings = [
            {"name": name, "label": setting_of(name).label, "threads": worker.threads}
            for name, worker in workers.items()
        ]
        rounds = list(_rounds(arguments, workers))
    finally:
        for worker in workers.values():
            worker.end()
    import torch

    from kvsift.engine.provenance import versions_and_machine

    recipe = {name: getattr(arguments, name) for name in ("context", "rounds", "busy_rounds", "loops", "tokens")}
    head = {"kind": "busy-machine", "recipe": recipe, **versions_and_machine(torch.device("cpu"))}
    return {**head, "processors": len(os.sched_getaffinity(0)), "settings": settings, "rounds": rounds}


def _rounds(arguments: argparse.Namespace, workers: dict[str, MeasuringProcess]) -> Iterator[dict[str, Any]]:
    """Yield quiet rounds, then rounds beside the loops; every fifth quiet and every second busy one has a job."""
    names, started = list(workers), time.perf_counter()
    for number in range(arguments.rounds + arguments.busy_rounds):
        busy = number >= arguments.rounds
        asks = arguments.questions if number % (2 if busy else 5) == 0 else 0
        first = number % len(names)
        tokens = arguments.tokens // 3 if busy else arguments.tokens
        with busy_loops(arguments.loops if busy else 0):
            samples = {name: workers[name].measure(tokens, asks) for name in names[first:] + names[:first]}
        now = f"{time.perf_counter() - started:.0f} s"
        print(f"round {number + 1}{', beside the loops' if busy else ''}: {now}", file=sys.stderr, flush=True)
        yield {"busy": busy, "samples": samples}


# --- tables of a result


def table(result: dict[str, Any]) -> str:
    """Return milliseconds per token and seconds of the job, quiet and beside the loops, by setting."""
    heads = [f"{plan}, {what}" for plan in ("`quest:budget=256`", "dense") for what in ("quiet", "beside loops")]
    lines = [f"| threads that wait | {' | '.join(heads)} | job, quiet | beside loops |", "|---" * 7 + "|"]
    for each in result["settings"]:
        cells = []
        for plan in PLANS:
            quiet, busy = (_itl_ms(result, each["name"], plan, busy) for busy in (False, True))
            cells += [_with_cost(result, each["name"], plan, quiet), _with_ratio(busy, quiet, "ms")]
        quiet, busy = (_job_s(result, each["name"], busy) for busy in (False, True))
        cells += ["-" if quiet is None else f"{quiet:.1f} s", _with_ratio(busy, quiet, "s")]
        lines.append(f"| {each['label']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def conditions(result: dict[str, Any]) -> str:
    """Return a line on the machine and the rounds."""
    recipe, name = result["recipe"], result["settings"][0]["name"]
    quiet = len(quiet_rounds(result, name))
    counted = f"{quiet} of {recipe['rounds']} rounds without loops were quiet and count"
    if quiet < FEWEST_QUIET:
        counted = (
            f"THE MACHINE WAS BUSY: only {quiet} of {recipe['rounds']} rounds without loops were quiet, and all count"
        )
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("python", "torch"))
    commit = result["commit"][:10] + (" with changes" if result["commit"].endswith("+changes") else "")
    return (
        f"{result['machine']}, {result['processors']} of them used; {recipe['loops']} busy loops; a context of "
        f"{recipe['context']:,} tokens; {versions}, commit {commit}. Medians; {counted}. In brackets: quiet, against "
        "libgomp's default in the same round; beside the loops, against the quiet machine."
    )


def quiet_rounds(result: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the samples of all settings in rounds without loops in which the processors were free for this one."""
    samples = [each["samples"] for each in result["rounds"] if not each["busy"]]
    return [each for each in samples if each[name]["others"] <= QUIET]


def rounds_of(result: dict[str, Any], name: str, busy: bool) -> list[dict[str, Any]]:
    """Return the samples of the rounds that count for this setting: the quiet ones, or all if these are too few."""
    quiet = [] if busy else quiet_rounds(result, name)
    return quiet if len(quiet) >= FEWEST_QUIET else [e["samples"] for e in result["rounds"] if e["busy"] == busy]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="result file")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="names, and numbers as spin counts")
    parser.add_argument("--cores", type=int, help="number of processors to use, for the busy loops too")
    parser.add_argument("--context", type=int, default=4096, help="tokens of the document")
    parser.add_argument("--rounds", type=int, default=20, help="on the quiet machine")
    parser.add_argument("--busy-rounds", type=int, default=6, help="beside busy loops")
    parser.add_argument("--loops", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24, help="per plan and round; a third of them beside loops")
    parser.add_argument("--questions", type=int, default=2, help="of the job, per plan; 0: no job")
    parser.add_argument("--quick", action="store_true", help="one short round of each kind, for a test")
    parser.add_argument("--serve", type=int, metavar="CONTEXT", help=argparse.SUPPRESS)
    parser.add_argument("--torch-first", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(arguments.torch_first, arguments.serve)
    if arguments.quick:
        arguments.context, arguments.rounds, arguments.busy_rounds = 512, 1, 1
        arguments.tokens, arguments.questions = 6, 0
    if arguments.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    result = measured(arguments)
    if arguments.out:
        from kvsift_lab.bench.numbers import document

        arguments.out.write_text(document(result) + "\n")
    print(f"{table(result)}\n\n{conditions(result)}")


if __name__ == "__main__":
    main()
