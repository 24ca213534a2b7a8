"""Clients for agents call a tool, by OpenAI's two APIs and Anthropic's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from protocol.conftest import AGENTS, TOOLS
from server.serving import Served

pytestmark = pytest.mark.protocol
SCENES = Path(__file__).parent / "tools_client.py"


@pytest.mark.parametrize("client", [
    "anthropic", "haystack", "instructor", "instructor_json", "instructor_schema", "langchain_schema",
    "langchain_structured", "langchain", "langchain_responses", "litellm", "litellm_anthropic", "llama_index",
    "openai_agents", "openai_agents_responses", "pydantic_ai", "pydantic_ai_responses",
])  # fmt: skip
def test_a_client_calls_a_tool_and_is_answered(client: str, scripted: Served) -> None:
    folder = TOOLS if client.startswith("langchain") else AGENTS  # they need other versions of httpx
    command = [str(folder / "python"), "-W", "ignore", str(SCENES), scripted.url, client]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    is_place = client.startswith("instructor") or client in ("langchain_schema", "langchain_structured")
    told = "The result of weather is rain in Paris."
    told = "Paris" if is_place else "rain in Paris" if client == "llama_index" else told
    assert done.stdout.splitlines()[-1] == told
