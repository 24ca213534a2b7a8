"""Clients that others have written, in processes and environments of their own, against servers in theirs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from server.serving import OPTIONS, SCRIPTED, Served, write_endless_model

ROOT = Path(__file__).parents[2]
MODULES = Path(__file__).parent / "node_modules"


def program(environment: str, name: str = "python") -> str:
    """A program of one of the environments of clients, ``.venv-*``; without that environment the test is skipped."""
    path = ROOT / f".venv-{environment}" / "bin" / name
    if not path.parent.exists():
        pytest.skip(f"make test-protocol installs the clients of .venv-{environment}")
    return str(path)


def node() -> str:
    """The program that runs clients in JavaScript; without it or them the test is skipped."""
    path = shutil.which("node")
    if path is None or not MODULES.exists():
        pytest.skip("make test-protocol installs the clients in JavaScript, and needs node")
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that is served."""
    return write_endless_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of it, whose line is short."""
    served = Served(tmp_path_factory.mktemp("server"), str(tiny), *OPTIONS, "--max-waiting", "2")
    yield served
    served.stop()


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that calls tools, without a model."""
    served = Served(tmp_path_factory.mktemp("scripted"), *SCRIPTED)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def locked(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that asks for a key."""
    served = Served(tmp_path_factory.mktemp("locked"), str(tiny), *OPTIONS, KVSIFT_API_KEY="secret")
    yield served
    served.stop()


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the embedded model."""
    options = "--plan", "sketch:budget=256", "--threads", "1", "--device", "cpu"
    served = Served(tmp_path_factory.mktemp("embedded"), *options)
    yield served
    served.stop()
