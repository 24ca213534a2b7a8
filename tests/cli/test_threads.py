"""kvsift --threads: as many threads as are asked for; and what doctor says about how they wait."""

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.watched import Run
from kvsift_lab.bench import BENCHES, load
from kvsift_lab.cli.eval import evaluate
from kvsift_lab.cli.explain import explain

from kvsift import threads
from kvsift.cli.ask import ask
from kvsift.cli.calibrate import calibrate
from kvsift.cli.demo import demo
from kvsift.cli.generate import generate

COMMANDS = ask, generate, demo, explain, calibrate, evaluate


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What torch was told."""
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    return told


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_commands_that_compute_take_a_number_of_threads(command: Any) -> None:
    assert "threads" in signature(command).parameters


@pytest.mark.parametrize("bench", ["host", "index", "split"])
def test_benches_of_the_processor_take_a_number_of_threads(bench: str) -> None:
    assert load(BENCHES[bench]).options()["threads"].flag == "--threads"


def test_so_many_threads_run(run: Run, model: Path, text: Path, numbers: list[int]) -> None:
    continued = ("generate", "--model", model, "--prompt-file", text, "--max-new-tokens", 1, "--json")
    assert run(*continued).code == 0
    assert numbers == []
    assert run(*continued, "--threads", 3).code == 0
    assert numbers == [3]


def test_no_threads_are_refused(run: Run) -> None:
    assert run("generate", "--prompt", "Once", "--threads", 0).code == 2


@pytest.mark.parametrize(
    ("torch_first", "given", "said"),
    [
        (True, {}, "torch was imported before kvsift"),
        (False, {}, f"kvsift set GOMP_SPINCOUNT={threads.SPINS}"),
        (True, {"OMP_WAIT_POLICY": "passive"}, "as the environment says: OMP_WAIT_POLICY=passive"),
    ],
)
def test_doctor_says_how_threads_wait(
    run: Run, monkeypatch: pytest.MonkeyPatch, torch_first: bool, given: dict[str, str], said: str
) -> None:
    monkeypatch.setattr(threads, "TORCH_WAS_FIRST", torch_first)
    monkeypatch.setattr(threads, "SPINS_SET", not torch_first)
    monkeypatch.setattr(threads, "USER_WAITING", given)
    facts = run("doctor", "--device", "cpu", "--json").document["threads"]
    assert said in facts["while they wait"]
    assert facts["number"] == torch.get_num_threads()
    assert facts["processors"] == threads.processors()
