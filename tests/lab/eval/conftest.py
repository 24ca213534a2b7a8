"""A tiny model for whole runs, on the CPU whatever the machine has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.tiny_directory import write_model


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    """The same paths, dtypes and words on a machine with a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It knows nothing."""
    return write_model(tmp_path_factory.mktemp("tiny"))
