"""The thread of the engine: what it starts with, what ends it, and what never reaches it."""

import gc
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import stories
import torch
from engine.tiny_directory import text_of
from refusals import refused

from kvsift import LLM
from kvsift.engine.schedule import Schedule

PLAN = "quest:budget=128:window=16:dense_layers=none"
INTERRUPTS = int(60 * float(os.environ.get("KVSIFT_EXAMPLES", "1")))


def new_llm(directory: Path, **options: Any) -> LLM:
    return LLM(directory, PLAN, device="cpu", chunk_size=64, dtype="float32", **options)


def engines() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvsift engine"]


def run(directory: Path, story: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Let a process of its own run a program that begins with an LLM."""
    begin = f"""
        import os, random, signal, sys, threading, time
        from kvsift import LLM, InputError
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background process is without
        TEXT = {text_of(300)!r}
        llm = LLM({str(directory)!r}, {PLAN!r}, device="cpu", chunk_size=64, dtype="float32")
    """
    return stories.run(dedent(begin) + dedent(story), *arguments)


def test_ctrl_c_at_any_moment_ends_the_own_answer_alone(llama: Path) -> None:
    """Real signals, beside the answers of another thread: those stay, no page is lost and no thread is left."""
    done = run(
        llama,
        """
        import gc
        document, chat = llm.read(TEXT), llm.chat(TEXT)
        actions = [
            lambda: llm.generate(TEXT, max_new_tokens=12),
            lambda: document.ask("Which mill?", max_new_tokens=12),
            lambda: list(llm.stream(TEXT, max_new_tokens=12)),
            lambda: chat.ask("How many sacks?", max_new_tokens=12),
            lambda: llm.generate([TEXT, TEXT[50:]], max_new_tokens=12),
        ]
        for action in actions:
            action()
        expected, others, stop = llm.generate("Another text.", max_new_tokens=9).token_ids, [], threading.Event()

        def ask():
            while not stop.is_set():
                try:
                    others.append(llm.generate("Another text.", max_new_tokens=9).token_ids)
                except BaseException as error:
                    others.append(repr(error))

        other, chance, count = threading.Thread(target=ask), random.Random(1), 0
        other.start()
        before = threading.active_count()
        for number in range(int(sys.argv[1])):
            def interrupt(delay=chance.random() * 0.04):
                time.sleep(delay)
                os.kill(os.getpid(), signal.SIGINT)
            pester = threading.Thread(target=interrupt)
            try:
                pester.start()
                actions[number % len(actions)]()
                pester.join()
                time.sleep(0.01)
            except KeyboardInterrupt:
                count += 1
            pester.join()
        stop.set()
        other.join()
        assert count > int(sys.argv[1]) / 2, count
        assert len(others) > 5 and all(each == expected for each in others), others
        chat.turns = []
        del actions, chat, document, action
        gc.collect()
        llm.loop.check()
        assert llm.loop.seqs == [], llm.loop.seqs
        assert not any(node.users for node in llm.loop.pages.tree._nodes.values())
        assert threading.active_count() == before - 1
        llm.close()
        assert threading.active_count() == before - 2
        print("done")
        """,
        str(INTERRUPTS),
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-3000:]


def test_a_forked_process_is_told_that_it_has_no_engine(llama: Path) -> None:
    done = run(
        llama,
        """
        llm.generate("One.", max_new_tokens=2)
        if (child := os.fork()) == 0:
            try:
                llm.generate("One.", max_new_tokens=2)
            except InputError as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(len(llm.generate("One.", max_new_tokens=2).token_ids))
        """,
    )
    assert "which a forked process does not have" in done.stdout
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "2"), done.stderr[-2000:]


def test_a_process_forked_before_the_first_request_has_an_engine_of_its_own(llama: Path) -> None:
    done = run(
        llama,
        """
        child = os.fork()
        os.write(1, b"%d\\n" % len(llm.generate("One.", max_new_tokens=2).token_ids))  # whole, beside the other
        if child:
            os.waitpid(child, 0)
        """,
    )
    assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.stderr[-2000:]


@pytest.mark.parametrize("way", ["end", "exit", "error"])
def test_a_process_ends_while_answers_are_generated(way: str, llama: Path) -> None:
    endings = {"end": "", "exit": "sys.exit(3)", "error": "raise ValueError"}
    done = run(
        llama,
        f"""
        stream = llm.stream(TEXT, max_new_tokens=3000)
        next(stream)
        threading.Thread(target=lambda: llm.generate(TEXT, max_new_tokens=3000), daemon=True).start()
        time.sleep(0.1)
        {endings[way]}
        """,
    )
    assert done.returncode == {"end": 0, "exit": 3, "error": 1}[way], done.stderr[-2000:]
    assert "Fatal" not in done.stderr


def test_a_fault_of_the_engine_reaches_everyone_who_waits_with_its_cause(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, documents = new_llm(llama), []
    expected = llm.generate(text_of(100), max_new_tokens=6).token_ids
    documents = [llm.read(text_of(200)) for _ in range(2)]
    answers = [document.ask("Which?", max_new_tokens=6).token_ids for document in documents]
    decide, steps = Schedule.decide, list[int]()

    def fails(schedule: Schedule, room: int) -> Any:
        steps.append(room)
        if len(steps) == 6:
            raise ZeroDivisionError("a fault")
        return decide(schedule, room)

    monkeypatch.setattr(Schedule, "decide", fails)
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(llm.generate, text_of(120 + number), max_new_tokens=40) for number in range(3)]
        errors = [each.exception(timeout=60) for each in waiting]
    assert {type(error.__cause__) for error in errors if error is not None} == {ZeroDivisionError}
    assert len(errors) == 3
    assert llm.generate(text_of(100), max_new_tokens=6).token_ids == expected
    assert [document.ask("Which?", max_new_tokens=6).token_ids for document in documents] == answers
    llm.loop.check()


def test_a_document_that_waits_to_be_saved_is_told_of_a_fault(llama: Path, tmp_path: Path) -> None:
    llm = new_llm(llama)
    document = llm.read(text_of(200))
    document.ask("Which?", max_new_tokens=2)
    fails = threading.Event()

    def fault() -> None:
        if fails.is_set():
            raise ZeroDivisionError("a fault")
        time.sleep(0.005)  # the answer takes ten seconds: it does not end before the other thread is there

    llm.loop.after_step = fault
    with ThreadPoolExecutor(2) as threads:
        asked = threads.submit(document.ask, "Which?", max_new_tokens=2000)
        while not llm.loop.seqs:
            time.sleep(0.001)
        saved = threads.submit(document.save, tmp_path / "document.kvsift")
        [prefix] = llm.loop.pages.pinned
        while not prefix._waiting and not saved.done():
            time.sleep(0.001)
        fails.set()
        assert isinstance(asked.exception(timeout=60), RuntimeError)
        with refused("evicted_tokens"):
            saved.result(timeout=60)
    llm.loop.after_step = lambda: None
    assert document.ask("Which?", max_new_tokens=2).token_ids
    document.save(tmp_path / "document.kvsift")


def test_a_closed_llm_refuses_and_its_answers_have_ended(llama: Path, tmp_path: Path) -> None:
    with new_llm(llama) as llm:
        stream = llm.stream(text_of(100), max_new_tokens=3000)
        pieces = [next(stream)]
        count = len(engines())
    assert len(engines()) == count - 1
    with refused("unavailable"):
        pieces.extend(stream)
    assert len(pieces) < 3000
    for ask in (partial(llm.generate, "One."), partial(llm.read, "One."), partial(llm.open, tmp_path)):
        with refused("unavailable"):
            ask()
    llm.close()


def test_llms_that_are_made_and_dropped_leave_no_thread_no_file_and_no_memory(llama: Path) -> None:
    def ask() -> None:
        llm = new_llm(llama)
        document = llm.read(text_of(100))
        assert document.ask("Which?", max_new_tokens=3).token_ids
        assert llm.generate("One.", max_new_tokens=3).token_ids

    def measured() -> tuple[int, int, int]:
        deadline = time.monotonic() + 10
        while gc.collect() + len(engines()) > before and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread that is at work keeps its engine
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return len(engines()), len(os.listdir("/proc/self/fd")), resident

    before = len(engines())
    for _ in range(5):
        ask()
    first = measured()
    for _ in range(20):
        ask()
    last = measured()
    assert last[0] <= first[0] <= before
    assert last[1] <= first[1]
    assert last[2] - first[2] < 30e6


def test_what_a_thread_has_set_for_torch_does_not_reach_the_engine_but_its_number_of_threads_does(llama: Path) -> None:
    expected = new_llm(llama).generate(text_of(100), max_new_tokens=6).token_ids
    number = torch.get_num_threads()
    llm = new_llm(llama)
    llm.load()
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            assert llm.generate(text_of(100), max_new_tokens=6).token_ids == expected
        torch.set_num_threads(number + 1)
        assert llm.generate(text_of(100), max_new_tokens=6).token_ids == expected
        assert llm.loop.call(torch.get_num_threads) == number + 1
    finally:
        torch.set_num_threads(number)
