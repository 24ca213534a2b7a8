"""Warmed up, a model answers its first prompts with memory and steps that are there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.loop_sequences import GREEDY, QUEST, alone, assert_equal, new_llm, new_sequence, take_steps, tokens
from engine.tiny_directory import POSITIONS, text_of
from refusals import refused

from kvsift import Sampling
from kvsift.engine import executor
from kvsift.engine.graphs.slots import Slots, StepKind
from kvsift.layer.layer_cache import DEFAULT_PAGE_SIZE
from kvsift.methods.quoka import QuoKA

DRAWN = Sampling(0.9, 0.9, seed=3)
SKETCH = "sketch:budget=64:window=16:dense_layers=none"
CASES = [
    (text_of(900), QUEST, 30, GREEDY),
    (text_of(100), QUEST, 12, DRAWN),
    (text_of(700), "dense", 9, GREEDY),
    (text_of(200), "dense", 20, DRAWN),
    (text_of(POSITIONS - 60), QUEST, 50, GREEDY),
    (text_of(90), QUEST, 8, GREEDY),
    (text_of(240), QUEST, 40, GREEDY),  # becomes sparse while it decodes
    (text_of(600), QUEST, 5, GREEDY),
]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, StepKind]]:
    """Steps that were captured, by the number of slots."""
    found: list[tuple[int, StepKind]] = []
    prepare = Slots.prepare

    def watched(slots: Slots, kind: StepKind) -> None:
        if not slots.captured(kind):
            found.append((slots.num_slots, kind))
        prepare(slots, kind)

    monkeypatch.setattr(Slots, "prepare", watched)
    return found


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_first_prompts_capture_no_step_and_move_no_page(
    deterministic: bool, llama: Path, captured: list[tuple[int, StepKind]]
) -> None:
    llm = new_llm(llama, deterministic=deterministic)
    done = llm.warm_up([QUEST])
    blocks = (
        4 + 2 * 3 * 2
    )  # dense sequences: 1, 2, 4 or 8; two parts of exact sequences: 1, 2 or 4 with one token or a block
    assert done.num_steps == 3 * (1 + blocks + 3 if deterministic else 4 * 3)  # for each choice of tokens
    assert done.num_tokens >= 8 * POSITIONS
    counts, moves = llm.loop.counts(), llm.loop.pages.kv.moves
    assert counts["pages"]["free"] * DEFAULT_PAGE_SIZE >= 8 * POSITIONS
    assert not any(counts["sequences"].values())
    llm.loop.check()
    captured.clear()
    seqs = [new_sequence(llm, *case, exact=deterministic and number < 2) for number, case in enumerate(CASES)]
    for count in (1, 3, len(seqs)):
        for seq in seqs[:count]:
            if not seq.key:
                llm.loop.submit(seq)
        for _ in range(5):
            llm.loop.step()
    take_steps(llm, seqs)
    assert captured == []
    assert llm.loop.pages.kv.moves == moves
    for seq, (text, plan, *rest) in zip(seqs, CASES):
        assert seq.path == "eager"
        other = alone(new_llm(llama, deterministic=deterministic), text, "dense" if seq.decoder else plan, *rest)
        if seq.decoder is None:
            assert_equal(seq, other)
        else:
            assert tokens(seq) == tokens(other)


def test_a_plan_of_another_method_leaves_the_steps_of_the_first_one(
    llama: Path, captured: list[tuple[int, StepKind]]
) -> None:
    llm = new_llm(llama)
    llm.warm_up([QUEST, SKETCH])
    moves = llm.loop.pages.kv.moves
    expected = alone(new_llm(llama), text_of(500), SKETCH)
    captured.clear()
    assert tokens(alone(llm, text_of(500), SKETCH)) == tokens(expected)
    assert len(captured) == 1
    alone(llm, text_of(500), QUEST)
    alone(llm, text_of(500), SKETCH)
    assert len(captured) == 1
    assert llm.loop.pages.kv.moves == moves, "summaries of both have their memory"


def test_memory_is_allocated_for_as_many_tokens_as_asked_or_as_there_is_room_for(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 1000 <= new_llm(llama).warm_up([QUEST], 1000).num_tokens < 1200
    with refused("invalid_value: num_tokens=0"):
        new_llm(llama).warm_up(num_tokens=0)
    llm = new_llm(llama)
    per_token = llm.directory.kv_bytes_per_token(llm.dtype)
    monkeypatch.setattr(executor, "available_bytes", lambda device: 2000 * per_token)
    done = llm.warm_up([QUEST])
    assert 1000 < done.num_tokens < 2000
    answer = llm.generate(text_of(2500), plan=QUEST, max_new_tokens=4)
    assert answer.path == "eager", "the pool grows if it must"
    assert llm.loop.pages.kv.pages.num_pages * DEFAULT_PAGE_SIZE > 2500


def test_steps_that_the_next_pool_needs_are_captured_again(llama: Path) -> None:
    llm = new_llm(llama)
    llm.warm_up([QUEST], 1000)
    long, short = (text_of(POSITIONS - 100), QUEST, 4), (text_of(300), SKETCH, 4)
    for case in (long, short, long):
        assert_equal(alone(llm, *case), alone(new_llm(llama), *case))
    llm.release()
    assert llm.loop.pages.kv.pages.num_pages == 0
    assert_equal(alone(llm, *long), alone(new_llm(llama), *long))


def test_steps_are_timed_over_numbers(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a crossover is measured over is not what happened to be in memory."""
    empty = torch.Tensor.new_empty

    def filled(self: torch.Tensor, *sizes: Any, **options: Any) -> torch.Tensor:
        made = empty(self, *sizes, **options)
        return made.fill_(torch.nan if made.is_floating_point() else 255)

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    llm = new_llm(llama)
    llm.warm_up([QUEST, SKETCH], 3000)
    run = max(llm.loop.pages.kv.pages.free_runs, key=lambda run: run.num_pages)
    assert 3000 <= run.num_pages * DEFAULT_PAGE_SIZE < 3200
    for pool in llm.loop.pages.kv.layers.values():
        keys, seqs = pool.keys[:, run.start : run.stop], pool.summaries["minmax"][:, run.start : run.stop]
        assert torch.equal(seqs, torch.cat([keys.amax(2), keys.amin(2)], -1))
        assert all(tensor[:, run.start : run.stop].float().isfinite().all() for tensor in pool.tensors)


def test_rules_of_prefill_have_read_whole_and_other_segments(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, select = set[int](), QuoKA.select

    def watched(method: QuoKA, state: Any, shape: Any, queries: torch.Tensor, *arguments: Any) -> Any:
        read.add(queries.shape[1])
        return select(method, state, shape, queries, *arguments)

    monkeypatch.setattr(QuoKA, "select", watched)
    llm = new_llm(llama, keep_tokens=1024)
    llm.warm_up([f"prefill=quoka:budget=200:chunk=32:dense_layers=none,decode={QUEST}"], 1000)
    assert read == {32, 17}
    counts = llm.loop.counts()
    assert counts["pages"]["kept"] == 0
    assert not any(counts["sequences"].values())
    read.clear()
    llm.warm_up([f"prefill=quoka:budget={POSITIONS}:chunk=32,decode={QUEST}"], 1000)
    assert not read, "it never leaves anything out"


def test_composed_steps_need_no_warm_up(llama: Path) -> None:
    llm = new_llm(llama, "composed")
    assert llm.warm_up([QUEST])[:2] == (0, 0)
    assert llm.loop.pages.kv.pages.num_pages == 0
