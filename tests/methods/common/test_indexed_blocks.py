"""RetrievalAttention by blocks: an index depends on the tokens up to the end of its block, and on nothing else."""

from itertools import pairwise

import pytest
import torch
from contracts.harness import Runner, assert_same_answer, draw_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.test_retrieval_attention import SHAPE, SINKS, WINDOW, needs_core, plan, reference
from refusals import refused

from kvsift.indexes import auto, trial
from kvsift.indexes.auto import AutoIndex
from kvsift.indexes.graph import GraphIndex
from kvsift.methods import retrieval_attention
from kvsift.methods.retrieval_attention import RetrievalAttention
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import parse_plan
from kvsift.types import Rope

BLOCK = 64
GRAPHS = {"index": "graph", "block": BLOCK}
WIDE, NARROW = {**GRAPHS, "beam": 10_000}, {**GRAPHS, "beam": 9, "audit": 0}
TOKENS = draw_tokens(300, 21, SHAPE)


def spans(runner: Runner, row: int = 0) -> list[tuple[int, int]]:
    return [(span.first, span.stop) for span in runner.state(row).spans]


def graphs(runner: Runner, row: int = 0) -> list[GraphIndex]:
    return [span.index for span in runner.state(row).spans]


@needs_core
def test_a_block_gets_an_index_once_the_window_has_left_it() -> None:
    runner = Runner(plan(**WIDE), shape=SHAPE)
    for start, stop in pairwise([0, 50, 64 + WINDOW - 2, 64 + WINDOW - 1, 130, 250]):
        runner.feed(TOKENS.part(start, stop))
        seen = stop + 1 - WINDOW  # by the next query, beside its window
        expected = [(max(first, SINKS), first + BLOCK) for first in range(0, seen - BLOCK + 1, BLOCK)]
        assert spans(runner) == expected
    answer = [runner.feed(TOKENS.part(at, at + 1), decode_tokens=1)[0] for at in range(250, 300)][-1]
    assert_same_answer(answer[:, 0], reference(TOKENS, False), "blocks and the rest do not add up")
    assert spans(runner)[-1] == (192, 256), "generated tokens fill blocks, too"
    told = RetrievalAttention().describe(runner.state())
    assert [index["kind"] for index in told["indexes"]] == ["graph"] * 4


@needs_core
def test_a_prompt_that_ends_inside_its_first_block_is_scanned() -> None:
    runner = Runner(plan(**WIDE), shape=SHAPE)
    answer = runner.feed_all(TOKENS.part(0, 60), 59, [59])[:, -1]
    assert_same_answer(answer, reference(TOKENS.part(0, 60), False), "not the nearest keys")
    assert spans(runner) == []


@needs_core
@settings(max_examples=10)
@given(
    st.lists(st.integers(1, 280), max_size=12),
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 70), st.booleans()), max_size=4),
)
def test_indexes_do_not_depend_on_chunks_forks_and_roll_backs(
    cuts: list[int], detours: list[tuple[int, int, bool]]
) -> None:
    alone = Runner(plan(**NARROW), shape=SHAPE)
    expected = alone.feed_all(TOKENS, 280, range(280, 300))[:, 280:]
    runner = Runner(plan(**NARROW), num_rows=2, shape=SHAPE)
    at, turns = 0, list(detours)
    for stop in sorted({*cuts, 280}):
        runner.feed(TOKENS.part(at, stop), None)
        at = stop
        if turns:  # other tokens, some of them generated, that are taken back
            more, back, forks = turns.pop()
            if forks:
                runner.fork([0, 0])
            runner.feed(draw_tokens(more, 5, SHAPE), None, decode_tokens=more // 2)
            newest = (at + more - more // 2) if more // 2 == 0 else at + more - 1
            runner.crop(0, at := max(min(at, at - back), (newest // BLOCK - 1) * BLOCK, 0))
    runner.feed(TOKENS.part(at, 280), None) if at < 280 else None
    answers = [runner.feed(TOKENS.part(step, step + 1), None, decode_tokens=1)[0] for step in range(280, 300)]
    assert torch.equal(torch.cat(answers, 1), expected)
    for own, other in zip(graphs(runner), graphs(alone), strict=True):
        assert torch.equal(own.neighbours, other.neighbours)


@needs_core
def test_forks_share_graphs_and_widen_them_apart() -> None:
    runner = Runner(plan(**WIDE), num_rows=2, shape=SHAPE)
    runner.feed(TOKENS.part(0, 250), None)
    runner.fork([0, 0])
    for own, other in zip(graphs(runner), graphs(runner, 1), strict=True):
        assert own is not other
        assert own.neighbours is other.neighbours
    runner.feed(TOKENS.part(250, 251), draw_tokens(1, 3, SHAPE), decode_tokens=1)
    runner.state().audits.take(251, torch.full((4, 5), -1), torch.zeros(4, 5, dtype=torch.int64), 2)
    runner.state().widen()
    assert graphs(runner)[0].widths == (1.5, 1.5)
    assert graphs(runner, 1)[0].widths == (1.0, 1.0) == tuple(graphs(runner, 1)[0].widths)


@needs_core
def test_a_document_is_asked_again_as_if_for_the_first_time() -> None:
    runner = Runner(plan(**{**NARROW, "audit": 4}), shape=SHAPE)
    runner.feed(TOKENS.part(0, 100))
    runner.attention.checkpoint()
    first = runner.feed_all(TOKENS, 250, range(250, 300), start=100)
    runner.crop(0, 100)
    runner.feed(draw_tokens(30, 2, SHAPE), decode_tokens=30)
    runner.crop(0, 100)
    assert torch.equal(runner.feed_all(TOKENS, 250, range(250, 300), start=100), first)
    assert runner.state().audits.log, "nothing was audited"


@needs_core
def test_an_index_that_reaches_into_the_window_is_not_used() -> None:
    ways = TOKENS.part(0, 250), TOKENS.part(0, 64 + WINDOW // 2)
    runners = [Runner(plan(**NARROW), shape=SHAPE) for _ in ways]
    for runner, way in zip(runners, ways):
        runner.feed(way)
    runners[0].crop(0, ways[1].length)
    assert spans(runners[0]) == [(4, 64)] != spans(runners[1])
    one, other = (runner.feed(TOKENS.part(ways[1].length, 69), decode_tokens=1)[0] for runner in runners)
    assert torch.equal(one, other)


@needs_core
def test_queries_that_are_not_known_leave_a_scan_of_their_blocks() -> None:
    runner = Runner(Plan(), shape=SHAPE)
    runner.feed(TOKENS.part(0, 100))
    runner.attention.replan(plan(**WIDE))
    answer = runner.feed_all(TOKENS, 299, [299], start=100)[:, -1]
    assert_same_answer(answer, reference(TOKENS, False), "not the nearest keys")
    told = RetrievalAttention().describe(runner.state())["indexes"]
    assert [index["kind"] for index in told] == ["flat", "flat", "graph", "graph"]
    assert "queries of this block are not known" in told[0]["why"]


@needs_core
@pytest.mark.parametrize(("cost", "kinds"), [(0, {"graph"}), (10**9, {"flat"})])
def test_auto_looks_at_no_clock(cost: int, kinds: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "STEP_COST", cost)
    monkeypatch.setattr(trial, "timed", lambda *arguments: pytest.fail("a time was taken"))
    monkeypatch.setattr(trial.Trial, "judge", lambda *arguments: (1.0, 1.0))
    monkeypatch.setattr(auto, "LEAST_ROWS", 0)
    runner = Runner(plan(block=BLOCK), shape=SHAPE)
    runner.feed_all(TOKENS, 299, [299])
    for span in runner.state().spans:
        assert isinstance(span.index, AutoIndex)
        assert set(span.index.statistics()["heads"]) == kinds
        assert "scored less than a key in" in span.why


@needs_core
def test_queries_are_turned_to_near_and_far_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    given, build = [], GraphIndex.build
    monkeypatch.setattr(
        retrieval_attention.GraphIndex, "build", lambda *tensors, **how: given.append(how) or build(*tensors, **how)
    )
    runner = Runner(plan(**GRAPHS), shape=SHAPE._replace(rope=Rope(1e4 ** -(torch.arange(0, 16, 2) / 16))))
    runner.feed(TOKENS.part(0, 150))
    assert [(how["decode_positions"], how["first_position"]) for how in given] == [(None, SINKS), (None, BLOCK)]


def test_what_learns_from_keys_alone_wants_no_queries() -> None:
    traits = {index: RetrievalAttention(index=index).traits for index in ("auto", "flat")}
    assert traits["auto"].wants_queries
    assert not traits["flat"].wants_queries
    assert RetrievalAttention(block=BLOCK).traits.seals
    rule = parse_plan("retrieval_attention:block=16384").decode
    assert rule.method.block == 16384


@needs_core
def test_the_paper_has_no_blocks() -> None:
    with refused("conflict: block"):
        RetrievalAttention(block=64, compat="paper")
