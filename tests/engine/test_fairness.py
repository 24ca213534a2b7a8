"""What a client waits for beside others, in counted chunks and steps: the bounds of ``engine.schedule``."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine.loop_sequences import (
    GRID,
    PLANS,
    QUEST,
    alone,
    assert_equal,
    counters,
    new_llm,
    new_loop,
    new_sequence,
    take_steps,
    tokens,
)
from engine.tiny_directory import text_of

from kvsift import LLM
from kvsift.engine import schedule
from kvsift.engine.graphs import sequence_groups
from kvsift.engine.sequence import EngineSequence

LONG = 3800  # tokens: 60 chunks
SHORT = "Whose mill is it?"


class Launches:
    """Chunks by client, and steps, of a loop whose chunks owe one step each."""

    def __init__(self, llm: LLM) -> None:
        loop = self.loop = llm.loop
        self.counts: Counter[str] = Counter()
        self.arriving: list[EngineSequence] = []
        self.together: list[list[EngineSequence]] = []  # sequences of each step
        self.paused: set[int] = set()  # sequences for which a step had no place
        loop.clock = lambda: 0.0
        read, decode, groups = loop._prefill, loop._decode, loop._groups

        def counted_read(seq: EngineSequence, *arguments: Any) -> None:
            if self.arriving and seq.request.client != self.arriving[0].request.client:
                self._submit()  # while this chunk runs
            self.counts[seq.request.client] += 1
            read(seq, *arguments)

        def counted_decode() -> None:
            if self.arriving and not loop._schedule.prefilling:
                self._submit()
            self.counts["steps"] += 1
            decode()

        def watched_groups(seqs: list[EngineSequence]) -> Any:
            self.together.append(seqs)
            self.paused.update({*loop._schedule.decoding} - {seq.key for seq in seqs})
            return groups(seqs)

        loop._prefill, loop._decode, loop._groups = counted_read, counted_decode, watched_groups  # type: ignore[method-assign]

    def _submit(self) -> None:
        self.loop.submit(self.arriving.pop())
        self.counts.clear()

    def before_first_token(self, seq: EngineSequence) -> Counter[str]:
        """What runs from the arrival of a sequence, in the middle of a chunk or step, to its first token."""
        self.arriving.append(seq)
        while not tokens(seq):
            self.loop.step()
        return Counter(self.counts)


@pytest.mark.parametrize("question", [SHORT, text_of(3 * GRID)], ids=["short", "of several chunks"])
@pytest.mark.parametrize("others", [[], ["C", "D", "E"]], ids=["one other", "four others"])
def test_six_successive_requests_beside_long_prompts_of_other_clients(
    others: list[str], question: str, llama: Path
) -> None:
    llm = new_llm(llama, "composed")
    launches, long = (
        Launches(llm),
        [new_sequence(llm, text_of(LONG) + key, "dense", 2, client=key) for key in ["A", *others]],
    )
    for seq in long:
        llm.loop.submit(seq)
    while any(seq.num_cached < 5 * GRID for seq in long):
        llm.loop.step()
    for number in range(6):
        seq = new_sequence(llm, f"{number} {question}", "dense", 3, client="B")
        waited = launches.before_first_token(seq)
        chunks = -(-len(seq.request.ids) // GRID)
        assert waited.pop("B") == chunks
        assert waited.pop("steps", 0) <= waited.total() + chunks
        assert all(count <= 1 + chunks for count in waited.values()), waited
        assert question != SHORT or waited.total() <= 2, "few tokens pass all chunks but those that are due"
        take_steps(llm, [seq])
    assert not any(tokens(seq) for seq in long)


@pytest.mark.parametrize("path", ["composed", "eager"])
def test_eight_long_answers_of_a_client_leave_a_place_to_another_and_keep_their_bits(path: str, llama: Path) -> None:
    llm = new_llm(llama, path)
    launches, texts = Launches(llm), [f"{number} {text_of(150 + 20 * number)}" for number in range(8)]
    answers = [new_sequence(llm, text, QUEST, 45, client="A") for text in texts]
    for seq in answers:
        llm.loop.submit(seq)
    while not all(map(tokens, answers)):
        llm.loop.step()
    other = new_sequence(llm, SHORT, QUEST, 30, client="B")
    assert launches.before_first_token(other) == {"B": 1, "steps": 1}, "the one that ran"
    launches.counts.clear()
    take_steps(llm, [other])
    assert launches.counts["steps"] <= 30 + 2, "a place in every step, but where captured steps end"
    take_steps(llm, answers)
    assert max(map(len, launches.together)) == 8
    single = new_llm(llama, path)
    for seq, text in zip([*answers, other], [*texts, SHORT]):
        assert_equal(seq, alone(single, text, QUEST, 30 if seq is other else 45))


def test_a_short_document_beside_three_long_ones_of_another_client(llama: Path) -> None:
    llm = new_llm(llama, "composed")
    launches = Launches(llm)
    documents = [new_sequence(llm, f"{number} {text_of(LONG)}", "dense", 1, client="A") for number in range(3)]
    for seq in documents:
        llm.loop.submit(seq)
    while documents[0].num_cached < LONG // 2:
        llm.loop.step()
    assert documents[1].state == "waiting", "one after the other"
    assert launches.before_first_token(new_sequence(llm, SHORT[:12], "dense", 1, client="B")) == {"A": 1, "B": 1}


KINDS = [(plan, False) for plan in PLANS], [("dense", False), (QUEST, False), (QUEST, True), ("dense", False)] * 2


@pytest.mark.usefixtures("eager_pace")
@pytest.mark.parametrize("deterministic", [False, True])
def test_paused_sequences_keep_their_bits(deterministic: bool, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also exact ones, of which some kinds of steps are launched ahead."""
    kinds, count = KINDS[deterministic], 16 if deterministic else 30
    cases = [(text_of(70 + 47 * number), plan, count) for number, (plan, _) in enumerate(kinds)]

    def opened(llm: LLM, number: int, client: str) -> EngineSequence:
        seq = new_sequence(llm, *cases[number], client=client, exact=kinds[number][1])
        llm.loop.submit(seq)
        return seq

    known, single = list[EngineSequence](), new_llm(llama, deterministic=deterministic)
    for number in range(len(cases)):
        known.append(opened(single, number, "A"))
        take_steps(single, known[-1:])
    for ahead, steps in [(2, 3)] if deterministic else [(1, 1), (3, 5)]:
        rng = random.Random(ahead)
        monkeypatch.setattr(sequence_groups, "LAUNCHED_AHEAD", ahead)
        monkeypatch.setattr(schedule, "PLACED_STEPS", steps)
        llm = new_llm(llama, deterministic=deterministic)
        new_loop(llm, max_seqs=4)
        launches, seqs = Launches(llm), list[EngineSequence]()
        for number in range(len(cases)):
            seqs.append(opened(llm, number, rng.choice("ABC")))
            llm.loop.step()
        take_steps(llm, seqs)
        assert max(map(len, launches.together)) == 4
        assert len(launches.paused) >= 3
        for seq, expected, (plan, exact) in zip(seqs, known, kinds):
            assert seq.path.startswith("composed") == plan.startswith("snapkv"), seq.path
            assert tokens(seq) == tokens(expected)
            assert exact or counters(seq) == counters(expected)
