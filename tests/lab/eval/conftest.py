"""A tiny model for whole runs, on the CPU whatever the machine has."""

from collections.abc import Iterator
from multiprocessing import forkserver, get_context
from pathlib import Path

import pytest
from engine.fixtures import on_the_cpu  # noqa: F401
from engine.tiny_directory import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It knows nothing."""
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Iterator[None]:
    """Workers are forked from one process that has imported what would take each five seconds."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["kvsift_lab.eval.evaluator", "kvsift.api.llm", "transformers.models.llama"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvsift_lab.eval.workers.get_context", lambda method: context)
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
        yield
