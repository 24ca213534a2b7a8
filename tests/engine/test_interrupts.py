"""Interrupts at any time: what one thread gives up takes nothing from the others."""

from __future__ import annotations

import ctypes
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock, get_ident
from typing import Any

import pytest
from engine.loop_rows import GRID, alone, new_llm, new_row, take_steps, tokens
from engine.tiny_directory import text_of

from kvsift import LLM
from kvsift.batching.loop import Loop
from kvsift.engine.rows import RunnerRows
from kvsift.stores.page_table import PageTable

SECONDS = 4
TEXTS = [text_of(length) for length in (100, 200, 150)]
PLAN = "quest:budget=128:window=16:dense_layers=none"


class Pester:
    """Interrupts a thread at random times while it is ``busy``, each time once, as Ctrl-C would."""

    def __init__(self) -> None:
        self.busy, self.lock, self.stop, self.count, self._thread = False, Lock(), Event(), 0, get_ident()

    def run(self) -> None:
        chance = random.Random(5)
        while not self.stop.wait(chance.random() * 0.02):
            with self.lock:
                if self.busy:
                    self.busy, self.count = False, self.count + 1
                    interrupt = ctypes.py_object(KeyboardInterrupt)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), interrupt)


def ask_until(stop: Event, llm: LLM) -> list[Any]:
    """Answers, or the errors instead of them, until ``stop``."""
    answers: list[Any] = []
    while not stop.is_set():
        for number, text in enumerate(TEXTS):
            try:
                answers.append((number, llm.generate(text, max_new_tokens=8).token_ids))
            except RuntimeError as error:  # of a token that the other thread was choosing
                answers.append(str(error))
    return answers


def give_up_until(end: float, pester: Pester, llm: LLM) -> None:
    while time.monotonic() < end:
        try:
            pester.busy = True
            llm.generate(TEXTS[0], max_new_tokens=8)
            with pester.lock:  # an interrupt that is on its way arrives here
                pester.busy = False
        except KeyboardInterrupt:
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # some arrive in finalizers
def test_a_thread_that_is_interrupted_leaves_no_lock_taken_and_no_answer_changed(llama: Path) -> None:
    """With locks of Python, one of some ten to a thousand interrupts left the others waiting for ever."""
    llm = LLM(llama, PLAN, device="cpu", chunk_size=GRID, dtype="float32", keep_tokens=4 * GRID)
    expected = [(number, llm.generate(text, max_new_tokens=8).token_ids) for number, text in enumerate(TEXTS)]
    pester = Pester()
    threads = ThreadPoolExecutor(2)
    try:
        pestering, asking = threads.submit(pester.run), threads.submit(ask_until, pester.stop, llm)
        give_up_until(time.monotonic() + SECONDS, pester, llm)
    finally:
        pester.stop.set()
    answers = asking.result(timeout=60)
    pestering.result(timeout=60)
    threads.shutdown()
    assert pester.count > 20
    told = [answer for answer in answers if isinstance(answer, str)]
    assert all("was interrupted (KeyboardInterrupt)" in error for error in told)
    assert {answer[0]: answer for answer in answers if not isinstance(answer, str)} == dict(enumerate(expected))
    assert all(answer in expected for answer in answers if not isinstance(answer, str))
    llm.loop.check()
    assert llm.loop.rows == []
    assert not any(node.users for node in llm.loop.tree._nodes.values()), "prompts are held for nobody"


@pytest.mark.parametrize("path", ["composed", "eager"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (RunnerRows, "open"),  # a row is admitted
        (RunnerRows, "groups"),
        (Loop, "_look_again"),  # its prompt is read
        (PageTable, "close"),  # it has ended
        (Loop, "_trim"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_row_goes_on_whose_step_another_thread_gave_up(
    is_late: bool, owner: Any, name: str, path: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [tokens(alone(new_llm(llama, path), text, PLAN)) for text in TEXTS]
    llm, interrupts = new_llm(llama, path), [KeyboardInterrupt()]
    rows = [new_row(llm, text, PLAN) for text in TEXTS]
    for row in rows:
        llm.loop.submit(row)
    original = getattr(owner, name)

    def interrupted(*arguments: Any) -> Any:
        result = original(*arguments) if is_late else None
        if interrupts:
            raise interrupts.pop()
        return result if is_late else original(*arguments)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        take_steps(llm, rows)
    take_steps(llm, rows)
    assert [row.error for row in rows] == [None] * 3
    assert [tokens(row) for row in rows] == expected
