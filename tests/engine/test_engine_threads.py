"""Threads that share an LLM or a document: everyone gets the answer to the own question."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any

import pytest
from engine.tiny_directory import text_of
from turns import in_turns

from kvsift import LLM
from kvsift.api.answer import Answer
from kvsift.engine import loop

BUDGET = "budget=128:window=16:dense_layers=none"
QUEST = f"quest:{BUDGET}"
PLANS = (
    QUEST,
    f"prefill=quoka:{BUDGET}:chunk=64,decode={QUEST}",
    f"infinigen:{BUDGET}",
    f"h2o:{BUDGET}:evict=true",
    "retrieval_attention:budget=128:sinks=4:window=16:dense_layers=none",
)
QUESTIONS = [f"Which of the {count} mills grinds the least corn in a day?" for count in range(8)]


def facts(answer: Answer) -> tuple[Any, ...]:
    return answer.token_ids, answer.prompt_tokens, answer.decode("visible_tokens")


def together(tasks: list[Callable[[], Answer]], rounds: int = 2) -> list[list[tuple[Any, ...]]]:
    start = Barrier(len(tasks))

    def run(task: Callable[[], Answer]) -> list[tuple[Any, ...]]:
        start.wait()
        return [facts(task()) for _ in range(rounds)]

    with ThreadPoolExecutor(len(tasks)) as threads:
        return list(threads.map(run, tasks))


@pytest.mark.parametrize("path", ["auto", "eager", "composed"])
def test_threads_that_ask_one_document_get_their_own_answers(path: str, llama: Path) -> None:
    text = text_of(700)
    plans = (QUEST, f"streaming_llm:{BUDGET.replace('window=16:', '')}")
    single, llm = LLM(llama, path=path), LLM(llama, path=path)
    alone, document = single.read(text), llm.read(text)
    asks = [(question, plans[number % 2]) for number, question in enumerate(QUESTIONS)]
    expected = [facts(alone.ask(question, plan=plan, max_new_tokens=30)) for question, plan in asks]
    used, loop, decoding = single.loop.pages.kv.pages.num_used, llm.loop, list[int]()
    loop.after_step = lambda: decoding.append(loop.counts()["sequences"]["decoding"])
    answers = together([lambda ask=ask: document.ask(ask[0], plan=ask[1], max_new_tokens=30) for ask in asks])
    assert answers == [[each] * 2 for each in expected]
    assert max(decoding) > 1, "one after the other"
    loop.check()
    assert loop.pages.kv.pages.num_used <= used + 2, "copies of its cache share its full pages"


@pytest.mark.parametrize(("plan", "path"), in_turns(PLANS, ["auto", "eager", "composed"]))
def test_threads_that_generate_with_one_model_get_their_own_answers(plan: str, path: str, llama: Path) -> None:
    texts, llm = [text_of(length) for length in (150, 400, 600)], LLM(llama, plan, path=path)
    expected = [facts(llm.generate(text, max_new_tokens=8)) for text in texts]
    answers = together([lambda text=text: llm.generate(text, max_new_tokens=8) for text in texts])
    assert answers == [[each] * 2 for each in expected]


def test_threads_that_load_one_model_load_it_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, loaded = LLM(llama), []
    load = type(llm.directory).load
    monkeypatch.setattr(type(llm.directory), "load", lambda *args: loaded.append(1) or load(*args))
    together([lambda: llm.generate("One.", max_new_tokens=2)] * 4, rounds=1)
    assert len(loaded) == 1


def test_a_document_is_asked_while_it_answers(llama: Path) -> None:
    document = LLM(llama, QUEST).read(text_of(700))
    expected, others = [facts(document.ask(question, max_new_tokens=8)) for question in QUESTIONS[:2]], list[Any]()
    asks = iter([lambda: facts(document.ask(QUESTIONS[1], max_new_tokens=8))])

    def on_text(piece: str) -> None:
        others.extend(ask() for ask in asks)

    assert facts(document.ask(QUESTIONS[0], max_new_tokens=8, on_text=on_text)) == expected[0]
    assert others == [expected[1]]
    assert facts(document.ask(QUESTIONS[0], max_new_tokens=8)) == expected[0]


def test_a_stream_is_closed_while_another_thread_waits_for_its_pieces(llama: Path) -> None:
    llm, pieces, begun = LLM(llama, QUEST), list[str](), Event()
    stream = llm.stream(text_of(200), max_new_tokens=3000)

    def read() -> None:
        for piece in stream:
            pieces.append(piece)
            begun.set()

    thread = Thread(target=read)
    thread.start()
    assert begun.wait(60)
    stream.close()
    thread.join(60)
    assert not thread.is_alive()
    llm.loop.step()
    assert llm.loop.seqs == []
    assert 0 < len(pieces) < 3000


def test_more_prompts_than_fit_the_queue_wait_for_it(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, prompts = LLM(llama, QUEST), [text_of(40 + size) for size in range(12)]
    expected = [facts(answer) for answer in llm.generate(prompts, max_new_tokens=2)]
    monkeypatch.setattr(loop, "MOST_OPEN", 2)
    assert [facts(answer) for answer in llm.generate(prompts, max_new_tokens=2)] == expected
