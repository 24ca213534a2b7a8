"""A language model copies a call of a tool, which the server streams as one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from server.serving import Served

pytestmark = pytest.mark.real
TEMPLATE = (
    "<|im_start|>system\nYou call tools.{% for t in tools or [] %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content or '' }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture
def served(smol: Path, tmp_path: Path) -> Iterator[Served]:
    """A server of the model with a template that writes tools."""
    directory = tmp_path / "smol"
    directory.mkdir()
    for file in smol.iterdir():
        if file.name != "chat_template.jinja":
            (directory / file.name).symlink_to(file)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    served = Served(tmp_path, str(directory), "--device", "cpu")
    yield served
    served.stop()


def test_a_call_that_the_model_writes_is_streamed_as_one(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }
    question = {"role": "user", "content": f"Copy: {CALL}"}
    messages = [question, called, question, called, question]
    with client.chat.completions.stream(model="smol", messages=messages, tools=[TOOL], max_tokens=60) as stream:
        deltas = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        [choice] = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert len(deltas) > 4
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": "a", "content": "It rains."}
    answer = client.chat.completions.create(model="smol", messages=[*messages, called, result], max_tokens=8)
    assert answer.choices[0].message.content
