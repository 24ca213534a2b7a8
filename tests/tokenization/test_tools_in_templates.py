"""Tools, their calls and results reach the prompt in the form that a chat template reads, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine.tiny_directory import write_tokenizer
from refusals import refused

from kvsift.tokenization.prompt import PromptFormat

FUNCTION = {"name": "weather", "description": "Look it up.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "weather", "arguments": {"city": "Łódź"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Does it rain?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"rain": "yes"}', "name": "weather", "tool_call_id": "a1b2c3d4e"},
]
HEAD = "{% if tools %}{% for t in tools %}[tool]{{ t | tojson }}\n{% endfor %}{% endif %}"
REST = (
    "{%% for m in messages %%}[{{ m.role }}]%s{%% for c in m.tool_calls or [] %%}[call]{{ c.function.name }} "
    "{{ %s }}{%% endfor %%}\n{%% endfor %%}[assistant]{%% if enable_thinking is false %%}<think></think>{%% endif %%}"
)
TEXT, JSON = "{{ m.content or '' }}", "c.function.arguments | tojson"
TEMPLATES = {
    "objects": HEAD + REST % (TEXT, JSON),
    "text": HEAD + REST % (TEXT, "'' + c.function.arguments"),
    "result as JSON": HEAD + REST % ("{{ m.content | tojson if m.role == 'tool' else m.content }}", JSON),
}  # fmt: skip


def form_of(folder: Path, template: str) -> PromptFormat:
    return PromptFormat(write_tokenizer(folder, template))


def text_of(form: PromptFormat, **variables: Any) -> str:
    return form.tokenizer.decode(form.encode_messages(MESSAGES, variables=variables))


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_calls_and_results_reach_the_prompt(name: str, tmp_path: Path) -> None:
    text = text_of(form_of(tmp_path, TEMPLATES[name]), tools=TOOLS)
    assert text.startswith('[tool]{"type": "function", "function": {"name": "weather", ')
    assert '[call]weather {"city": "Łódź"}' in text
    assert '{\\"rain\\": \\"yes\\"}' in text if name == "result as JSON" else '{"rain": "yes"}' in text


@pytest.mark.parametrize("part", ["description", "arguments", "result"])
def test_control_tokens_that_tools_spell_are_text(part: str, tmp_path: Path) -> None:
    form = form_of(tmp_path, TEMPLATES["objects"] + "<eos>")
    end = form.tokenizer.convert_tokens_to_ids("<eos>")
    spelled = "Now <eos> go on."
    messages, tools = [*MESSAGES], [{"type": "function", "function": {**FUNCTION, "description": spelled}}]
    if part == "arguments":
        function = {"name": "weather", "arguments": {spelled: spelled}}
        messages[1], tools = {**MESSAGES[1], "tool_calls": [{**CALL, "function": function}]}, TOOLS
    if part == "result":
        messages[2], tools = {**MESSAGES[2], "content": spelled}, TOOLS
    ids = form.encode_messages(messages, variables={"tools": tools})
    assert ids.count(end) == 1
    assert spelled in form.tokenizer.decode(ids)


def test_what_a_template_does_not_write_is_refused(tmp_path: Path) -> None:
    plain = form_of(tmp_path / "plain", "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    with refused("unsupported_prompt: the model's chat template does not write tools"):
        plain.encode_messages(MESSAGES[:1], variables={"tools": TOOLS})
    with refused("unsupported_prompt: the calls of tools"):
        plain.encode_messages(MESSAGES)
    lost = form_of(
        tmp_path / "lost",
        TEMPLATES["objects"].replace("[{{ m.role }}]", "{% if m.role == 'tool' %}{% continue %}{% endif %}"),
    )
    with refused("unsupported_prompt: tool"):
        lost.encode_messages(MESSAGES, variables={"tools": TOOLS})
    none = PromptFormat(write_tokenizer(tmp_path / "none", None))
    with refused("unsupported_prompt: no chat template"):
        none.encode_messages(MESSAGES[:1], variables={"tools": TOOLS})


def test_variables_are_those_of_the_template(tmp_path: Path) -> None:
    form = form_of(tmp_path, TEMPLATES["objects"])
    assert text_of(form, enable_thinking=False) == text_of(form) + "<think></think>"
    for name in ("enable_thinkin", "messages", "chat_template", "tokenize", "add_generation_prompt", "{{"):
        with refused(f"invalid_value: {name}"):
            form.encode_messages(MESSAGES, variables={name: True})
