"""Conversations: the prompts of their turns, what a turn reads, and what a long one still finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.tiny_directory import text_of
from refusals import refused

from kvsift import LLM, InputError
from kvsift.tokenization.prompt import PromptFormat

GRID = 64
PLAN = "sketch:budget=80:sinks=4:window=16:dense_layers=none"
QUESTIONS = ("Which mill?", "How many sacks?", "By which river?")


def new_llm(directory: Path) -> LLM:
    return LLM(directory, PLAN, device="cpu", chunk_size=GRID, dtype="float32")


@pytest.mark.parametrize("kind", ["llama", "chatty"])
def test_turns_answer_as_their_whole_prompts_and_read_what_is_new(kind: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(kind)
    llm, alone = new_llm(directory), new_llm(directory)
    chat = llm.chat(text_of(500), stop="\n\n")
    for number, question in enumerate(QUESTIONS):
        turns = list(chat.turns)
        answer = chat.ask(question, max_new_tokens=6)
        prompt = PromptFormat(llm.tokenizer).text(text_of(500), question, turns)
        expected = alone.generate(prompt.removeprefix("<bos>"), max_new_tokens=6, stop="\n\n")
        assert answer.token_ids == expected.token_ids
        assert answer.prompt_tokens == expected.prompt_tokens
        assert expected.new_prompt_tokens == answer.prompt_tokens
        if number:
            assert answer.new_prompt_tokens < 2 * GRID
    assert [asked for asked, _ in chat.turns] == list(QUESTIONS)
    llm.loop.check()
    del chat, answer
    llm.loop.step()
    assert llm.loop.pages.kv.pages.num_used == 0, "the prompt goes with the chat"


def test_a_chat_without_a_template_keeps_kvsifts_own_format(llama: Path) -> None:
    form = PromptFormat(new_llm(llama).tokenizer)
    assert form.text("A manual.\n", "Why?", [("Who?", "Ada"), ("When?", "now")]) == (
        "A manual.\n\nQuestion: Who?\nAnswer: Ada\n\nQuestion: When?\nAnswer: now\n\nQuestion: Why?\nAnswer:"
    )
    assert form.text("A manual.", "Why?") == "A manual.\n\nQuestion: Why?\nAnswer:"


def test_a_chat_template_gets_every_turn_and_the_document_in_the_first(chatty: Path) -> None:
    tokenizer = new_llm(chatty).tokenizer
    form = PromptFormat(tokenizer, system="Be brief.")
    assert form.text("A manual.", "Why?", [("Who?", "Ada")]) == (
        "<bos>[system] Be brief.\n[user] A manual.\n\nWho?\n[assistant] Ada\n[user] Why?\n[assistant] "
    )
    assert PromptFormat(tokenizer).text("", "Why?") == "<bos>[user] Why?\n[assistant] "


def test_a_turn_that_is_interrupted_keeps_what_it_has_read(llama: Path) -> None:
    llm = new_llm(llama)
    chat = llm.chat(text_of(700))

    def interrupt(done: int, total: int) -> None:
        if done >= 5 * GRID:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.ask("Which mill?", progress=interrupt)
    assert chat.turns == []
    with pytest.raises(InputError):
        chat.ask("Which mill?", max_new_tokens=5000)
    answer = chat.ask("How many sacks?", max_new_tokens=3)
    assert answer.prompt_tokens - answer.new_prompt_tokens >= 5 * GRID
    del chat
    llm.loop.step()
    assert llm.loop.pages.kv.pages.num_used == 0


def test_of_interrupted_turns_only_the_last_one_keeps_what_it_has_read(llama: Path) -> None:
    llm, text = new_llm(llama), text_of(6 * GRID)
    chat, kept = llm.chat(text), []

    def interrupt(piece: str) -> None:
        raise KeyboardInterrupt

    for number in range(4):
        with pytest.raises(KeyboardInterrupt):
            chat.ask(f"{number} {text_of(3 * GRID)}", on_text=interrupt)
        llm.loop.step()
        kept.append(llm.loop.pages.tree.num_pages)
    assert kept[0] > 6 * GRID // 16
    assert set(kept) == {kept[0]}
    chat.ask("Which mill?", max_new_tokens=3)
    with pytest.raises(KeyboardInterrupt):
        chat.ask(text, on_text=interrupt)
    assert chat.ask("How many sacks?", max_new_tokens=3).new_prompt_tokens < 2 * GRID
    del chat
    llm.loop.step()
    assert llm.loop.pages.kv.pages.num_used == 0


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(llama: Path) -> None:
    chat = new_llm(llama).chat(text_of(300))
    first = chat.ask("Which mill?", max_new_tokens=4)

    def interrupt(piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.ask("How many sacks?", max_new_tokens=40, on_text=interrupt)
    with refused("context_length_exceeded: 4096"):
        chat.ask(text_of(5000), max_new_tokens=4)
    with refused("empty_text"):
        chat.ask("  ")
    assert chat.turns == [("Which mill?", first.text)]
    assert chat.ask("How many sacks?", max_new_tokens=4).token_ids


def test_a_chat_answers_one_turn_at_a_time(llama: Path) -> None:
    chat = new_llm(llama).chat(text_of(300))
    with refused("unavailable"):
        chat.ask("Which mill?", max_new_tokens=40, on_text=lambda piece: chat.ask("How many sacks?"))
    assert chat.turns == []


@pytest.mark.parametrize("path", ["composed", "eager"])
def test_what_the_first_turn_said_is_found_after_the_third(path: str) -> None:
    """The embedded model, sparse in every layer; each turn selects anew."""
    llm = LLM(plan="sketch:budget=128:dense_layers=none", device="cpu", path=path, chunk_size=256)
    chat = llm.chat(text_of(6000))
    assert chat.ask("The access code of the tower is 7351. What is the access code of the tower?").text == "7351"
    for question in QUESTIONS[:2]:
        chat.ask(question, max_new_tokens=8)
    answer = chat.ask("What is the access code of the tower?")
    assert answer.text == "7351"
    assert answer.decode("density") < 0.3
    assert answer.new_prompt_tokens < answer.prompt_tokens / 3
