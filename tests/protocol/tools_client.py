"""What clients for agents make of a server: tools_client.py URL CLIENT prints what it was told in the end.

Every client offers a tool, ``weather``, is told to call it for Paris, and sends back the result; it is answered then
with "The result of weather is rain in Paris." (``server/fake_worker.py``). Those of a name with structured, json or
schema, and Instructor, ask for a place, which is Paris. Aider has no tools, and writes the answer into a file.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

URL = sys.argv[1]
BASE = {"base_url": f"{URL}/v1", "api_key": "any"}
QUESTION = "What is the weather?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ABOUT = {"name": "weather", "description": "Look it up."}


def weather(city: str) -> str:
    """Look it up."""
    return f"rain in {city}"


def anthropic() -> str:
    import anthropic

    client, tool = anthropic.Anthropic(base_url=URL, api_key="any"), {**ABOUT, "input_schema": SCHEMA}
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "tools": [tool]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with client.messages.stream(**asked, messages=messages) as stream:
        first = stream.get_final_message()
    call = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert client.messages.count_tokens(model="tiny", messages=messages).input_tokens > 0
    return client.messages.create(**asked, messages=messages).content[0].text


def litellm(model: str = "hosted_vllm/tiny", base: str = f"{URL}/v1") -> str:
    import litellm

    tools = [{"type": "function", "function": {**ABOUT, "parameters": SCHEMA}}]
    asked: dict[str, Any] = {"model": model, "api_base": base, "api_key": "any", "tools": tools}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    chunks = list(litellm.completion(**asked, messages=messages, stream=True))
    message = litellm.stream_chunk_builder(chunks).choices[0].message
    [call] = message.tool_calls
    content = weather(**json.loads(call.function.arguments))
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": content}]
    return litellm.completion(**asked, messages=messages).choices[0].message.content


def litellm_anthropic() -> str:
    return litellm("anthropic/tiny", URL)


def langchain(**options: Any) -> str:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="tiny", **BASE, **options).bind_tools([tool(weather)])
    pieces = list(model.stream(QUESTION))
    first = sum(pieces[1:], pieces[0])
    [call] = first.tool_calls
    return model.invoke([("user", QUESTION), first, tool(weather).invoke(call)]).text


def langchain_responses() -> str:
    return langchain(use_responses_api=True)


def llama_index() -> str:
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    options = {"is_chat_model": True, "is_function_calling_model": True}
    model = OpenAILike(model="tiny", api_base=BASE["base_url"], api_key="any", **options)
    tool = FunctionTool.from_defaults(weather)
    return model.predict_and_call([tool], QUESTION).response


def pydantic_ai(kind: str = "OpenAIChatModel") -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    model = getattr(openai, kind)("tiny", provider=OpenAIProvider(**BASE))
    return Agent(model, tools=[weather]).run_sync(QUESTION).output


def pydantic_ai_responses() -> str:
    return pydantic_ai("OpenAIResponsesModel")


def instructor(mode: str = "TOOLS") -> str:
    import instructor
    from openai import OpenAI
    from pydantic import create_model

    client = instructor.from_openai(OpenAI(**BASE), mode=getattr(instructor.Mode, mode))
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_retries": 0}
    return client.chat.completions.create(**asked, response_model=create_model("Place", city=str)).city


def instructor_json() -> str:
    return instructor("JSON")


def instructor_schema() -> str:
    return instructor("JSON_SCHEMA")


def langchain_structured(method: str = "function_calling") -> str:
    from langchain_openai import ChatOpenAI
    from pydantic import create_model

    model = ChatOpenAI(model="tiny", **BASE)
    return model.with_structured_output(create_model("Place", city=str), method=method).invoke(QUESTION).city


def langchain_schema() -> str:
    return langchain_structured("json_schema")


def haystack() -> str:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret

    tool, key = Tool(**ABOUT, parameters=SCHEMA, function=weather), Secret.from_token("any")
    model = OpenAIChatGenerator(model="tiny", api_base_url=BASE["base_url"], api_key=key, tools=[tool])
    question = ChatMessage.from_user(QUESTION, name="bob")
    [first] = model.run([question])["replies"]
    [call] = first.tool_calls
    result = ChatMessage.from_tool(weather(**call.arguments), origin=call)
    return model.run([question, first, result])["replies"][0].text


def openai_agents(kind: str = "OpenAIChatCompletionsModel") -> str:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    model = getattr(agents, kind)("tiny", AsyncOpenAI(**BASE))
    agent = agents.Agent(name="a", instructions="Be brief.", tools=[agents.function_tool(weather)], model=model)
    return agents.Runner.run_sync(agent, QUESTION).final_output


def openai_agents_responses() -> str:
    return openai_agents("OpenAIResponsesModel")


def llm() -> str:
    with TemporaryDirectory() as folder:
        model = {"model_id": "tiny", "model_name": "tiny", "api_base": BASE["base_url"], "supports_tools": True}
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([model]))
        command = [str(Path(sys.executable).with_name("llm")), "-m", "tiny", "--functions", inspect.getsource(weather)]
        environment = {**os.environ, "LLM_USER_PATH": folder}
        return subprocess.check_output([*command, QUESTION], env=environment, text=True).strip()


def aider() -> str:
    with TemporaryDirectory() as folder:
        subprocess.run([
            sys.executable, "-m", "aider", "--model", "openai/tiny", "--openai-api-base", BASE["base_url"],
            "--openai-api-key", "any", "--edit-format", "whole", "--no-git", "--yes-always", "--no-check-update",
            "--no-show-model-warnings", "--message", f"say note.txt\n```\n{weather('Paris')}\n```\n", "note.txt",
        ], cwd=folder, env={**os.environ, "HOME": folder}, stdout=sys.stderr, check=True)  # fmt: skip
        return Path(folder, "note.txt").read_text().strip()


if __name__ == "__main__":
    print(globals()[sys.argv[2]]())
