"""Layers without pages: what begins with their snapshots answers as alone, bit for bit, and reads nothing twice."""

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.hybrids import HYBRIDS, write_hybrid
from engine.test_hybrid_steps import write_family
from engine.test_sequences import Recorded
from engine.tiny_directory import text_of
from refusals import refused

from kvsift import LLM, Sampling
from kvsift.engine.executor import Executor
from kvsift.engine.loop import Loop
from kvsift.engine.pinned_prefix import PinnedPrefix
from kvsift.engine.request import Request
from kvsift.engine.sequence import EngineSequence
from kvsift.models.hf.state_snapshot import StateSnapshot
from kvsift.plan.syntax import parse_plan

GRID = 32
PLANS = ["quest:budget=64:window=16:dense_layers=none", "dense", "sketch:budget=64:window=16:dense_layers=none"]
HISTORIES = int(8 * float(os.environ.get("KVSIFT_EXAMPLES", "1")))
QUESTIONS = ["How many sacks of corn?", "Which of the mills by the river grinds the least corn?"]


def new_llm(directory: Path, **options: Any) -> LLM:
    settings = {"device": "cpu", "chunk_size": GRID, "dtype": "float32", "dense_below": 0}
    return LLM(directory, "dense", **{**settings, **options})


def new_sequence(ids: list[int], plan: str = PLANS[0], num_tokens: int = 4, **options: Any) -> EngineSequence:
    return EngineSequence(Request(ids, num_tokens, parse_plan(plan)), Recorded(num_tokens), **options)


def run(llm: LLM, *seqs: EngineSequence, after_step: Callable[[], object] = lambda: None) -> EngineSequence:
    for seq in seqs:
        llm.loop.submit(seq)
    while not all(seq.is_ended for seq in seqs):
        llm.loop.step()
        llm.loop.check()
        after_step()
    for seq in seqs:
        llm.loop.close(seq)
    return seqs[-1]


def assert_equal(seq: EngineSequence, other: EngineSequence) -> None:
    assert seq.error is None
    assert seq.output.tokens == other.output.tokens
    assert all(torch.equal(one, two) for one, two in zip(seq.output.logits, other.output.logits, strict=True))


@pytest.fixture(scope="module", params=HYBRIDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", params=["Qwen3Next", "FalconH1", "Gemma3"])
def one_of_each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States alone, beside pages in one layer, and windows."""
    return write_hybrid(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def delta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("delta"), "Qwen3Next")


def test_prompts_that_share_a_prefix_answer_as_alone(directory: Path) -> None:
    texts = list(text_of(150).encode()), list(text_of(150)[:100].encode() + b"x" * 40), list(b"y" * 70)
    alone = [run(new_llm(directory), new_sequence(ids)) for ids in texts]
    llm = new_llm(directory, keep_tokens=10_000)
    reused = [0, 3 * GRID, 0, 4 * GRID, 4 * GRID, 2 * GRID]
    for ids, expected, length in zip([*texts, *texts], [*alone, *alone], reused):
        assert_equal(seq := run(llm, new_sequence(ids)), expected)
        assert (seq.num_reused, seq.no_reuse) == (length, "")
    together = [new_sequence(ids) for ids in texts]
    run(new_llm(directory), *together)
    for seq, expected in zip(together, alone):
        assert_equal(seq, expected)


def test_documents_are_read_once_and_saved_and_opened(directory: Path, tmp_path: Path) -> None:
    llm, plan = new_llm(directory), PLANS[0]
    fed, feed = list[int](), llm.feed

    def counting(cache: Any, ids: Any, *args: Any, **options: Any) -> Any:
        fed.append(len(ids))
        return feed(cache, ids, *args, **options)

    llm.feed = counting  # type: ignore[method-assign]
    document = llm.read(text_of(333), plan=plan)
    options: dict[str, Any] = {"max_new_tokens": 5, "logprobs": 3}
    alone = [document.ask(question, **options) for question in QUESTIONS]
    assert sum(fed) > document.num_tokens
    fed.clear()
    again = [document.ask(question, **options) for question in QUESTIONS]
    steps = [0 if answer.path == "native" else min(len(answer.token_ids), 4) for answer in again]  # by modules
    new = [answer.prompt_tokens - document.num_tokens + count for answer, count in zip(again, steps, strict=True)]
    assert sum(fed) == sum(new), "no second prefill"
    with ThreadPoolExecutor(4) as pool:  # in copies, side by side
        again += pool.map(lambda question: document.ask(question, **options), QUESTIONS * 2)
    document.save(tmp_path / "document")
    fed.clear()
    opened = new_llm(directory).open(tmp_path / "document", plan=plan)
    again += [opened.ask(question, **options) for question in QUESTIONS]
    for answer, expected in zip(again, alone * 4):
        assert answer.token_ids == expected.token_ids
        assert answer.logprobs == expected.logprobs
    assert llm.loop.counts()["state_bytes"]["pinned"] > 0
    document = llm.read("another one")
    llm.loop.step()
    assert llm.loop.counts()["state_bytes"] == {"kept": 0, "pinned": 0}


def test_turns_of_a_chat_begin_with_what_was_read(one_of_each: Path) -> None:
    llm = new_llm(one_of_each)
    chat = llm.chat(text_of(200), plan=PLANS[2])
    for question in QUESTIONS * 2:
        answer = chat.ask(question, max_new_tokens=6)
        other = new_llm(one_of_each).chat(text_of(200), plan=PLANS[2])
        other.turns = chat.turns[:-1]
        assert other.ask(question, max_new_tokens=6).token_ids == answer.token_ids
    assert answer.new_prompt_tokens < 2 * GRID + 80
    assert answer.no_reuse == ""


@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3Next", "Gemma3"])
def test_captured_steps_begin_with_states(family: str, tmp_path: Path) -> None:
    directory = write_family(tmp_path, family)
    one, llm = (new_llm(directory, path=path, keep_tokens=10_000) for path in ("composed", "eager"))
    options: dict[str, Any] = {"plan": PLANS[0], "max_new_tokens": 9}
    for text in (text_of(150), text_of(100) + "x" * 50, text_of(150)):
        answer = llm.generate(text, **options)
        assert answer.token_ids == one.generate(text, **options).token_ids
        assert answer.path == "eager"
    assert answer.new_prompt_tokens < GRID
    document, other = llm.read(text_of(200)), one.read(text_of(200))
    expected = [other.ask(question, **options).token_ids for question in QUESTIONS]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda question: document.ask(question, **options).token_ids, QUESTIONS * 3))
    assert found == expected * 3
    llm.loop.check()


@pytest.mark.usefixtures("eager_pace")
def test_exact_answers_are_those_of_dense_decoding(one_of_each: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, drafts, rng = new_llm(one_of_each), Executor._drafts, random.Random(1)

    def spoiled(*arguments: Any) -> list[int]:
        return [max(token - (rng.random() < 0.3), 0) for token in drafts(*arguments)]

    monkeypatch.setattr(Executor, "_drafts", spoiled)
    document, options = llm.read(text_of(150)), {"max_new_tokens": 24, "logprobs": 4}
    for plan, sampling in [(PLANS[0], None), (PLANS[2], Sampling(0.9, seed=3))]:
        dense, exact = (
            document.ask(QUESTIONS[0], plan=each, sampling=sampling, exact=each is plan, **options)
            for each in ("dense", plan)
        )
        assert exact.token_ids == dense.token_ids
        found, expected = ([each.logprob for each in answer.logprobs] for answer in (exact, dense))
        assert found == pytest.approx(expected, abs=1e-5)
        assert exact.exact["drafted"] > 8
        assert 0 < exact.exact["drafts_accepted"] < exact.exact["drafted"], "some are taken back"


def test_exact_answers_by_modules_are_refused_in_16_bits(delta: Path) -> None:
    with refused("unsupported_plan: Give dtype=float32"):
        new_llm(delta, dtype="bfloat16").generate("a", plan=PLANS[0], exact=True)


@pytest.mark.parametrize("family", ["Qwen3Next", "Gemma3"])
def test_prompts_that_part_anywhere_in_a_chunk(family: str, tmp_path: Path) -> None:
    directory, base, grid = write_hybrid(tmp_path, family), list(text_of(100).encode()), 16
    one, llm = new_llm(directory, chunk_size=grid), new_llm(directory, keep_tokens=100_000, chunk_size=grid)
    run(llm, new_sequence(base))
    for cut in range(3 * grid, 4 * grid + 1):
        ids = [*base[:cut], *b"#" * 9]
        seq, again = (run(llm, new_sequence(ids, num_tokens=2)) for _ in range(2))
        alone = run(one, new_sequence(ids, num_tokens=2))
        assert_equal(seq, alone)
        assert_equal(again, alone)
        assert seq.num_reused <= cut
        assert again.num_reused == (cut + 8) // grid * grid


def test_a_long_prompt_keeps_few_states_and_others_read_little_again(delta: Path) -> None:
    llm = new_llm(delta, keep_tokens=100_000)
    base, tree = list(text_of(40 * GRID + 1).encode()), llm.loop.pages.tree
    run(llm, new_sequence(base, num_tokens=1))
    kept = [number for number, node in enumerate(tree._nodes.values(), 1) if node.state is not None]
    assert kept == [16, 32, 36, 38, 39, 40]
    for chunks in range(1, 40):
        found = tree.find(llm.loop._executor.root(new_sequence(base)), base[: chunks * GRID])
        assert chunks - len(found) < 2 * (40 - chunks)
    seq = new_sequence([*base[: 20 * GRID], *b"z" * 50])
    run(llm, seq)
    assert run(llm, new_sequence([*base[: 20 * GRID], *b"!" * 50])).num_reused == 20 * GRID, "there prompts part"


def test_states_never_take_more_bytes_than_allowed(delta: Path) -> None:
    llm = new_llm(delta, keep_tokens=100_000)
    run(llm, new_sequence(list(text_of(GRID + 1).encode())))
    size = llm.loop.counts()["state_bytes"]["kept"]
    for allowed, kept in [(0, 0), (size - 1, 0), (size, 1), (3 * size + 1, 3)]:
        llm = new_llm(delta, keep_tokens=100_000, state_bytes=allowed)
        for letter in b"abcd":
            first = new_sequence([letter] * (2 * GRID + 9))
            run(llm, first, after_step=lambda llm=llm, most=allowed: _check_bytes(llm, most))
        counts = llm.loop.counts()
        assert counts["state_bytes"]["kept"] == kept * size
        assert ("state_bytes=" in first.no_reuse) == (not kept)
        again = run(llm, new_sequence([letter] * (2 * GRID + 9)))
        assert again.num_reused == (2 * GRID if kept else 0)
        assert_equal(again, first)
        if not kept:
            assert counts["pages"]["kept"] == 0, "pages without a state are of no use"


def _check_bytes(llm: LLM, most: int) -> None:
    tree = llm.loop.pages.tree
    states = [node.state for node in tree._nodes.values() if node.state is not None]
    assert tree.num_state_bytes == sum(state.num_bytes for state in states) <= most


def test_a_chunk_without_memory_is_read_again(delta: Path) -> None:
    ids = list(text_of(5 * GRID).encode())
    alone, llm = run(new_llm(delta), new_sequence(ids)), new_llm(delta, keep_tokens=10_000)
    run(llm, new_sequence(list(b"z" * 200)))
    feed, failures = llm.feed, [torch.OutOfMemoryError("no memory")]

    def short_of_memory(cache: Any, *args: Any, **options: Any) -> Any:
        logits = feed(cache, *args, **options)
        if failures and cache.get_seq_length() == 3 * GRID:
            raise failures.pop()
        return logits

    llm.feed = short_of_memory  # type: ignore[method-assign]
    assert_equal(run(llm, new_sequence(ids)), alone)
    assert failures == []


def test_attention_cannot_begin_without_the_states(delta: Path) -> None:
    llm = new_llm(delta, keep_tokens=10_000)
    run(llm, seq := new_sequence(list(text_of(100).encode())))
    assert seq.num_cached == 103
    for node in llm.loop.pages.tree._nodes.values():
        if node.state is not None:
            node.state = StateSnapshot(node.state.length, {}, node.state.device)
    again = run(llm, new_sequence(list(text_of(100).encode())))
    assert isinstance(again.error, AssertionError)
    assert again.output.tokens == []


class History:
    """Requests of one LLM that share prefixes, and what each answers alone."""

    def __init__(self, llm: LLM, one: LLM, rng: random.Random, expected: dict[Any, EngineSequence]) -> None:
        self.llm, self.one, self.rng, self.expected = llm, one, rng, expected
        self.prompts = [list(text_of(rng.choice([40, 99, 170])).encode())]
        self.pinned: list[tuple[list[int], PinnedPrefix]] = []
        self.seqs: list[tuple[EngineSequence, Any]] = []

    def act(self) -> None:
        rng, tree = self.rng, self.llm.loop.pages.tree
        kind = rng.random()
        if kind < 0.1 and len(self.seqs) < 9:
            self._submit()
        elif kind < 0.13 and self.seqs:
            self.llm.loop.cancel(rng.choice(self.seqs)[0])
        elif kind < 0.16:
            tree.drop(rng.randrange(8), self.llm.loop.clock())
        elif kind < 0.2:
            states = [node for node in tree._nodes.values() if node.state is not None and not node.users]
            if states:
                tree._drop_state(rng.choice(states))
        elif kind < 0.22 and self.pinned:
            self.pinned.pop(rng.randrange(len(self.pinned)))

    def _submit(self) -> None:
        rng, plan, count = self.rng, self.rng.choice(PLANS), self.rng.choice([1, 3, 6])
        before = rng.choice(self.prompts)
        ids = [*before[: rng.randrange(1, len(before) + 1)], *rng.choice([b"", b"?", b"ab" * 20])]
        ready = [each for each in self.pinned if each[1].cache is not None]
        if ready and rng.random() < 0.4:
            ids, prefix = rng.choice(ready)
            ids = [*ids, *rng.choice([b"What?", b"Why so? " * 5])]
            seq, name = new_sequence(ids, plan, count, prefix=prefix), (prefix.length, *ids)
        elif rng.random() < 0.3:
            prefix = PinnedPrefix(len(ids))
            self.pinned.append((ids, prefix))
            seq, name = new_sequence(ids, plan, 1, pins=prefix), ()
        else:
            seq, name = new_sequence(ids, plan, count), (0, *ids)
            self.prompts.append(ids)
        self.llm.loop.submit(seq)
        self.seqs.append((seq, (plan, count, name)))

    def check(self) -> None:
        for seq, (plan, count, name) in self.seqs:
            if seq.finish_reason == "cancelled":
                continue
            assert seq.error is None
            if name:
                assert_equal(seq, self._alone(plan, count, name))

    def _alone(self, plan: str, count: int, name: tuple[int, ...]) -> EngineSequence:
        if (key := (plan, count, name)) not in self.expected:
            length, *ids = name
            options: dict[str, Any] = {}
            if length:
                options["prefix"] = PinnedPrefix(length)
                run(self.one, new_sequence(ids[:length], plan, 1, pins=options["prefix"]))
            self.expected[key] = run(self.one, new_sequence(ids, plan, count, **options))
        return self.expected[key]


@pytest.fixture(scope="module", params=["Qwen3Next", "NemotronH", "Lfm2", "GptOss"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, LLM, dict[Any, Any]]:
    folder = write_hybrid(tmp_path_factory.mktemp("histories"), request.param)
    return new_llm(folder), new_llm(folder), {}


@pytest.mark.parametrize("seed", range(HISTORIES // 4))
def test_histories_of_prompts_documents_and_evictions(seed: int, pair: tuple[LLM, LLM, dict[Any, Any]]) -> None:
    rng, (llm, one, expected) = random.Random(seed), pair
    most_bytes = rng.choice([30_000, 90_000, 1 << 30])
    llm.loop = Loop(llm.loop._executor, GRID, rng.choice([1, 3, 8]), rng.choice([0, 300, 9999]), most_bytes)
    history = History(llm, one, rng, expected)
    while not history.seqs:
        history.act()
    for after_step in (history.act, lambda: None):
        while not all(seq.is_ended for seq, _ in history.seqs):
            llm.loop.step()
            llm.loop.check()
            _check_bytes(llm, llm.loop.pages.tree.most_state_bytes)
            after_step()
    history.check()
