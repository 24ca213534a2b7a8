"""Methods that drop tokens for good: what is gone stays gone, and taking tokens back takes back what they dropped."""

import pytest
import torch
from contracts.harness import Runner, assert_same_answer, draw_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from turns import in_turns

from kvsift.methods.common.dropped_tokens import NEVER, DroppedTokens
from kvsift.methods.common.recent_queries import KEPT_BACK, RecentQueries
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import parse_plan

SPECS = ["h2o", "h2o:mode=oneshot", "h2o:mode=decode_only", "snapkv:queries=8", "tova"]
SHARING = [f"{spec}:head_budgets=adaptive" for spec in [*SPECS[:-1], "snapkv:queries=8:heads=query"]]
ONE_SHARES = [*SPECS, SHARING[0]]  # taking back and forking are one code for all that share
CPU = torch.device("cpu")


def plan_of(spec: str) -> Plan:
    return parse_plan(f"decode={spec}:budget=40:sinks=2:window=5:dense_layers=none")


@pytest.mark.parametrize("spec", [*SPECS, *SHARING])
def test_a_checkpoint_is_restored_from_any_later_length(spec: str) -> None:
    """A document of 200 tokens, a question and an answer of more than 600, and back: as if nothing had been."""
    tokens, runner = draw_tokens(230, 0), Runner(plan_of(spec))
    runner.feed(tokens.part(0, 200))
    runner.attention.checkpoint()
    for generated in (2 * KEPT_BACK, 9):
        runner.feed(draw_tokens(300, 1))
        runner.feed(draw_tokens(generated, 2), decode_tokens=generated)
        runner.crop(0, 200)
    outputs = [runner.feed(tokens.part(200, 215))[0], runner.feed(tokens.part(215), decode_tokens=15)[0]]
    alone = Runner(plan_of(spec)).feed_all(tokens, 215, [215])
    assert_same_answer(torch.cat(outputs, 1), alone[:, 200:], "the way there left a trace")
    assert "queries_unknown_before" not in runner.attention.describe()[0]


@pytest.mark.parametrize(("spec", "back"), in_turns(ONE_SHARES, [KEPT_BACK, 63, 1]))
@pytest.mark.parametrize(("prompt", "answered"), [(870, 0), (270, 60)], ids=["an answer", "a part of one"])
def test_tokens_can_be_taken_back_without_a_mark(spec: str, back: int, prompt: int, answered: int) -> None:
    """Queries that are counted again saw what was left for each of them."""
    length = prompt + answered
    tokens, runner = draw_tokens(length + 30, 0), Runner(plan_of(spec))
    runner.feed(tokens.part(0, prompt))
    if answered:
        runner.feed(tokens.part(prompt, length), decode_tokens=answered)
    runner.feed(draw_tokens(back, 2), decode_tokens=back)
    runner.crop(0, length)
    after = runner.feed(tokens.part(length), decode_tokens=30)[0]
    alone = Runner(plan_of(spec)).feed_all(tokens, prompt, [prompt])[:, length:]
    assert_same_answer(after, alone, "what was taken back left a trace")


@pytest.mark.parametrize("spec", ONE_SHARES)
def test_forks_in_the_middle_of_an_answer_go_their_own_ways(spec: str) -> None:
    tokens, runner = draw_tokens(330, 0), Runner(plan_of(spec), num_rows=2)
    runner.feed(tokens.part(0, 300), None)
    runner.feed(tokens.part(300), None, decode_tokens=30)
    runner.fork([0, 0])
    own = [draw_tokens(20, 1), draw_tokens(20, 2)]
    outputs: list[list[Tensor]] = [[], []]
    for step in range(20):  # in turns
        fed = runner.feed(*(each.part(step, step + 1) for each in own), decode_tokens=1)
        for output, each in zip(outputs, fed):
            output.append(each)
    for each, output in zip(own, outputs):
        alone = Runner(plan_of(spec)).feed_all(tokens.then(each), 300, [300])[:, 330:]
        assert_same_answer(torch.cat(output, 1), alone, "a fork left a trace in the other")


@pytest.mark.parametrize("spec", ONE_SHARES)
def test_going_back_further_is_said(spec: str) -> None:
    runner = Runner(plan_of(spec))
    runner.feed(draw_tokens(3000, 0))
    runner.crop(0, 1000)
    runner.feed(draw_tokens(3, 1), decode_tokens=3)
    said = runner.attention.describe()[0]
    assert said["queries_unknown_before"] == 1000
    assert said["dropped_tokens"] == 1003 - 40


@pytest.mark.parametrize("spec", [*SPECS, *SHARING])
def test_joining_a_filled_cache_goes_by_the_queries_that_come(spec: str) -> None:
    """And says so. The first one stands in for all that are not known."""
    tokens, runner = draw_tokens(90, 0), Runner(Plan())
    runner.feed(tokens.part(0, 80))
    runner.attention.replan(plan_of(spec))
    runner.feed(tokens.part(80), decode_tokens=10)
    assert runner.attention.describe()[0]["queries_unknown_before"] == 80
    tally = runner.stats.phase("decode")
    assert float(tally.visible_tokens) == 10 * 40


@pytest.mark.parametrize("spec", SPECS)
def test_reports_say_whether_memory_is_freed(spec: str) -> None:
    for evict, words in (("false", "only hidden"), ("true", "freed")):
        runner = Runner(plan_of(f"{spec}:evict={evict}"))
        runner.feed(draw_tokens(90, 0))
        runner.feed(draw_tokens(1, 1), decode_tokens=1)
        said = runner.attention.describe()[0]
        assert said["dropped_tokens"] == 91 - 40
        assert said["dropped_are"].startswith(words)


@pytest.mark.parametrize("ragged", [False, True])
@settings(max_examples=60)
@given(data=st.data())
def test_drops_are_what_a_list_of_sets_would_be(ragged: bool, data: st.DataObject) -> None:
    """Dropping, taking back and forking; asked at any time, for the newest query or an earlier one."""
    drops, history = DroppedTokens(2), [(0, [set(), set()])]  # type: tuple[DroppedTokens, list[tuple[int, list[set[int]]]]]
    length = 0
    for _ in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["keep", "keep", "keep", "crop", "fork"]))
        if action == "fork":
            other = drops.fork()
            other.keep(torch.zeros(2, 1, dtype=torch.int64), max(length, 1), length)
        elif action == "crop" and length:
            length = data.draw(st.integers(0, length - 1))
            drops.crop(length)
            history = [entry for entry in history if entry[0] < length or entry[0] == 0]
        else:
            length += data.draw(st.integers(1, 40))
            gone = history[-1][1]
            left = [[token for token in range(length) if token not in gone[row]] for row in range(2)]
            count = data.draw(st.integers(1, len(left[0])))
            counts = [data.draw(st.integers(0, len(row))) if ragged else count for row in left]
            kept = [sorted(data.draw(st.permutations(row))[:count]) for row, count in zip(left, counts)]
            drops.keep(torch.tensor(behind_pads(kept), dtype=torch.int64), length, length, ragged)
            history.append((length, [set(range(length)) - set(row) for row in kept]))
            length += 1
        for position, sets in [history[-1], data.draw(st.sampled_from(history))]:
            expected = [[token for token in range(length) if token not in sets[row]] for row in range(2)]
            newest = position == history[-1][0]
            expected = behind_pads(expected)
            assert drops.left_for(position, length, CPU).tolist() == expected
            assert not newest or drops.left(length, CPU).tolist() == expected
            asked = torch.arange(-int(drops.ragged), length + 2).expand(2, -1)
            seen = drops.seen(asked, torch.tensor([position]))[:, 0]
            assert [row[mask].tolist() for row, mask in zip(asked, seen)] == [
                [token for token in range(min(position + 1, length + 2)) if token not in row] for row in sets
            ]
            assert not newest or drops.num_dropped == [len(row) for row in sets]


def test_a_query_saw_what_was_dropped_after_it() -> None:
    drops = DroppedTokens(1)
    drops.keep(torch.tensor([[0, 3]]), 4, 5)
    drops.keep(torch.tensor([[3]]), 4, 6)
    tokens, positions = torch.tensor([[0, 1, 3, 6]]), torch.tensor([4, 5, 6])
    assert drops.seen(tokens, positions)[0].tolist() == [
        [True, True, True, False], [True, False, True, False], [False, False, True, True]
    ]  # fmt: skip
    assert drops.num_dropped == [3]
    assert drops.left_for(NEVER - 1, 8, CPU).tolist() == [[3, 4, 5, 6, 7]]


def behind_pads(rows: list[list[int]]) -> list[list[int]]:
    """Rows of one length."""
    longest = max(map(len, rows))
    return [[-1] * (longest - len(row)) + row for row in rows]


@settings(max_examples=40)
@given(
    chunks=st.lists(st.one_of(st.just(1), st.integers(1, 900)), min_size=1, max_size=8), wanted=st.integers(1, 40),
    back=st.integers(0, KEPT_BACK),
)  # fmt: skip
def test_the_newest_queries_are_known(chunks: list[int], wanted: int, back: int) -> None:
    recent, start = RecentQueries(wanted), 0

    def queries(start: int, stop: int) -> Tensor:
        return torch.arange(start, stop).float().view(1, -1, 1).expand(2, -1, 3)

    for size in chunks:
        recent.observe(queries(start, start + size), start, start + size)
        start += size
    length = max(start - back, 0)
    recent.crop(length)
    first = max(length - wanted, 0)
    known = recent.read(first, length)
    assert known is not None
    assert torch.equal(known, queries(first, length))
    recent.observe(queries(length, length + 5), length, length + 5)
    assert torch.equal(recent.read(length - min(length, 3), length + 5), queries(length - min(length, 3), length + 5))
    assert recent.read(length, length + 6) is None
