"""Calls of tools and reasoning in answers, however their text is cut into pieces."""

from __future__ import annotations

import json

import pytest

from kvsift.server.tool_calls import FORMATS, PLAIN, AnswerBlock, AnswerParser, Dialect, blocks

ARGUMENTS = '{"a": "}\\"", "b": [1, {}]}'
CALL = f'{{"name": "f", "arguments": {ARGUMENTS}}}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"
NAMES = {"f": {"a": {"type": "string"}, "b": {"type": "array"}}, "g": {}}
THINK, CHANNELS = Dialect(reasoning=0), Dialect(reasoning=3)
F, G = AnswerBlock("call", ARGUMENTS, "f"), AnswerBlock("call", "{}", "g")


def parsed(text: str, tools: str | None, dialect: Dialect = PLAIN, **options: object) -> list[AnswerBlock]:
    """The blocks of an answer, which are the same whatever its pieces are."""
    found = list[list[AnswerBlock]]()
    for num_characters in (1, 3, 7, 1000):
        parser = AnswerParser(dialect, tools, NAMES, **options)  # type: ignore[arg-type]
        starts = range(0, len(text), num_characters)
        parts = [each for start in starts for each in parser.feed(text[start : start + num_characters], False)]
        found.append(blocks(parts + parser.feed("", True)))
        assert parser.num_calls == sum(block.kind == "call" for block in found[-1])
    assert all(each == found[0] for each in found)
    return found[0]


def said(text: str) -> AnswerBlock:
    return AnswerBlock("content", text)


DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
XML = (
    '<tool_call>\n<function=f>\n<parameter=a>\n}"\n</parameter>\n<parameter=b>\n[1, {}]\n</parameter>\n'
    "</function>\n</tool_call>"
)
GLM = (
    '<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>}"</arg_value>\n<arg_key>b</arg_key>\n'
    "<arg_value>[1, {}]</arg_value>\n</tool_call>"
)
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("tools", "text", "expected"),
    [
        ("hermes", f"Sure.\n{HERMES}\n{HERMES}\n", [said("Sure."), F, F]),
        ("hermes", HERMES.replace("tool_call>", "|tool_call|>").replace("</|", "<|/"), [F]),
        ("hermes", f'<tool_call>{{"type": "function", "function": {CALL}}}</tool_call> Done.', [F, said("Done.")]),
        ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]", [F, F]),
        ("mistral", f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g[CALL_ID]a1[ARGS]{{}}", [F, G]),
        ("llama3", f'{CALL.replace("arguments", "parameters")}; {{"name": "g", "parameters": {{}}}}', [F, G]),
        ("llama3", f'<|python_tag|>{{"type": "function", {CALL[1:]}', [F]),
        ("json", f"```json\n[{CALL}]\n```", [F]),
        (
            "deepseek",
            "Hm. " + DEEPSEEK.format(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>\n"
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>"
            ),
            [said("Hm."), F, G],
        ),
        ("qwen3-coder", f"Sure.\n{XML}\n<tool_call>\n<function=g>\n</function>\n</tool_call>", [said("Sure."), F, G]),
        ("glm", f"{GLM}\n<tool_call>g\n</tool_call>", [F, G]),
        ("deepseek", DEEPSEEK.format(f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"), [F]),
    ],
)  # fmt: skip
def test_calls_are_found_in_every_format(tools: str, text: str, expected: list[AnswerBlock]) -> None:
    assert parsed(text, tools) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
            f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>",
            [AnswerBlock("reasoning", "Hm."), F],
        ),
        (f"to=functions.f<|channel|>commentary json<|message|>{ARGUMENTS}", [F]),
        (
            "<|channel|>commentary<|message|>I will.<|end|><|start|>assistant<|channel|>commentary to=functions.g"
            "<|message|>{}<|call|>",
            [said("I will."), G],
        ),
        (f"<|channel|>analysis<|message|>Hm.<|end|>{FINAL}Yes to=functions.", [AnswerBlock("reasoning", "Hm."),
                                                                             said("Yes to=functions.")]),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", [said("{}")]),
    ],
)  # fmt: skip
def test_channels_of_gpt_oss(text: str, expected: list[AnswerBlock]) -> None:
    assert parsed(text, "gpt-oss", CHANNELS) == expected


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", "about <tool_call> and </tool_call> "),
        ("hermes", "a < b, <tool"),
        ("llama3", '{"answer": 4} \n'),
        ("llama3", '{"name": "Bob", "parameters": {"a": 1}} is JSON'),
        ("json", "```python\nprint()\n```"),
        ("json", "[1, 2"),
        ("json", "[" * 5000),
        (None, HERMES),
        (None, " text \n"),
    ],
)
def test_other_text_stays_as_it_is(tools: str | None, text: str) -> None:
    assert "".join(block.text for block in parsed(text, tools)) == text.removeprefix("" if tools is None else " ")


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "arguments": null}', "null"),
    ],
)
def test_calls_in_unusual_json(body: str, arguments: str) -> None:
    found = [AnswerBlock("call", arguments, "f")]
    assert parsed(f"<tool_call>{body}</tool_call>", "hermes") == found
    assert parsed(body, "json") == found


def test_an_answer_that_is_cut_has_the_arguments_so_far() -> None:
    assert parsed(HERMES[:46], "hermes") == [AnswerBlock("call", ARGUMENTS[: 46 - HERMES.index(ARGUMENTS)], "f")]


def test_further_calls_are_dropped_if_they_must_not_be_parallel() -> None:
    assert parsed(f"{HERMES}\n{HERMES}", "hermes", most_calls=1) == [F]
    assert parsed(f"[TOOL_CALLS][{CALL}, {CALL}]", "mistral", most_calls=1) == [F]


@pytest.mark.parametrize(
    ("text", "expected", "begins"),
    [
        ("<think>\nHm.\n</think>\n\nYes. \n", [AnswerBlock("reasoning", "Hm."), said("Yes. \n")], False),
        ("Hm.\n</think>\n\nYes.", [AnswerBlock("reasoning", "Hm."), said("Yes.")], True),
        ("<think>\n\n</think>\n\nYes.", [said("Yes.")], False),
        ("<think>\nHm.", [AnswerBlock("reasoning", "Hm.")], False),
        ("Yes <th", [said("Yes <th")], False),
    ],
)
def test_reasoning_is_split_off(text: str, expected: list[AnswerBlock], begins: bool) -> None:
    assert parsed(text, None, THINK, begins_reasoning=begins) == expected


def test_calls_follow_reasoning() -> None:
    assert parsed(f"<think>\nHm. {HERMES}</think>\n{HERMES}", "hermes", THINK) == [
        AnswerBlock("reasoning", f"Hm. {HERMES}"), F,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{{ tools }}</think>{% if enable_thinking %}",
         Dialect(True, "hermes", 0, ["enable_thinking"])),
        ("{% if tools %}<tool_call>\n<function=x>... within <tool_call></tool_call>", Dialect(True, "qwen3-coder")),
        ("{% if tools %}<tool_call>{{ name }}<arg_key>", Dialect(True, "glm")),
        ("{% if tools %}<use_mcp_tool>", Dialect(True)),
        ("{% if tools %}{{ 'Environment: ipython' }}", Dialect(True, "llama3")),
        ("{% if tools %}[TOOL_CALLS]", Dialect(True, "mistral")),
        ("{% if tools %}<｜tool▁calls▁begin｜></think>", Dialect(True, "deepseek", 0)),
        ("{% if tools %}<|channel|> {{ reasoning_effort }}", Dialect(True, "gpt-oss", 3, ["reasoning_effort"])),
        ("{{ messages }}", PLAIN),
        ("", PLAIN),
    ],
)  # fmt: skip
def test_the_template_shows_the_dialect(template: str, expected: Dialect) -> None:
    found = Dialect.of(template)
    assert (found.has_tools, found.tools, found.reasoning) == (expected.has_tools, expected.tools, expected.reasoning)
    assert [*found.variables] == [*expected.variables]
    assert found.tools is None or found.tools in FORMATS


def test_a_prompt_may_begin_the_reasoning() -> None:
    assert THINK.begins_reasoning("<|im_start|>assistant\n<think>\n")
    assert not THINK.begins_reasoning("<think>\n\n</think>\n\n")
    assert not PLAIN.begins_reasoning("<think>")
    assert json.loads(ARGUMENTS)
