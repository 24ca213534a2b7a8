"""InfiniGen: how many tokens are wanted, which, by which channels, and of which query."""

from pathlib import Path

import pytest
import torch
from contracts.harness import SHAPE, Asked, Runner, Tokens, draw_tokens, spy
from torch import Tensor

from kvsift.layer.accounting import RunStats
from kvsift.layer.layer_messages import LayerMessages
from kvsift.layer.sparse_attention import SparseAttention
from kvsift.methods.common.calibration import write
from kvsift.methods.infinigen import Channels, InfiniGen, num_sampled
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import parse_plan
from kvsift.types import Chunk, LayerShape, Origin

BUDGET = Budget(tokens=30, sinks=4, window=6, dense_layers=())


def logits_of_two_heads(*heads: list[float]) -> tuple[LayerShape, Tokens]:
    """Heads of one channel whose queries are 1, so that keys are logits; a query's own key comes last, at -100."""
    keys = torch.tensor([[*logits, -100.0] for logits in heads]).unsqueeze(-1)
    return LayerShape(2, len(heads), len(heads), 1, 1.0), Tokens(torch.ones_like(keys), keys, keys)


def chosen(method: InfiniGen, shape: LayerShape, tokens: Tokens, budget: int) -> list[list[int]]:
    """What the last token chooses, of a budget that its own place is part of."""
    asked, last = spy(method), tokens.length - 1
    rule = Rule(method, Budget(tokens=budget, sinks=0, window=1, dense_layers=()))
    Runner(Plan(decode=rule), shape=shape).feed_all(tokens, last, [last])
    return [row.tolist() for row in asked[0].selection.units]


def test_the_public_code_counts_from_the_largest_logit_of_the_first_head() -> None:
    """10: of the first head 3 lie less than 5 below, of the second none: 1.5, and so 1."""
    shape, tokens = logits_of_two_heads([10, 0, 6, 5.5, -9, -20], [-1, 2.9, 0, 2, 3, -20])
    method = InfiniGen(partial=1.0, heads="query", compat="code")
    assert chosen(method, shape, tokens, 6) == [[0], [4]]


def test_heads_of_a_group_share_what_is_near_the_largest_of_either() -> None:
    """Queries 1 and -0.5 of keys 4, -4, 3, 0, 9, -9: with alpha = 5.5 the first head wants 9 and 4, 0 and 5 below its
    largest logit, the second -9, -4 and 0, which are 0, 2.5 and 4.5 below. That is 2.5 on average, and so 2: the
    largest of each."""
    keys = torch.tensor([4.0, -4, 3, 0, 9, -9, -100]).view(1, -1, 1)
    queries = torch.tensor([1.0, -0.5]).view(2, 1, 1).expand(2, 7, 1)
    keys[0, 6] = 0.0  # its own key must win in neither head
    shape = LayerShape(2, 2, 1, 1, 1.0)
    assert chosen(InfiniGen(alpha=5.5, partial=1.0), shape, Tokens(queries, keys, keys), 6) == [[4, 5]]


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Rotations of layer 2, for ``SHAPE``."""
    drawn = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    origin = Origin("TinyForCausalLM", torch.ones(4, 4))
    write(tmp_path / "tiny.safetensors", {"queries.2": torch.linalg.qr(drawn).Q}, origin, {})
    return str(tmp_path / "tiny.safetensors")


def by_the_formula(tokens: Tokens, question: Asked, basis: Tensor, count: int, alpha: float) -> list[list[int]]:
    """In loops and float64: what each KV head chooses."""
    start, seen = question.start, 1
    while 2 * seen <= question.start:
        seen *= 2
    below = []
    for kv_head in range(SHAPE.num_kv_heads):
        rotation, own = basis[kv_head].double(), slice(2 * kv_head, 2 * kv_head + 2)
        rotated_keys = tokens.keys[kv_head].double() @ rotation
        rotated_queries = tokens.queries[own].double() @ rotation
        places = list(range(16, seen, 32))
        size = rotated_keys[places].abs().sum(0) + rotated_queries[:, places].abs().sum((0, 1))
        kept = size.topk(count).indices
        logits = rotated_queries[:, start][:, kept] @ rotated_keys[: start + 1, kept].T * SHAPE.scale
        below.append(logits - logits[:, :start].amax(-1, keepdim=True))
    near = torch.stack(below)[..., question.candidates.tokens]
    units = min(int((near > -alpha).sum(-1).double().mean()), question.limit.units)
    return [sorted((row.amax(0).topk(units).indices + question.candidates.first).tolist()) for row in near]


@pytest.mark.parametrize(("length", "alpha"), [(90, 0.5), (90, 1.5), (150, 1.0)])
@pytest.mark.parametrize("calibrated", [False, True])
def test_decode_is_the_formula(length: int, alpha: float, calibrated: bool, file: str) -> None:
    method = InfiniGen(alpha=alpha, partial=0.4, calibration=file if calibrated else None)
    asked, tokens = spy(method), draw_tokens(length + 4, 6)
    Runner(Plan(decode=Rule(method, BUDGET))).feed_all(tokens, length, [50, *range(length, length + 4)])
    basis = method.new_state(SHAPE).basis
    assert torch.equal(basis[0], torch.eye(8)) != calibrated
    sizes = []
    for question in asked:
        expected = by_the_formula(tokens, question, basis, 4, alpha)  # 0.4 of 8 channels, rounded up
        assert question.selection.units.tolist() == expected
        sizes.append(len(expected[0]))
    assert len(asked) == 4
    assert max(sizes) <= 20
    assert alpha > 1 or max(sizes) < 20, "the limit decided, not alpha"


def test_channels_are_those_that_are_large_in_the_prompt() -> None:
    """Queries are large in channel 3 and keys in channel 5 of KV head 0, both in channel 1 of the other."""
    tokens = draw_tokens(100, 0)
    small = Tokens(*(tensor / 100 for tensor in tokens))
    small.queries[:2, :, 3] = small.keys[0, :, 5] = 5.0
    small.queries[2:, :, 1] = small.keys[1, :, 1] = -5.0
    for cuts in ([100], [16, 17, 50, 100]):
        state = Channels(torch.eye(8).expand(2, -1, -1))
        for start, stop in zip([0, *cuts], cuts):
            part = small.part(start, stop)
            state.observe(part.queries, part.keys, start)
        axes = state.choose(99, 2, torch.device("cpu"))
        assert axes[0].nonzero()[:, 0].tolist() == [3, 5]
        assert 1 in axes[1].nonzero()[:, 0].tolist()
    assert [num_sampled(length) for length in (0, 16, 17, 48, 49, 100)] == [0, 0, 1, 1, 2, 3]


def attention(method: InfiniGen, layer: int, relay: LayerMessages) -> SparseAttention:
    plan = Plan(decode=Rule(method, BUDGET))
    return SparseAttention(SHAPE._replace(layer=layer), plan, 1, torch.empty(0), RunStats(0), messages=relay)


def chunk(tokens: Tokens, foreseen: Tensor | None = None) -> Chunk:
    queries, keys, values = (tensor.unsqueeze(0) for tensor in tokens)
    return Chunk(queries, keys, values, [tokens.length], None if foreseen is None else foreseen.unsqueeze(0))


def test_the_query_that_was_foreseen_chooses_and_the_true_one_attends() -> None:
    tokens, other = draw_tokens(93, 1), draw_tokens(93, 2).queries
    chosen, outputs = [], []
    for queries, foreseen in ((tokens.queries, None), (tokens.queries, other), (other, other)):
        method = InfiniGen(alpha=2.0, partial=1.0)
        asked, layer = spy(method), attention(method, 3, LayerMessages())
        given = tokens._replace(queries=torch.cat([tokens.queries[:, :90], queries[:, 90:]], 1))
        layer.attend(chunk(given.part(0, 90)))
        rest = None if foreseen is None else foreseen[:, 90:]
        outputs.append(layer.attend(chunk(given.part(90), rest), decode_tokens=3))
        chosen.append([question.selection.units.tolist() for question in asked])
    assert chosen[1] == chosen[2] != chosen[0]
    assert not torch.allclose(outputs[1], outputs[2])
    for step, units in enumerate(chosen[1]):
        position = 90 + step
        seen = [[*range(4), *row, *range(position - 5, position + 1)] for row in units]
        for head in range(SHAPE.num_query_heads):
            keys, values = (each[head // 2, seen[head // 2]] for each in (tokens.keys, tokens.values))
            weights = (tokens.queries[head, position] @ keys.T * SHAPE.scale).softmax(-1)
            torch.testing.assert_close(outputs[1][0, head, step], weights @ values, rtol=1e-4, atol=1e-5)


def test_defaults_are_those_of_the_paper() -> None:
    rule = parse_plan("infinigen").decode
    assert rule.method == InfiniGen(alpha=5.0, partial=0.2)
    assert (rule.budget.ratio, rule.budget.tokens, rule.budget.dense_layers) == (0.2, None, (0,))
    assert parse_plan("infinigen").wants_hidden
    assert not parse_plan("quest").wants_hidden
    assert InfiniGen(partial=0.5).state_bytes_per_token(SHAPE) == 2 * (2 * 4 + 4 * 8 / 32)
