"""StreamingLLM is attention under a lambda-shaped mask: the first tokens and the last ones, for every query alike."""

import pytest
import torch
from contracts.checks import masked_attention
from contracts.harness import SHAPE, Runner, Tokens, draw_tokens, turn
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import Tensor

from kvsift.methods.base import Phase
from kvsift.methods.streaming_llm import StreamingLLM
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import parse_plan


def lambda_mask(length: int, sinks: int, tokens: int) -> Tensor:
    """bool [length, length]: query i sees the first ``sinks`` tokens and the last ``tokens - sinks`` up to itself."""
    query, key = torch.arange(length).unsqueeze(1), torch.arange(length)
    return (key <= query) & ((key < sinks) | (key > query - (tokens - sinks)))


def run(phase: str, budget: Budget, length: int, cuts: list[int], seed: int) -> tuple[Tensor, Runner]:
    rule = Rule(StreamingLLM(), budget)
    runner = Runner(Plan(prefill=rule) if phase == "prefill" else Plan(decode=rule))
    prompt = length if phase == "prefill" else 0
    return runner.feed_all(draw_tokens(length, seed), prompt, cuts), runner


@settings(max_examples=40)
@given(
    phase=st.sampled_from(["prefill", "prefill", "decode"]), length=st.integers(1, 700), tokens=st.integers(5, 400),
    sinks=st.integers(0, 4), cuts=st.lists(st.integers(1, 700), max_size=6), seed=st.integers(0, 99),
)  # fmt: skip
def test_each_phase_sees_a_lambda_shaped_mask_however_prompts_are_chunked(
    phase: Phase, length: int, tokens: int, sinks: int, cuts: list[int], seed: int
) -> None:
    if phase == "decode":
        length, tokens, cuts = -(-length // 8), -(-tokens // 5), []
    answer, runner = run(phase, Budget(tokens=max(tokens, 5), sinks=sinks, dense_layers=()), length, cuts, seed)
    mask = lambda_mask(length, sinks, max(tokens, 5))
    torch.testing.assert_close(answer, masked_attention(draw_tokens(length, seed), mask), rtol=1e-4, atol=2e-5)
    assert float(runner.stats.phase(phase).visible_tokens) == int(mask.sum())


def test_a_ratio_moves_the_window_along_with_the_context() -> None:
    answer, _ = run("decode", Budget(ratio=0.3, sinks=2, dense_layers=()), 60, [], 0)
    for position in (9, 30, 59):
        mask = lambda_mask(position + 1, 2, -(-3 * (position + 1) // 10))[-1:]
        expected = masked_attention(draw_tokens(60, 0).part(0, position + 1), mask)
        torch.testing.assert_close(answer[:, position : position + 1], expected, rtol=1e-4, atol=2e-5)


def in_cache(length: int, sinks: int, tokens: int, seed: int) -> tuple[Tokens, Tensor]:
    """Tokens as a model would hand them over, rotated at their positions; and the answers of the paper's procedure:
    before every query, the unrotated keys of sinks and window are rotated anew, at 0, 1, 2 and so on."""
    raw = draw_tokens(length, seed)
    queries, keys = (turn(tensor, torch.arange(length)) for tensor in raw[:2])
    answers = []
    for position in range(length):
        seen = lambda_mask(position + 1, sinks, tokens)[-1].nonzero().flatten()
        places = torch.arange(len(seen))
        cached = Tokens(turn(raw.queries[:, seen], places), turn(raw.keys[:, seen], places), raw.values[:, seen])
        answers.append(masked_attention(cached, torch.ones(1, len(seen), dtype=torch.bool)))
    return Tokens(queries, keys, raw.values), torch.cat(answers, 1)


@pytest.mark.parametrize(
    ("phase", "sinks", "tokens"), [("prefill", 4, 40), ("prefill", 0, 5), ("decode", 4, 20), ("decode", 1, 7)]
)
def test_positions_in_the_cache_are_the_papers_re_rotation(phase: str, sinks: int, tokens: int) -> None:
    length = 300 if phase == "prefill" else 60  # more than a segment
    given_tokens, expected = in_cache(length, sinks, tokens, tokens)
    rule = Rule(StreamingLLM("cache"), Budget(tokens=tokens, sinks=sinks, dense_layers=()))
    runner = Runner(Plan(prefill=rule) if phase == "prefill" else Plan(decode=rule))
    answer = runner.feed_all(given_tokens, length if phase == "prefill" else 0, [50, 256])
    torch.testing.assert_close(answer, expected, rtol=2e-4, atol=2e-5)
    mask = lambda_mask(length, sinks, tokens)
    assert float(runner.stats.phase(phase).visible_tokens) == int(mask.sum())  # type: ignore[arg-type]


@given(start=st.integers(0, 10**6), tokens=st.integers(5, 600), sinks=st.integers(0, 4), count=st.integers(1, 9))
def test_no_position_reaches_the_number_of_tokens_seen(start: int, tokens: int, sinks: int, count: int) -> None:
    """However far beyond its training the model goes, distances stay below sinks + window."""
    budget = Budget(tokens=tokens, sinks=sinks)
    positions = torch.arange(start, start + count)
    spans = [budget.always(int(position), 1, fill=True) for position in positions]
    moved = StreamingLLM("cache").reposition(positions, spans)
    assert moved.keys is None, "sinks stand at 0, 1, 2, where they are"
    assert int(moved.queries.max()) < tokens
    assert all(position - window_start < tokens - sinks for position, (_, window_start) in zip(positions, spans))
    distances = [int(query) - sinks_stop for query, (sinks_stop, _) in zip(moved.queries, spans)]
    assert distances == [int(position) - window_start for position, (_, window_start) in zip(positions, spans)]


def test_positions_in_the_cache_leave_no_layer_dense_unless_told() -> None:
    assert str(parse_plan("streaming_llm:positions=cache")) == "streaming_llm:budget=1024:positions=cache"
    assert parse_plan("streaming_llm:positions=cache").decode.budget.dense_layers == ()  # type: ignore[union-attr]
    assert parse_plan("streaming_llm:positions=cache:dense_layers=0").decode.budget.dense_layers == (0,)  # type: ignore[union-attr]


def test_where_the_rotation_is_not_known_it_is_refused_before_anything_is_stored() -> None:
    plan = parse_plan("streaming_llm:positions=cache")
    with refused("unsupported_plan: positions=cache"):
        Runner(plan, shape=SHAPE._replace(rope=None))
    runner = Runner(Plan(), shape=SHAPE._replace(rope=None))
    with refused("unsupported_plan: how this model rotates queries and keys is not known"):
        runner.attention.replan(plan)
    assert runner.attention.plan == Plan()
