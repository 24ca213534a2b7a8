"""Clients for agents call a tool or get an object, by OpenAI's two APIs and Anthropic's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from protocol.conftest import node, program
from server.serving import Served

pytestmark = pytest.mark.protocol
SCENES = Path(__file__).parent / "tools_client.py"
PLACES = (
    "ai_sdk_schema",
    "instructor",
    "instructor_json",
    "instructor_schema",
    "langchain_schema",
    "langchain_structured",
)
RESULTS = {"llama_index": "rain in Paris", "aider": "rain in Paris", **dict.fromkeys(PLACES, "Paris")}


@pytest.mark.parametrize("client", [
    *PLACES, "ai_sdk", "ai_sdk_streamed", "aider", "anthropic", "haystack", "langchain", "langchain_responses",
    "litellm", "litellm_anthropic", "llama_index", "llm", "openai_agents", "openai_agents_responses", "pydantic_ai",
    "pydantic_ai_responses",
])  # fmt: skip
def test_a_client_calls_a_tool_and_is_answered(client: str, scripted: Served) -> None:
    if client.startswith("ai_sdk"):
        command = [node(), str(SCENES.with_suffix(".mjs")), scripted.url, client]
    else:
        environment = "protocol" if client.startswith("langchain") else "aider" if client == "aider" else "agents"
        command = [program(environment), "-W", "ignore", str(SCENES), scripted.url, client]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told = "The result of weather is rain in Paris."
    assert done.stdout.splitlines()[-1] == RESULTS.get(client, told)
