"""Threads that wait sleep soon, fewer run beside other processes where they cannot, and a user's own settings win."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kvsift_lab.studies.busy import BusyBench, busy_table, conditions
from kvsift_lab.studies.recipes import BusyRecipe

from kvsift import threads
from kvsift.threads import _Reading, _Share

ROOT = Path(__file__).parents[1]
PLAIN = {name: text for name, text in os.environ.items() if name not in (*threads.WAITING, "OMP_NUM_THREADS")}
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="other systems have other OpenMP runtimes")


def output_of(story: str, **settings: str) -> str:
    """What a fresh process prints, on both streams."""
    command = [sys.executable, "-c", story]
    done = subprocess.run(command, env=PLAIN | settings, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@linux_only
def test_threads_that_wait_sleep_soon_where_kvsift_is_imported_first() -> None:
    shown = output_of("import kvsift, torch", OMP_DISPLAY_ENV="verbose")
    if "GOMP_SPINCOUNT" not in shown:
        pytest.skip("this torch has another OpenMP runtime than GNU's")
    assert f"GOMP_SPINCOUNT = '{threads.SPINS}'" in shown


@linux_only
@pytest.mark.parametrize(
    ("setting", "text", "spins"),
    [
        ("OMP_WAIT_POLICY", "active", "None"),
        ("GOMP_SPINCOUNT", "70", "70"),
        ("KMP_BLOCKTIME", "5", "None"),
        ("OMP_NUM_THREADS", "1", str(threads.SPINS)),  # says nothing about waiting
    ],
)
def test_how_a_user_lets_threads_wait_wins(setting: str, text: str, spins: str) -> None:
    story = "import os, kvsift; print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_NUM_THREADS'))"
    number = text if setting == "OMP_NUM_THREADS" else "None"
    assert output_of(story, **{setting: text}).split() == [spins, number]


@linux_only
def test_the_engine_does_not_share_the_processors_with_the_team_of_its_caller() -> None:
    story = """
import os, threading, torch
from kvsift.threads import end_team
torch.set_num_threads(3)
count = lambda: len(os.listdir('/proc/self/task'))
before, x = count(), torch.ones(1 << 20)
x.add_(1)
during = count()
end_team()
print(during - before, count() - before, end=' ')
x.add_(1)  # the team comes back
print(count() - before, x[0].item())
"""
    assert output_of(story).split() == ["2", "0", "2", "3.0"]


@linux_only
def test_processes_that_kvsift_starts_wait_as_it_does() -> None:
    child = "import os; print(os.environ['GOMP_SPINCOUNT'])"
    story = f"import sys, subprocess, kvsift; subprocess.run([sys.executable, '-c', {child!r}])"
    assert output_of(story).strip() == str(threads.SPINS)


@linux_only
def test_a_token_of_eval_is_as_fast_beside_other_processes_as_one_of_ask() -> None:
    """Its worker inherits the spin count that kvsift set, which is no setting of the user: it adapts to other load."""
    worker = "from kvsift import threads; print(threads.USER_WAITING, threads._most_threads(), threads._waiting())"
    story = f"import sys, subprocess, kvsift; subprocess.run([sys.executable, '-c', {worker!r}])"
    assert (shown := output_of(story)).startswith("{} ")
    assert output_of(worker) == shown


@pytest.mark.parametrize(("given", "number"), [(None, 4), ("3", 3), ("2,1", 2), ("all", 4)])
def test_workers_share_the_processors_unless_the_user_says_how_many_threads(
    monkeypatch: pytest.MonkeyPatch, given: str | None, number: int
) -> None:
    monkeypatch.setattr(threads, "processors", lambda: 9)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert threads.per_process(2) == number
    assert threads.per_process(100) == (number if given in ("3", "2,1") else 1)


@linux_only
def test_torch_imported_first_is_said_and_nothing_is_set() -> None:
    story = "import os, torch, kvsift; print(os.environ.get('GOMP_SPINCOUNT'), kvsift.threads.report())"
    shown = output_of(story)
    assert shown.startswith("None ")
    assert "torch was imported before kvsift" in shown
    assert "Import kvsift first, or set OMP_WAIT_POLICY=passive" in shown


class Processors:
    """Four of them, with other processes on some, and torch's threads."""

    def __init__(self) -> None:
        self.time = self.busy = self.own = 0.0
        self.threads = 4

    def read(self) -> _Reading:
        return _Reading(self.time, self.busy, self.own)

    def after(self, seconds: float, others: float, own: float = 0.5) -> None:
        self.time += seconds
        self.own += own * seconds
        self.busy += (others + own) * seconds

    def set(self, number: int) -> None:
        self.threads = number


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Processors]:
    machine = Processors()
    monkeypatch.setattr(threads, "_START", machine.read())
    monkeypatch.setattr(threads, "_most_threads", lambda: 4)
    monkeypatch.setattr(threads, "_read", machine.read)
    monkeypatch.setattr(threads, "processors", lambda: 4)
    monkeypatch.setattr(threads, "monotonic", lambda: machine.time)
    monkeypatch.setattr(threads, "process_time", lambda: machine.own)
    monkeypatch.setattr(torch, "get_num_threads", lambda: machine.threads)
    monkeypatch.setattr(torch, "set_num_threads", machine.set)
    monkeypatch.setattr(_Share, "latest", 0)
    monkeypatch.setattr(threads, "_share", _Share())
    return machine


@pytest.mark.parametrize(("others", "number"), [(0.0, 4), (0.4, 4), (1.0, 3), (2.0, 2), (4.0, 1)])
def test_fewer_threads_run_beside_other_processes(machine: Processors, others: float, number: int) -> None:
    machine.after(1.0, others)
    threads.yield_to_others(1)
    assert machine.threads == number
    machine.after(1.0, 0.0)
    threads.yield_to_others(1)
    assert machine.threads == 4


def test_what_others_did_while_nothing_ran_does_not_count(machine: Processors) -> None:
    threads.yield_to_others(1)
    machine.after(600.0, 4.0, own=0.0)
    threads.yield_to_others(1)
    machine.after(1.0, 0.0)
    threads.yield_to_others(1)
    assert machine.threads == 4


def test_all_threads_read_a_prompt_beside_others(machine: Processors) -> None:
    for _ in range(2):
        machine.after(1.0, 4.0)
        threads.yield_to_others(512)
        assert machine.threads == 4
        threads.yield_to_others(1)
        assert machine.threads == 1


def test_a_moment_is_too_short_to_tell(machine: Processors) -> None:
    machine.after(threads.PERIOD_S / 2, 4.0)
    threads.yield_to_others(1)
    assert machine.threads == 4


def test_a_number_of_threads_that_the_user_set_stays(machine: Processors) -> None:
    threads.yield_to_others(1)
    machine.set(3)
    for _ in range(2):
        machine.after(1.0, 4.0)
        threads.yield_to_others(1)
    assert machine.threads == 3


def test_a_number_given_to_kvsift_stays(machine: Processors) -> None:
    threads.use(4)
    machine.after(1.0, 4.0)
    threads.yield_to_others(1)
    assert machine.threads == 4


def test_a_model_that_runs_looks_at_the_processors(machine: Processors) -> None:
    from models.tiny import SPARSE, greedy, prompt, tiny

    import kvsift

    model = tiny()
    machine.after(1.0, 4.0)
    with kvsift.sparse(model, SPARSE):
        greedy(model, prompt(), 2)
        assert machine.threads == 1
    assert machine.threads == 4, "the caller's own work has all of them"


def test_a_number_that_the_user_set_inside_a_block_stays(machine: Processors) -> None:
    machine.after(1.0, 4.0)
    threads.yield_to_others(1)
    machine.set(2)
    threads.give_back()
    assert machine.threads == 2


# --- kvsift bench busy


@linux_only
def test_the_measurement_runs() -> None:
    bench = BusyBench(BusyRecipe(("torch-first",), context=512, rounds=1, busy_rounds=1, tokens=6, questions=0))
    result = {**bench.head(), "points": list(bench.run())}
    assert [each["busy"] for each in result["points"]] == [False, True]
    assert [each["name"] for each in result["settings"]] == ["torch-first"]
    assert "torch was imported before kvsift" in result["settings"][0]["threads"]["while they wait"]
    assert "| kvsift, imported after torch |" in bench.closing(result)


def test_the_table_compares_with_the_default_and_with_the_quiet_machine() -> None:
    def sample(ms: float, job_s: float, others: float = 0.0) -> dict[str, Any]:
        itl_s = {"quest:budget=256": [ms / 1e3] * 3, "dense": [2 * ms / 1e3] * 3}
        return {"itl_s": itl_s, "job_s": job_s, "others": others}

    quiet = [{"busy": False, "samples": {"spin": sample(4, 2), "kvsift": sample(4.1, 2.5)}}] * 3
    noisy = [{"busy": False, "samples": {"spin": sample(400, 200, 0.5), "kvsift": sample(410, 250, 0.5)}}]
    busy = [{"busy": True, "samples": {"spin": sample(500, 20, 0.9), "kvsift": sample(8.2, 5, 0.9)}}]
    settings = [{"name": "spin", "label": "default"}, {"name": "kvsift", "label": "kvsift"}]
    rows = busy_table({"settings": settings, "points": quiet + noisy + busy}).splitlines()[2:]
    assert rows == [
        "| default | 4.00 ms | 500.0 ms (125.0x) | 8.00 ms | 1000.0 ms (125.0x) | 2.0 s | 20.0 s (10.0x) |",
        "| kvsift | 4.10 ms (+2.5%) | 8.2 ms (2.0x) | 8.20 ms (+2.5%) | 16.4 ms (2.0x) | 2.5 s | 5.0 s (2.0x) |",
    ]


def test_a_table_says_when_the_machine_was_busy() -> None:
    sample = {"itl_s": {"quest:budget=256": [0.004], "dense": [0.004]}, "others": 0.5}
    points = [{"busy": busy, "samples": {"kvsift": sample}} for busy in (False, True)]
    result = {"recipe": {"rounds": 1, "loops": 2, "context": 4096}, "points": points, "processors": 2, "machine": "M"}
    result |= {"versions": {"python": "3", "torch": "2"}, "commit": "c", "settings": [{"name": "kvsift", "label": "K"}]}
    assert "| K | 4.00 ms | 4.0 ms (1.0x) |" in busy_table(result)
    assert conditions(result).startswith("M, 2 of them used")
    assert "THE MACHINE WAS BUSY: only 0 of 1 rounds" in conditions(result)


def test_the_docs_name_the_spin_count_that_is_set() -> None:
    page = (ROOT / "docs" / "host.md").read_text()
    assert f"`GOMP_SPINCOUNT={threads.SPINS}`" in page
