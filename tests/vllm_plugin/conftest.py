"""vLLM in processes of its own: what tests do to torch would change it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from vllm_plugin.vllm_environment import ENVIRONMENT

from kvsift.models.embedded import embedded_model

HERE = Path(__file__).parent
EMBEDDED = embedded_model()
NO_VLLM = "vLLM is not installed; make test-vllm installs it in an environment of its own"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("vllm") and find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason=NO_VLLM))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, with an end that it never says."""
    directory = tmp_path_factory.mktemp("model") / "embedded"
    shutil.copytree(EMBEDDED, directory)
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [4095]}))
    return directory


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """English of eight lengths, each cut within a sentence."""
    from kvsift.cli.demo import make_document

    words = make_document(4096).split(" ")
    return [" ".join(words[start : start + 120 + start // 3]) for start in range(0, 1600, 200)]


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Callable[..., list[list[dict[str, Any]]]]:
    """Answers of an offline vLLM to rounds of requests, see ``offline``."""

    def run(settings: dict[str, Any] | None, rounds: list[Any], **engine: Any) -> list[list[dict[str, Any]]]:
        job = tmp_path / "job.json"
        engine = {"max_model_len": 4096, "max_num_batched_tokens": 1024, **engine}
        job.write_text(json.dumps({"model": str(model), "settings": settings, "engine": engine, "rounds": rounds}))
        command = [sys.executable, str(HERE / "offline.py"), str(job)]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
        answers: list[list[dict[str, Any]]] = json.loads(job.with_suffix(".out").read_text())
        return answers

    return run
