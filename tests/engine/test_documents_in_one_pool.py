"""Documents of one LLM share its pool of pages: what each answers, and what goes back."""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from time import sleep
from typing import Any

import pytest
from engine.tiny_directory import text_of

from kvsift import LLM, native
from kvsift.engine.executor import Executor

QUEST = "quest:budget=128:window=32:dense_layers=0"
QUESTIONS = ["How many sacks?", "Which mill grinds?"]


def test_a_document_that_was_given_pages_of_another_size_keeps_no_others(llama: Path) -> None:
    llm = LLM(llama, "dense")
    other = llm.read(text_of(200))
    other.ask(QUESTIONS[0], max_new_tokens=2)
    used = llm.loop.pages.kv.pages.num_used
    document = llm.read(text_of(400))
    for plan in ("dense", QUEST + ":page_size=32", "dense"):
        document.ask(QUESTIONS[0], max_new_tokens=2, plan=plan)
        llm.loop.check()
    assert document.ask(QUESTIONS[0], max_new_tokens=2, plan=QUEST + ":page_size=32").token_ids
    llm.loop.check()
    assert llm.loop.pages.kv.pages.num_used == used
    del document
    gc.collect()
    llm.loop.step()
    llm.loop.check()


@pytest.mark.parametrize("path", ["auto", "eager"])
def test_documents_a_chat_and_prompts_are_decoded_in_one_step(
    path: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four threads; every answer is as alone, and some step decodes all of them."""
    texts, count = [text_of(300), text_of(180), text_of(90)], 300 if path == "auto" else 24
    options: dict[str, Any] = {"dense_below": 0, "path": path, "deterministic": True, "dtype": "float32"}

    def tasks(llm: LLM) -> list[Callable[[], list[int]]]:
        documents, chat = [llm.read(text) for text in texts[:2]], llm.chat(texts[2])
        asks = [lambda each=each: each.ask(QUESTIONS[0], max_new_tokens=count).token_ids for each in documents]
        return [
            *asks,
            lambda: chat.ask(QUESTIONS[1], max_new_tokens=count).token_ids,
            lambda: [
                token
                for answer in llm.generate([text_of(50), text_of(70)], max_new_tokens=count)
                for token in answer.token_ids
            ],
        ]

    expected = [task() for task in tasks(LLM(llama, QUEST, **options))]
    llm, together, start = LLM(llama, QUEST, **options), list[int](), Barrier(4)
    step = Executor.decode_sequences

    def watched(executor: Executor, seqs: Any) -> Any:
        together.append(len(seqs))
        if max(together) < 5:
            sleep(0.005)  # or an answer ends before a thread of a busy machine has asked
        return step(executor, seqs)

    monkeypatch.setattr(Executor, "decode_sequences", watched)

    def run(task: Callable[[], list[int]]) -> list[int]:
        start.wait()
        return task()

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(run, tasks(llm)))
    assert answers == expected
    if path == "eager" or native.available():
        assert max(together) == 5
    llm.loop.check()
