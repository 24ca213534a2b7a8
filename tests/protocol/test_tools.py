"""Tools for OpenAI's API: schemathesis against the description of the server, and vLLM's benchmark."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from protocol.conftest import ROOT, TOOLS
from server.serving import Served

from kvsift.models.embedded import embedded_model

pytestmark = pytest.mark.protocol
EMBEDDED = embedded_model()
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""  # "vllm bench serve" needs a distribution named vllm, and that for CPUs has another name


def test_the_description_is_true(server: Served, tmp_path: Path) -> None:
    """Not checked: that whatever fits the schema is answered. A prompt may be too long, and a plan not served."""
    command = [
        *(str(TOOLS / "st"), "run", f"{server.url}/openapi.json", "--url", server.url, "--max-time", "300"),
        *("--exclude-checks", "positive_data_acceptance", "--generation-deterministic", "--workers", "1"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "Traceback" not in server.log.read_text()


@pytest.mark.skipif(not VLLM.exists(), reason="make test-protocol installs vLLM")
@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_vllm_measures_the_server(embedded: Served, tmp_path: Path, backend: str, endpoint: str) -> None:
    """As a user of vLLM would; it asks that ends of texts are ignored."""
    command = [
        *(str(VLLM), "-c", BENCH, "--backend", backend, "--base-url", embedded.url, "--endpoint", endpoint),
        *("--model", "embedded", "--tokenizer", str(EMBEDDED), "--dataset-name", "random", "--num-prompts", "12"),
        *("--random-input-len", "200", "--random-output-len", "16", "--request-rate", "4", "--ignore-eos"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    numbers = {name: float(value) for name, value in re.findall(r"^(\w[\w ()]*):\s+([\d.]+)\s*$", done.stdout, re.M)}
    assert (numbers["Successful requests"], numbers.get("Failed requests", 0)) == (12, 0), done.stdout
    assert numbers["Total generated tokens"] > 0
