"""Histories of exact and dense sequences in captured steps, with drafts behind verifications: each answer is its
own."""

import random
from typing import Any

import pytest
from engine.loop_sequences import GRID, PENALISED, new_loop, new_sequence, take_steps, tokens
from engine.tiny_directory import text_of, write_model

from kvsift import LLM, Sampling
from kvsift.engine.graphs import block_groups
from kvsift.engine.graphs.block_groups import BlockGroup
from kvsift.engine.graphs.slots import Slots, StepKind
from kvsift.engine.sequence import EngineSequence
from kvsift.engine.speculative.pace import Amount, Measured, Pace

PLAN = "sketch:budget=80:sinks=4:window=16:dense_layers=none"
SAMPLINGS = [Sampling(), Sampling(0.8, seed=3), Sampling(1.2, top_p=0.9, seed=4), PENALISED]
SEQUENCES, NEW = 8, 36

pytestmark = pytest.mark.usefixtures("eager_pace")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    sizes = {"hidden_size": 128, "head_dim": 64, "num_hidden_layers": 2}
    directory = write_model(tmp_path_factory.mktemp("histories"), "Qwen3", **sizes)
    return LLM(directory, "dense", path="eager", device="cpu", dtype="float32", deterministic=True, chunk_size=GRID)


def sequence_of(llm: LLM, number: int, has_own_mind: bool) -> EngineSequence:
    """Every fourth is dense; with ``has_own_mind`` clients take other tokens now and then."""
    is_exact, sampling = number % 4 != 3, SAMPLINGS[number % 3]
    seq = new_sequence(llm, text_of(60 + 37 * number), PLAN if is_exact else "dense", NEW, sampling, exact=is_exact)
    take, others = seq.output.take, set(random.Random(number).sample(range(2, NEW), 3)) if has_own_mind else set()

    def chosen(*arguments: Any) -> Any:
        token, reason = take(*arguments)
        return (token + 1) % 200 if len(tokens(seq)) in others else token, reason

    seq.output.take = chosen  # type: ignore[method-assign]
    return seq


@pytest.mark.parametrize(("seed", "has_own_mind"), [(0, False), (1, True)])
def test_sequences_come_and_go_whatever_is_drafted(
    llm: LLM, seed: int, has_own_mind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, amounts, behind, executor = random.Random(seed), dict[int, int](), [], new_loop(llm)

    def amount(pace: Pace, repeat: int, repeated: int, most: int) -> Amount:
        if repeated and rng.random() < 0.2:
            return Amount(0.0, repeated, True)
        if rng.random() < 0.1 or id(pace) not in amounts:
            amounts[id(pace)] = rng.randint(1, 7)
        return Amount(0.0, 0 if rng.random() < 0.05 else min(amounts[id(pace)], most))

    def decide(measured: Measured, shares: object, most: int) -> None:
        measured.left = rng.randint(0, 1)  # some steps without proposals are launched ahead

    run, draft_behind = Slots._run, BlockGroup._draft_behind

    def checked(slots: Slots, kind: StepKind, queries: Any) -> None:
        for slot, (length, growth) in enumerate(zip(*slots.batch.state.tolist())):
            assert not growth or slots._table[slot, length // slots.batch.page_size] != slots._scratch, "past its pages"
        run(slots, kind, queries)

    def watched(*arguments: Any) -> Any:
        behind.append(arguments)
        return draft_behind(*arguments)

    monkeypatch.setattr(Pace, "choose", lambda *_: Amount(0.0))
    expected = []
    for number in range(SEQUENCES):
        llm.loop.submit(seq := sequence_of(llm, number, has_own_mind))
        take_steps(llm, [seq])
        expected.append(tokens(seq))
    monkeypatch.setattr(block_groups, "FEW", 2)
    monkeypatch.setattr(Pace, "choose", amount)
    monkeypatch.setattr(Measured, "decide", decide)
    monkeypatch.setattr(Slots, "_run", checked)
    monkeypatch.setattr(BlockGroup, "_draft_behind", watched)
    seqs, waiting = dict[int, EngineSequence](), rng.sample(range(SEQUENCES), SEQUENCES)
    while waiting or not all(seq.is_ended for seq in seqs.values()):
        if waiting and rng.random() < 0.15:
            seqs[waiting[-1]] = sequence_of(llm, waiting[-1], has_own_mind)
            llm.loop.submit(seqs[waiting.pop()])
        llm.loop.step()
        llm.loop.check()
        if rng.random() < 0.01 and seqs:
            llm.loop.cancel(rng.choice(list(seqs.values())))
        if rng.random() < 0.02:
            executor.release(llm.loop.pages.kv)
    for number, seq in seqs.items():
        assert seq.error is None
        assert tokens(seq) == expected[number][: len(tokens(seq))], number
        assert seq.finish_reason == "cancelled" or len(tokens(seq)) == len(expected[number])
    assert behind
