"""InfLLM: what stands for a block, which blocks are chosen, and from where they are seen."""

from math import inf
from typing import Any

import pytest
import torch
from contracts.harness import SHAPE, Asked, Runner, Tokens, draw_tokens, spy, turn
from refusals import refused
from torch import Tensor

from kvsift.methods.infllm import InfLLM
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import parse_plan

SMALL = {"chunk": 16, "block": 4, "representatives": 2, "local": 24}
BUDGET = Budget(tokens=4 + 27 + 3 * 4, sinks=4, window=24, dense_layers=())  # three blocks


def rotated(raw: Tokens) -> Tokens:
    """As a model hands them over."""
    positions = torch.arange(raw.length)
    return Tokens(turn(raw.queries, positions), turn(raw.keys, positions), raw.values)


def formula(method: InfLLM, raw: Tokens, question: Asked) -> Tensor:
    """Scores of the candidates by the formula, in float64 and one query at a time."""
    tokens, group = rotated(raw), SHAPE.group_size
    queries, keys = tokens.queries.double(), tokens.keys.double()
    worth = torch.zeros(SHAPE.num_kv_heads, raw.length, dtype=torch.float64)
    asked = torch.zeros(raw.length)
    for query in range(question.start // method.chunk * method.chunk):  # of complete tiles
        end = (query // method.chunk + 1) * method.chunk
        oldest = max(-(-(end - method.local) // method.block) * method.block, 0)
        for head in range(SHAPE.num_query_heads):
            logits = SHAPE.scale * keys[head // group, oldest : query + 1] @ queries[head, query]
            if method.compat == "paper":
                worth[head // group, oldest:query] += logits[:-1]
            else:
                worth[head // group, oldest : query + 1] += logits.softmax(0)
        asked[oldest : query + (method.compat == "code")] += 1
    if method.compat == "paper":
        worth = torch.where(asked > 0, worth / asked.clamp_min(1), -inf)
    moves = method.positions == "remapped"
    seen_keys = raw.keys.double() if moves else keys
    at = slice(question.start, question.start + question.num_queries)
    moved = turn(raw.queries[:, at], torch.full((question.num_queries,), method.local)).double()
    mean = (moved if moves else queries[:, at]).mean(1)  # [num_query_heads, head_dim]
    scores = []
    for unit in range(question.candidates.first, question.candidates.stop):
        places = torch.arange(unit * method.block, (unit + 1) * method.block)
        score = 0.0
        for head in range(SHAPE.num_query_heads):
            best = places
            if asked[places].any():
                best = places[worth[head // group, places].topk(method.representatives).indices]
            score += float(mean[head] @ seen_keys[head // group, best].mean(0))
        scores.append(score)
    return torch.tensor(scores)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "knobs", [{}, {"compat": "paper"}, {"positions": "absolute"}, {"local": 40}, {"representatives": 4}], ids=str
)
def test_the_blocks_are_those_of_the_formula(knobs: dict[str, Any], phase: str) -> None:
    """With ``local`` beyond the window, some candidates are still being asked for."""
    method, raw = InfLLM(**{**SMALL, **knobs}), draw_tokens(120, 3)
    asked = spy(method)
    rule = Rule(method, BUDGET)
    prompt = 120 if phase == "prefill" else 101
    Runner(Plan(prefill=rule) if phase == "prefill" else Plan(decode=rule)).feed_all(
        rotated(raw), prompt, [48, *range(prompt, 120)]
    )
    assert len(asked) == (5 if phase == "prefill" else 19)
    for question in asked:
        assert question.selection.units.shape == (1, question.limit.units), "one set for all heads"
        best = formula(method, raw, question).topk(question.limit.units).indices.sort().values
        assert torch.equal(question.selection.units[0], best + question.candidates.first)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("positions", ["remapped", "absolute"])
def test_what_is_outside_the_window_is_seen_from_one_distance(positions: Any, phase: str) -> None:
    """Keys as they were before rotation, by queries that stand at ``local``; inside it, distances are true."""
    method, raw, length = InfLLM(**SMALL, positions=positions), draw_tokens(120, 5), 120
    asked, tokens = spy(method), rotated(raw)
    rule = Rule(method, BUDGET)
    plan = Plan(prefill=rule) if phase == "prefill" else Plan(decode=rule)
    answer = Runner(plan).feed_all(tokens, length if phase == "prefill" else 110, range(110, length))
    assert asked
    for question in asked:
        sinks_stop, window_start = BUDGET.always(question.start, method.block)
        far = question.selection.to_mask(length)[0]
        far[:sinks_stop] = True
        for position in range(question.start, question.start + question.num_queries):
            near = (torch.arange(length) >= window_start) & (torch.arange(length) <= position)
            for head in range(SHAPE.num_query_heads):
                keys, values = (each[head // SHAPE.group_size].double() for each in (tokens.keys, tokens.values))
                logits = keys @ tokens.queries[head, position].double()
                if positions == "remapped":
                    seen_from = turn(
                        raw.queries[head : head + 1, position : position + 1], torch.tensor([method.local])
                    )
                    unturned = raw.keys[head // SHAPE.group_size].double() @ seen_from[0, 0].double()
                    logits = torch.where(far, unturned, logits)
                weights = (SHAPE.scale * logits).masked_fill(~(near | far), -inf).softmax(0)
                torch.testing.assert_close(answer[head, position].double(), weights @ values, rtol=2e-4, atol=2e-5)


def test_no_position_depends_on_the_length_of_the_context() -> None:
    moved = InfLLM().reposition(torch.tensor([10**6, 10**6 + 1]), [(128, 10**6 - 4096)])
    assert (moved.queries.tolist(), moved.keys) == ([4096, 4096], 0)


def test_queries_that_nobody_saw_leave_blocks_to_their_mean_key() -> None:
    """A cache that another plan has filled: all its blocks. Generated tokens bring their queries along."""
    method, raw = InfLLM(**SMALL), draw_tokens(100, 4)
    runner = Runner(Plan())
    runner.feed(rotated(raw).part(0, 99))
    asked = spy(method)
    runner.attention.replan(Plan(decode=Rule(method, BUDGET)))
    runner.feed(rotated(raw).part(99), decode_tokens=1)
    mean = turn(raw.queries[:, 99:], torch.tensor([method.local]))[:, 0].double()
    blocks = raw.keys.double().unflatten(1, (25, 4)).mean(2).repeat_interleave(SHAPE.group_size, 0)
    scores = torch.einsum("hd,hbd->b", mean, blocks)[asked[0].candidates.units]
    best = scores.topk(asked[0].limit.units).indices.sort().values
    assert torch.equal(asked[0].selection.units[0], best + asked[0].candidates.first)


def test_the_papers_budget_is_128_initial_tokens_a_window_of_4096_and_16_blocks() -> None:
    rule = parse_plan("infllm").decode
    budget = rule.budget
    assert (budget.sinks, budget.window, budget.dense_layers) == (128, 4096, ())
    assert {budget.units(start, 128) for start in range(20000, 20256)} == {16}
    assert str(rule) == f"infllm:budget={budget.tokens}"
    shorter = parse_plan("infllm:local=1024:block=64").decode
    assert shorter.budget.window == 1024
    assert {shorter.budget.units(start, 64) for start in range(20000, 20128)} == {16}


def test_a_model_whose_rotation_is_not_known_needs_absolute_positions() -> None:
    shape = SHAPE._replace(rope=None)
    with refused("unsupported_plan: Give positions=absolute"):
        Runner(Plan(decode=Rule(InfLLM(**SMALL), BUDGET)), shape=shape)
    Runner(Plan(decode=Rule(InfLLM(**SMALL, positions="absolute"), BUDGET)), shape=shape)


def assert_same_tiles(one: Runner, other: Runner, count: int) -> None:
    assert len(one.state().tiles) == len(other.state().tiles) == count
    assert all(torch.equal(*pair) for pair in zip(one.state().tiles, other.state().tiles))


def test_a_checkpoint_is_restored_from_any_later_length() -> None:
    """Farther than queries are kept for: those of the tile that was under way would be lost."""
    tokens, plan = rotated(draw_tokens(800, 9)), Plan(decode=Rule(InfLLM(**SMALL), BUDGET))
    there_and_back, straight = Runner(plan), Runner(plan)
    for runner in (there_and_back, straight):
        runner.feed(tokens.part(0, 103))
    there_and_back.attention.checkpoint()
    there_and_back.feed(draw_tokens(600, 1))
    there_and_back.crop(0, 103)
    for runner in (there_and_back, straight):
        runner.feed(tokens.part(103, 140))
    assert_same_tiles(there_and_back, straight, 140 // 16)


def test_a_long_prompt_at_once_is_summed_as_its_chunks_are() -> None:
    """More queries than are kept for a roll-back, and a chunk that ends within a tile."""
    tokens, plan = rotated(draw_tokens(700, 9)), Plan(decode=Rule(InfLLM(**SMALL), BUDGET))
    at_once, in_chunks = Runner(plan), Runner(plan)
    at_once.feed_all(tokens, 699, [699])
    in_chunks.feed_all(tokens, 699, [*range(0, 699, 37), 699])
    assert at_once.state()._waiting == (), "the queries of the chunk are let go"
    assert_same_tiles(at_once, in_chunks, 700 // 16)
