"""A run that is watched tells what came and what was shown, and answers as it does alone."""

import pytest
import torch
from contracts.harness import Runner, Tokens, draw_tokens, least_tokens, small
from torch import Tensor

from kvsift.layer.probe import visible_tokens
from kvsift.methods import catalogue, method_class
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.stores.base import Segment
from kvsift.types import Chunk, LayerShape, Selection

PROMPT, GENERATED = 80, 4
TOKENS = draw_tokens(PROMPT + GENERATED, 3)
CHOOSING = [name for name in catalogue() if "decode" in method_class(name).phases and name != "dense"]


class Diary:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, int]] = []  # tokens, generated ones among them
        self.shown: list[tuple[int, int, Tensor]] = []  # start, stop, bool [num_query_heads, stop]

    def before_chunk(self, shape: LayerShape, chunk: Chunk, decode_tokens: int) -> None:
        self.chunks.append((chunk.lengths[0], decode_tokens))

    def after_segment(
        self, shape: LayerShape, row: int, segment: Segment, spans: tuple[int, int], selection: Selection | None
    ) -> None:
        shown = visible_tokens(shape, segment.stop, spans, selection, torch.device("cpu"))
        self.shown.append((segment.start, segment.stop, shown))


def plan(name: str, dense_layers: tuple[int, ...] = ()) -> Plan:
    method = small(name)()
    sinks, window = 3, 6 if method.traits.selects else Budget().window
    budget = Budget(least_tokens(method, sinks, window, 2), sinks=sinks, window=window, dense_layers=dense_layers)
    return Plan(decode=Rule(method, budget))


def chunk(tokens: Tokens) -> Chunk:
    return Chunk(*(tensor.unsqueeze(0) for tensor in tokens), [tokens.length])


def test_what_came_and_what_was_shown() -> None:
    diary, runner = Diary(), Runner(plan("quest"))
    runner.stats.observer = diary
    answer = runner.feed_all(TOKENS, PROMPT, range(PROMPT, PROMPT + GENERATED))
    assert diary.chunks == [(PROMPT, 0), *[(1, 1)] * GENERATED]
    assert [each[:2] for each in diary.shown] == [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, TOKENS.length))]
    assert bool(diary.shown[0][2].all()), "the prompt is dense"
    counted = sum(shown.sum(1).double().mean() for _, _, shown in diary.shown[1:])
    assert float(counted) == pytest.approx(float(runner.stats.phase("decode").visible_tokens))
    alone = Runner(plan("quest")).feed_all(TOKENS, PROMPT, range(PROMPT, PROMPT + GENERATED))
    assert torch.equal(answer, alone)


def test_a_dense_layer_shows_everything() -> None:
    diary, runner = Diary(), Runner(plan("quest", dense_layers=(2,)))
    runner.stats.observer = diary
    runner.feed_all(TOKENS, PROMPT, range(PROMPT, PROMPT + GENERATED))
    assert len(diary.shown) == 1 + GENERATED
    assert all(bool(shown.all()) for _, _, shown in diary.shown)


@pytest.mark.parametrize("name", CHOOSING)
def test_a_prompt_that_is_taken_unanswered_leaves_the_same_behind(name: str) -> None:
    answered, taken = Runner(plan(name)), Runner(plan(name))
    answered.feed(TOKENS.part(0, 50))
    answered.feed(TOKENS.part(50, PROMPT))
    for part in (TOKENS.part(0, 50), TOKENS.part(50, PROMPT)):
        taken.attention.take(chunk(part))
    for step in range(PROMPT, TOKENS.length):
        answers = [runner.feed(TOKENS.part(step, step + 1), decode_tokens=1)[0] for runner in (answered, taken)]
        assert torch.equal(*answers)
    tallies = [runner.stats.phase("decode") for runner in (answered, taken)]
    assert float(tallies[0].visible_tokens) == float(tallies[1].visible_tokens)
    assert tallies[1].sparse_queries > 0
