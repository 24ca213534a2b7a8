"""One server for all tests that leave it as it was."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server.serving import OPTIONS, PLAN, SCRIPTED, Served, write_endless_model

import kvsift


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that is served."""
    return write_endless_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its server."""
    names = "--served-model-name", "tiny", "--served-model-name", "gpt-4o-mini"
    served = Served(tmp_path_factory.mktemp("server"), str(model), *OPTIONS, "--allow-plan", "quest:budget=128", *names)
    yield served
    served.stop()


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that calls tools, without a model."""
    served = Served(tmp_path_factory.mktemp("scripted"), *SCRIPTED)
    yield served
    served.stop()


@pytest.fixture
def client(server: Served) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def alone(model: Path) -> kvsift.LLM:
    """The same model in this process."""
    return kvsift.LLM(model, plan=PLAN, device="cpu", chunk_size=64, dense_below=0)
