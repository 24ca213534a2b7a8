"""Whatever form of contents a chat template reads, all of them reach the prompt, or the prompt is refused."""

from pathlib import Path

import pytest
from engine.tiny_directory import write_model, write_tokenizer
from refusals import refused

from kvsift import LLM
from kvsift.tokenization.prompt import PromptFormat

TURN = "{{{{ '[' + m.role + ']' }}}}{}{{{{ '\\n' }}}}"
PARTS = "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}"  # as Llama Guard 3
REFUSES = "{% if m.content is string %}{{ raise_exception('parts, please') }}{% endif %}" + PARTS
MIXED = "{% if m.role == 'assistant' %}{{ m.content + '' }}{% else %}" + PARTS + "{% endif %}"
PICKY = "{% if 'kvsift' in m.content %}{{ raise_exception('no advertisements') }}{% endif %}"
DOCUMENT, QUESTION = "The code of the door is 7351. " * 30, "What is the code?"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "7351."},
    {"role": "user", "content": "Of which door?"},
]


def template_of(content: str, messages: str = "messages") -> str:
    """A chat template that writes the contents of messages in one way."""
    return f"{{% for m in {messages} %}}{TURN.format(content)}{{% endfor %}}[assistant]"


@pytest.mark.parametrize("content", [PARTS, REFUSES, MIXED], ids=["parts", "refuses text", "mixed"])
def test_messages_and_documents_reach_a_template_that_reads_parts(content: str, tmp_path: Path) -> None:
    form = PromptFormat(write_tokenizer(tmp_path / "parts", template_of(content)), system="Be brief.")
    plain = PromptFormat(write_tokenizer(tmp_path / "text", template_of("{{ m.content }}")), system="Be brief.")
    for turns in ([], [(QUESTION, "7351.")]):
        assert form.encode(DOCUMENT, QUESTION, turns) == plain.encode(DOCUMENT, QUESTION, turns)
        assert form.text(DOCUMENT, QUESTION, turns) == plain.text(DOCUMENT, QUESTION, turns)
    served = form.encode_messages(MESSAGES, DOCUMENT)
    assert served == plain.encode_messages(MESSAGES, DOCUMENT)
    assert len(served) > len(DOCUMENT) + sum(len(message["content"]) for message in MESSAGES)


def test_a_document_is_asked_and_chatted_about_through_a_template_that_reads_parts(tmp_path: Path) -> None:
    """The question ended in a TypeError, and the chat had neither document nor question."""
    llm = LLM(write_model(tmp_path, chat_template=template_of(PARTS)), "dense")
    asked = llm.read(DOCUMENT).ask(QUESTION, max_new_tokens=2)
    chatted = llm.chat(DOCUMENT).ask(QUESTION, max_new_tokens=2)
    assert asked.prompt_tokens == chatted.prompt_tokens > len(DOCUMENT) + len(QUESTION)
    assert asked.token_ids == chatted.token_ids


def test_a_system_message_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, template_of("{{ m.content }}", "messages if m.role != 'system'"))
    says = "unsupported_prompt: system"
    with refused(says):
        PromptFormat(tokenizer, system="Be brief.").encode(DOCUMENT, QUESTION)
    with refused(says):
        PromptFormat(tokenizer).encode_messages(MESSAGES)
    assert PromptFormat(tokenizer).encode_messages(MESSAGES[1:])


def test_an_early_question_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, template_of("{{ m.content }}", "messages[-1:]"))
    assert PromptFormat(tokenizer).encode(DOCUMENT, QUESTION)
    with refused("unsupported_prompt: assistant and user"):
        PromptFormat(tokenizer).encode("", "Why?", [(QUESTION, "7351.")])


def test_a_template_that_refuses_markers_is_judged_by_the_contents(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "writes", template_of(PICKY + "{{ m.content }}"))
    assert "7351" in PromptFormat(tokenizer).text(DOCUMENT, QUESTION)
    with refused("unsupported_prompt: no advertisements"):
        PromptFormat(tokenizer).text("On kvsift.", QUESTION)
    tokenizer = write_tokenizer(tmp_path / "loses", template_of(PICKY))
    with refused("unsupported_prompt: user"):
        PromptFormat(tokenizer).text(DOCUMENT, QUESTION)


@pytest.mark.parametrize("content", ["m.content | trim", "m.content | lower", "m.content.split('</think>')[-1]"])
def test_a_template_that_trims_or_changes_contents_writes_them(content: str, tmp_path: Path) -> None:
    assert PromptFormat(write_tokenizer(tmp_path, template_of(f"{{{{ {content} }}}}"))).encode_messages(MESSAGES)
