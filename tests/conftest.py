"""What every test shares: the same examples in each run, and uninitialised memory that shows itself.

The default Hypothesis profile repeats exactly; ``first_failure`` does not shrink, for tests that expect a failure.
"""

import gc
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

gc.disable()  # until everything is imported and collected: looking through that again and again takes minutes in all

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is defined: twins then run on the CPU

settings.register_profile(
    "kvsift",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=20,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("first_failure", settings.get_profile("kvsift"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("kvsift")

# torch.empty and its kin are filled with NaN in this mode: whoever reads what was never written finds out
torch.set_deterministic_debug_mode("warn")  # imports no compiler, as use_deterministic_algorithms does
torch.set_num_threads(1)  # tensors here are tiny, and tests share the machine


@pytest.fixture
def fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """For contracts of what differs in one thing from a method that meets all examples."""
    monkeypatch.setenv("KVSIFT_EXAMPLES", str(0.4 * float(os.environ.get("KVSIFT_EXAMPLES", "1"))))


@pytest.fixture(scope="session", autouse=True)
def measured_crossover() -> Iterator[Callable[..., int]]:
    """Sparse plans are sparse in short contexts too, as with ``dense_below=0``; the method that would measure."""
    from kvsift.engine.graphs.crossover import HostCrossover

    with pytest.MonkeyPatch.context() as patch:
        measured = HostCrossover.of
        patch.setattr(HostCrossover, "of", lambda *_: 0)
        yield measured


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage from here on, but not among modules and tests: each ``gc.collect`` would take half a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(
        700, 10, 100
    )  # few objects are left of which a quarter must be new: searches would come more often
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter find everything at its end; the compiled core reports what it does not."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests measured, from whichever process they ran in."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "measured":
                terminalreporter.write_line(f"{report.nodeid}: {text}")
