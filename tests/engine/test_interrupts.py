"""Interrupts at any time: what one thread gives up takes nothing from the others."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event, Lock, get_ident
from typing import Any

import pytest
from engine.loop_rows import GRID, alone, counters, new_llm, new_row, take_steps, tokens
from engine.tiny_directory import text_of

from kvsift import LLM
from kvsift.batching.loop import Loop
from kvsift.batching.prefix_tree import PrefixTree
from kvsift.batching.schedule import Schedule
from kvsift.batching.waiting import WaitingQueue
from kvsift.engine.block_groups import BlockGroup
from kvsift.engine.captured_rows import CapturedRows
from kvsift.engine.row_groups import Group, PoolSession, RowGroup
from kvsift.engine.rows import RunnerRows
from kvsift.stores.page_pool import PagePool
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


@pytest.fixture(scope="module")
def expected(llama: Path) -> dict[str, list[list[int]]]:
    """The answer to each of the texts on each path, alone and undisturbed."""
    return {path: [tokens(alone(new_llm(llama, path), text, PLAN)) for text in TEXTS] for path in ("composed", "eager")}


@pytest.mark.parametrize("path", ["composed", "eager"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (RunnerRows, "open"),  # a row is admitted
        (RunnerRows, "groups"),
        (PoolSession, "need"),  # it joins others
        (Loop, "_look_again"),  # its prompt is read
        (PageTable, "close"),  # it has ended
        (PagePool, "_free"),
        (PagePool, "_remove"),
        (Loop, "_trim"),
        (WaitingQueue, "_delete"),  # it leaves the line
        (WaitingQueue, "_settle"),
        (Schedule, "has_read"),
        (Schedule, "remove"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_row_goes_on_whose_step_another_thread_gave_up(
    is_late: bool,
    owner: Any,
    name: str,
    path: str,
    llama: Path,
    expected: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if owner is PoolSession and path == "composed":
        pytest.skip("composed steps have no groups to join")
    llm, interrupts = new_llm(llama, path), [KeyboardInterrupt()]
    rows = [new_row(llm, text, PLAN) for text in TEXTS]
    for row in rows:
        llm.loop.submit(row)
    original = getattr(owner, name)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options) if is_late else None
        if interrupts:
            raise interrupts.pop()
        return result if is_late else original(*arguments, **options)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        take_steps(llm, rows)
    take_steps(llm, rows)
    assert [row.error for row in rows] == [None] * 3
    assert [tokens(row) for row in rows] == expected[path]
    assert not any(group.rows for group in llm.loop._model._groups)  # type: ignore[attr-defined]


class Interrupted(dict[Any, Any]):
    """A dictionary from which, while there are interrupts, what is taken is gone before the caller has it."""

    def __init__(self, entries: dict[Any, Any], interrupts: list[KeyboardInterrupt]) -> None:
        super().__init__(entries)
        self.interrupts = interrupts

    def pop(self, *arguments: Any) -> Any:
        entry = super().pop(*arguments)
        if self.interrupts:
            raise self.interrupts.pop()
        return entry


@pytest.mark.parametrize("when", ["before", "counted", "gone"])
@pytest.mark.parametrize(("kind", "plan"), [(RowGroup, PLAN), (BlockGroup, "dense")])
def test_a_row_that_leaves_its_group_again_has_its_answer(
    kind: type[Group[Any]], plan: str, when: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"deterministic": kind is BlockGroup}
    expected = [alone(new_llm(llama, "eager", **options), text, plan) for text in TEXTS]
    llm, interrupts = new_llm(llama, "eager", **options), [KeyboardInterrupt()]
    rows = [new_row(llm, text, plan) for text in TEXTS]
    for row in rows:
        llm.loop.submit(row)
    left: list[Any] = []
    leave = kind.leave

    def interrupted_leave(group: Any, row: Any) -> Any:
        left.append(group)
        if when == "before" and interrupts:
            raise interrupts.pop()
        if when == "gone":
            group._rows = Interrupted(group._rows, interrupts)
        return leave(group, row)

    monkeypatch.setattr(kind, "leave", interrupted_leave)
    if when == "counted":
        end = kind._end

        def interrupted_end(*arguments: Any) -> Any:
            result = end(*arguments)
            if interrupts:
                raise interrupts.pop()
            return result

        monkeypatch.setattr(kind, "_end", interrupted_end)
    with pytest.raises(KeyboardInterrupt):
        take_steps(llm, rows)
    take_steps(llm, rows)
    assert [row.error for row in rows] == [None] * 3
    assert [tokens(row) for row in rows] == list(map(tokens, expected))
    assert counters(rows[0]) == counters(expected[0]), "the row that left is counted once"
    assert {type(group) for group in left} == {kind}
    assert not any(group.rows for group in left)
    assert not any(row.steps for row in rows)


@pytest.mark.parametrize(("kind", "plan"), [(RowGroup, PLAN), (BlockGroup, "dense")])
def test_a_step_that_is_taken_again_is_counted_once(
    kind: type[Group[Any]], plan: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"deterministic": kind is BlockGroup, "dense_below": 0}
    expected = [alone(new_llm(llama, "eager", **options), text, plan) for text in TEXTS]
    assert (counters(expected[1])["sparse_queries"] > 0) == (kind is RowGroup)
    llm, steps, original = new_llm(llama, "eager", **options), list[Any](), kind.step
    rows = [new_row(llm, text, plan) for text in TEXTS]
    for row in rows:
        llm.loop.submit(row)

    def interrupted(*arguments: Any) -> Any:
        steps.append(original(*arguments))
        if len(steps) == 5:
            raise KeyboardInterrupt
        return steps[-1]

    monkeypatch.setattr(kind, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        take_steps(llm, rows)
    take_steps(llm, rows)
    assert [tokens(row) for row in rows] == list(map(tokens, expected))
    assert list(map(counters, rows)) == list(map(counters, expected))


def test_an_interrupt_while_the_steps_of_a_row_are_counted_ends_no_row(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [tokens(alone(new_llm(llama), text, PLAN)) for text in TEXTS]
    llm, interrupts, leave = new_llm(llama), [KeyboardInterrupt()], CapturedRows.leave
    rows = [new_row(llm, text, PLAN) for text in TEXTS]
    for row in rows:
        llm.loop.submit(row)

    def interrupted(*arguments: Any) -> None:
        if interrupts:
            raise interrupts.pop()  # the slot of the row is not idle
        leave(*arguments)

    monkeypatch.setattr(CapturedRows, "leave", interrupted)
    with pytest.raises(KeyboardInterrupt):
        take_steps(llm, rows)
    take_steps(llm, rows)
    assert [row.error for row in rows] == [None] * 3
    assert [tokens(row) for row in rows] == expected


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("count", range(6))
@pytest.mark.parametrize("name", ["hold", "let_go", "seal"])
def test_prompts_are_held_for_rows_alone(
    name: str, count: int, is_late: bool, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that reads, finds or lets go of chunks is interrupted in turn; some prompts begin alike."""
    texts = [text_of(300), text_of(400), text_of(300)]
    llm, original, calls = new_llm(llama, keep_tokens=32 * GRID), getattr(PrefixTree, name), 0
    rows = [new_row(llm, text, PLAN, 2) for text in texts]

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*arguments) if is_late or calls != count + 1 else None
        if calls == count + 1:
            raise KeyboardInterrupt
        return result

    def repeated(act: Callable[[], object]) -> None:
        try:
            act()
        except KeyboardInterrupt:
            act()

    monkeypatch.setattr(PrefixTree, name, interrupted)
    for row in rows:
        repeated(partial(llm.loop.submit, row))
    repeated(partial(take_steps, llm, rows))
    for row in rows:
        repeated(partial(llm.loop.close, row))
    assert calls > count
    assert [row.error for row in rows] == [None] * 3
    assert not any(node.users for node in llm.loop.tree._nodes.values()), "prompts are held for nobody"
    for row, text in zip(rows, texts):
        found = llm.loop.tree.find(row.root, row.ids)
        assert len(found) >= len(text) // GRID - 1, "the last one may not be shared"
        assert [node.depth for node in found] == list(range(len(found)))
    assert len(llm.loop.tree) == len({node.name for row in rows for node in llm.loop.tree.find(row.root, row.ids)})
    llm.loop.check()
