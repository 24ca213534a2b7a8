"""One decode step on a CPU: how deep its calls go, how many files they are in, and how many there are.

A reader who follows a token through the package opens these files and these functions, one inside the other. The bounds
are what they were when they were last lowered; ``lab/house_counts.py --step --chain`` prints the present numbers.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import kvsift
from kvsift import native
from kvsift.engine.graphs.slots import Slots
from kvsift.engine.loop import Loop

COUNTS = Path(__file__).parent.parent / "lab" / "house_counts.py"
BOUNDS = {  # plan -> frames from the engine's step to the compiled core, files, calls
    "quest:budget=256:score_by=mean_std": (14, 35, 515),  # composed
    "sketch:budget=256": (6, 16, 40),
    "quest:budget=256": (6, 16, 40),
    "dense": (6, 16, 37),
}
FRAMES_TO_REPLAY = 8  # of a captured step, from the engine's step to the replay of its graph


@pytest.fixture(scope="module")
def house_counts() -> Any:
    spec = importlib.util.spec_from_file_location("house_counts", COUNTS)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def llm() -> kvsift.LLM:
    return kvsift.LLM(device="cpu", probe_every=0)


@pytest.mark.skipif(not native.available(), reason=native.why_missing() or "the core is here")
@pytest.mark.parametrize("plan", BOUNDS)
def test_a_decode_step_takes_no_more_frames_files_and_calls(house_counts: Any, llm: kvsift.LLM, plan: str) -> None:
    trace = house_counts.trace_steps(llm, plan)
    numbers = len(trace.chain), len(trace.files), trace.calls.total()
    assert all(number <= bound for number, bound in zip(numbers, BOUNDS[plan])), (numbers, trace.chain, trace.files)
    assert len(trace.chain) > 5, "the step reached the compiled core"


def test_a_captured_step_takes_no_more_frames_to_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host side, without a graph: ``Slots.run`` is what replays one on a GPU."""
    chains: list[list[str]] = []
    run = Slots.run

    def watched(slots: Slots, *given: Any) -> Any:
        frame, chain = sys._getframe(1), ["run"]
        while frame is not None and chain[-1] != "step_of_the_loop":
            is_step = frame.f_code is Loop.step.__code__
            chain.append("step_of_the_loop" if is_step else frame.f_code.co_name)
            frame = frame.f_back
        chains.append(chain)
        return run(slots, *given)

    monkeypatch.setattr(Slots, "run", watched)
    with kvsift.LLM(plan="quest:budget=256", device="cpu", path="eager", dense_below=0) as llm:
        llm.generate("The mill had eleven sacks of rye. " * 20, max_new_tokens=4)
    assert chains
    assert max(map(len, chains)) <= FRAMES_TO_REPLAY, chains[0]
    assert chains[0][-1] == "step_of_the_loop"
