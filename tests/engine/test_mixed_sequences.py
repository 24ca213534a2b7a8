"""Sequences of one batch are dense or sparse by themselves: each answers and counts as it does alone."""

import random
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from ends import set_ends
from engine.tiny_directory import text_of, write_model

from kvsift import LLM, Sampling
from kvsift.engine.graphs import sequence_groups
from kvsift.engine.graphs.slots import Slots

QUEST = "quest:budget=128:window=16:dense_layers=0"
PLANS = (
    QUEST,
    "quest:budget=128:window=16:page_size=8:dense_layers=none",
    "quest:budget=144:window=16:page_size=32:score_by=mean_std:heads=query:dense_layers=none",
    "quest:budget=128:window=16:score_by=minmax_fp8:dense_layers=2",
    "quest:ratio=0.3:window=16:dense_layers=1",
    "quest:budget=128:window=16:min_context=280:dense_layers=none",
    "sketch:budget=64:window=16:page_size=8:dense_layers=0",  # pages of 16: the compiled core rounds queries
)
KEYS = (
    "queries", "visible_tokens", "density", "sparse_queries", "kv_bytes_to_select", "kv_bytes_dense", "recall"
)  # fmt: skip
BELOW = 300


def counters(answer: Any) -> dict[str, Any]:
    return {key: answer.decode(key) for key in KEYS}


@pytest.fixture(autouse=True)
def no_answer_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ends(monkeypatch)


@pytest.mark.parametrize("plan", PLANS)
def test_sequences_around_the_threshold_answer_as_each_does_alone(plan: str, llama: Path) -> None:
    rng = random.Random(plan)
    eager, composed = (LLM(llama, plan, path=path, dense_below=BELOW) for path in ("eager", "composed"))  # type: ignore[arg-type]
    for _ in range(2 if plan == QUEST else 1):  # the second time in slots that are there, whatever the plan
        texts = [text_of(BELOW + rng.randint(-60, 60)) for _ in range(3)] + [text_of(rng.choice([40, 700]))]
        sampling = [Sampling(rng.choice([0, 0, 0.8, 1.3]), rng.choice([1.0, 0.8]), rng.randint(0, 99)) for _ in texts]
        together = eager.generate(texts, max_new_tokens=24, sampling=sampling)
        assert {answer.path for answer in together} == {"eager"}
        for text, choose, answer in zip(texts, sampling, together):
            for llm in (eager, composed) if plan == QUEST else (composed,):
                alone = llm.generate(text, max_new_tokens=24, sampling=choose)
                assert answer.token_ids == alone.token_ids, (len(text), choose)
                assert counters(answer) == counters(alone), (len(text), choose)
                if llm is eager:
                    assert answer.decode("kv_bytes_attended") == alone.decode("kv_bytes_attended")


def test_sequences_that_cross_in_a_mixed_step_have_the_summaries_of_their_dense_steps(llama: Path) -> None:
    """One sequence is dense in pure dense steps, then beside a sparse sequence, and then sparse itself."""
    texts = [text_of(BELOW - 20), text_of(BELOW - 100)]
    eager, composed = (LLM(llama, QUEST, path=path, dense_below=BELOW) for path in ("eager", "composed"))  # type: ignore[arg-type]
    together = eager.generate(texts, max_new_tokens=130)
    for text, answer in zip(texts, together):
        alone = composed.generate(text, max_new_tokens=130)
        assert answer.token_ids == alone.token_ids
        assert counters(answer) == counters(alone)
        assert 0 < answer.decode("sparse_queries") < 260


def test_steps_are_mixed_only_where_sequences_differ(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    run = Slots.run

    def watched(slots: Slots, kind: Any, number: int) -> Any:
        modes.append(kind.mode)
        return run(slots, kind, number)

    monkeypatch.setattr(Slots, "run", watched)
    llm = LLM(llama, QUEST, path="eager", dense_below=BELOW)
    llm.generate([text_of(BELOW - 10), text_of(BELOW - 15)], max_new_tokens=30)
    assert [mode for mode, _ in groupby(modes)] == ["dense", "mixed", "sparse"]
    assert 0 < modes.count("mixed") < 20


def test_a_mixed_batch_goes_on_in_the_mode_of_the_sequences_that_are_left(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    texts = [text_of(600), text_of(200), text_of(150)]
    free = LLM(llama, QUEST, path="composed", dense_below=BELOW).generate(texts, max_new_tokens=60)
    directory = write_model(tmp_path, eos_token_id=free[0].token_ids[9])
    for move_steps in (1, 512):
        monkeypatch.setattr(sequence_groups, "MOVE_STEPS", move_steps)
        fast, slow = (
            LLM(directory, QUEST, path=path, dense_below=BELOW).generate(texts, max_new_tokens=60)  # type: ignore[arg-type]
            for path in ("eager", "composed")
        )
        assert [answer.token_ids for answer in fast] == [answer.token_ids for answer in slow]
        assert [counters(answer) for answer in fast] == [counters(answer) for answer in slow]
