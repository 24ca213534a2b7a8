"""Tools for OpenAI's API: schemathesis against the description of the server, benchmarks, and lm-eval."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from protocol.conftest import program
from server.serving import Served

from kvsift.models.embedded import embedded_model

pytestmark = pytest.mark.protocol
EMBEDDED = embedded_model()
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
        *(program("protocol", "st"), "run", f"{server.url}/openapi.json", "--url", server.url, "--max-examples", "20"),
        *("--exclude-checks", "positive_data_acceptance", "--generation-deterministic", "--workers", "1"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_vllm_measures_the_server(embedded: Served, tmp_path: Path, backend: str, endpoint: str) -> None:
    """As a user of vLLM would; it asks that ends of texts are ignored."""
    command = [
        *(program("vllm"), "-c", BENCH, "--backend", backend, "--base-url", embedded.url, "--endpoint", endpoint),
        *("--model", "embedded", "--tokenizer", str(EMBEDDED), "--dataset-name", "random", "--num-prompts", "12"),
        *("--random-input-len", "200", "--random-output-len", "16", "--request-rate", "4", "--ignore-eos"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    numbers = {name: float(value) for name, value in re.findall(r"^(\w[\w ()]*):\s+([\d.]+)\s*$", done.stdout, re.M)}
    assert (numbers["Successful requests"], numbers.get("Failed requests", 0)) == (12, 0), done.stdout
    assert numbers["Total generated tokens"] > 0


def test_guidellm_measures_the_server(embedded: Served, tmp_path: Path) -> None:
    """It asks for running numbers in streams, and that ends of texts are ignored."""
    command = [
        *(program("measure", "guidellm"), "run", "--backend", f"kind=openai_http,target={embedded.url},model=embedded"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=8"),
        *("--tokenizer", f"kind=hf_auto,model={EMBEDDED}", "--output", "kind=json,path=found.json"),
        *("--data", "kind=synthetic_text,prompt_tokens=200,output_tokens=16", "--disable-console"),
    ]
    run_offline(command, tmp_path)
    [found] = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    assert found["metrics"]["request_totals"] == {"successful": 8, "errored": 0, "incomplete": 0, "total": 8}
    assert found["metrics"]["output_token_count"]["successful"]["total_sum"] == 8 * 16


def test_lm_eval_scores_answers_and_likelihoods(embedded: Served, tmp_path: Path) -> None:
    """Generated texts are compared, and choices ranked by the log-probabilities of an echoed prompt."""
    told = "The captain is Anna. The code of the gate is 48213. Question: {} Answer:"
    documents = [
        {"text": told.format("Who is the captain?"), "choices": ["Bob", "Anna"], "gold": 1, "answer": " Anna"},
        {"text": told.format("What is the code?"), "choices": ["48213", "48231"], "gold": 0, "answer": " 48213"},
    ]
    (tmp_path / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    limits = {"until": [".", "\n"], "max_gen_toks": 12}
    generate = {"output_type": "generate_until", "doc_to_target": "answer", "generation_kwargs": limits}
    choose = {"output_type": "multiple_choice", "doc_to_target": "gold", "doc_to_choice": "choices"}
    tasks = {
        "generate": {**generate, "metric_list": [{"metric": "exact_match"}]},
        "choose": {**choose, "metric_list": [{"metric": "acc"}]},
    }
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "documents.jsonl"}}, "test_split": "test"}
    for name, task in tasks.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, "doc_to_text": "text", **data, **task}))
    model = f"model=embedded,tokenizer={EMBEDDED},base_url={embedded.url}/v1/completions"
    command = [
        *(program("measure", "lm_eval"), "run", "--model", "local-completions", "--model_args", model),
        *("--tasks", ",".join(tasks), "--include_path", str(tmp_path), "--output_path", "found.json"),
    ]
    run_offline(command, tmp_path)
    [path] = tmp_path.glob("found*.json")
    found = json.loads(path.read_text())["results"]
    assert (found["generate"]["exact_match,none"], found["choose"]["acc,none"]) == (1, 1)


def run_offline(command: list[str], folder: Path) -> None:
    """Run a command that asks Hugging Face for nothing."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
