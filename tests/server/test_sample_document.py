"""The sample document: its questions are answered rightly under the plan that is served by default."""

from __future__ import annotations

import pytest

import kvsift
from kvsift.server import sample_document
from kvsift.server.settings import ServerSettings


@pytest.fixture(scope="module")
def chat() -> kvsift.api.chat.Chat:
    return kvsift.LLM(plan=ServerSettings().plan, device="cpu").chat(sample_document.sample()["text"])


def test_the_sample_has_facts_questions_and_a_moderate_length() -> None:
    given = sample_document.sample()
    assert set(given) == {"name", "text", "questions", "about"}
    for fact, question, answer in sample_document.FACTS:
        assert given["text"].count(fact) == 1
        assert given["text"].count(answer) == 1
        assert question in given["questions"]


@pytest.mark.parametrize("plan", [None, "dense"])
def test_the_embedded_model_answers_the_questions(chat: kvsift.api.chat.Chat, plan: str | None) -> None:
    chat.turns.clear()
    for fact, question, answer in sample_document.FACTS:
        given = chat.ask(question, plan=plan, passages=True, max_new_tokens=32)
        assert given.text == answer
        assert 4000 < given.prompt_tokens < 8000
        start = sample_document.sample()["text"].index(fact)
        found = [share for first, stop, share in given.passages.all if first < start + len(fact) and start < stop]
        assert bool(found) == (plan is None)
