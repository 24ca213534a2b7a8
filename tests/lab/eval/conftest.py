"""A tiny model for whole runs, on the CPU whatever the machine has."""

from pathlib import Path

import pytest
from engine.fixtures import on_the_cpu  # noqa: F401
from engine.tiny_directory import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It knows nothing."""
    return write_model(tmp_path_factory.mktemp("tiny"))
