"""Where a method meets a store: order of events, phases, plans that change, logits that models bend."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from contracts.harness import SHAPE, Runner, Tokens, answers, assert_same_answer, draw_tokens, revealing_tokens, spy
from contracts.toy import RememberedMeans
from torch import Tensor

from kvsift.layer.accounting import RunStats
from kvsift.layer.sparse_attention import SparseAttention
from kvsift.methods.base import Method, Phase
from kvsift.methods.oracle import OraclePages, OracleTokens
from kvsift.methods.quest import Quest
from kvsift.methods.streaming_llm import StreamingLLM
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.types import Candidates, Chunk, KVReader, LayerShape, Limit, Part, Selection

SMALL_BUDGET = Budget(tokens=24, sinks=4, window=4, dense_layers=())


def formula(
    tokens: Tokens, seen: Tensor, shape: LayerShape = SHAPE, sink_logit: Tensor | None = None, weight: float = 0.0
) -> Tensor:
    """Attention of the last query over what it sees, bool [num_query_heads, num_tokens], as a model defines it."""
    keys, values = (tensor.repeat_interleave(shape.group_size, 0) for tensor in (tokens.keys, tokens.values))
    logits = (tokens.queries[:, -1:] @ keys.mT).squeeze(1) * shape.scale
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    logits = logits.masked_fill(~seen, -torch.inf)
    if sink_logit is not None:
        logits = torch.cat([logits, sink_logit.unsqueeze(1)], 1)
    weights = logits.softmax(-1)[:, : tokens.length]
    return (weights.unsqueeze(1) @ values).squeeze(1)


def seen_by_last(tokens: Tokens, question: Any, sinks_stop: int = 4, window_start: int = 0) -> Tensor:
    chosen = question.selection.to_mask(tokens.length)
    seen = chosen.repeat_interleave(SHAPE.num_query_heads // chosen.shape[0], 0)
    seen[:, :sinks_stop] = True
    seen[:, window_start:] = True
    return seen


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sink", [None, torch.tensor([1.0, -2.0, 4.0, 0.0])], ids=["no sink logit", "sink logit"])
def test_softcap_and_sink_logit_bend_sparse_attention_as_they_bend_dense(softcap: float | None, sink: Any) -> None:
    shape, tokens = SHAPE._replace(softcap=softcap), draw_tokens(61, 0)
    everything = torch.ones(4, 61, dtype=torch.bool)
    method = Quest(page_size=4)
    asked = spy(method)
    for plan, seen in (
        (Plan(), lambda: everything),
        (Plan(decode=Rule(method, SMALL_BUDGET)), lambda: seen_by_last(tokens, asked[-1], window_start=56)),
    ):
        attention = SparseAttention(shape, plan, 1, torch.empty(0), RunStats())
        prompt, last = tokens.part(0, 60), tokens.part(60)
        attention.attend(Chunk(*(tensor[None] for tensor in prompt), [60]), sink_logit=sink)
        answer = attention.attend(Chunk(*(tensor[None] for tensor in last), [1]), 1, sink_logit=sink)
        assert_same_answer(answer[0, :, 0], formula(tokens, seen(), shape, sink), "not what the model defines")


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_prompt_is_attended_as_the_model_defines_it_in_one_chunk_or_many(softcap: float | None) -> None:
    shape, tokens = SHAPE._replace(softcap=softcap), draw_tokens(40, 0)
    for cuts in ([], [7, 8, 30]):
        answer = Runner(Plan(), shape=shape).feed_all(tokens, 40, cuts)
        for position in (0, 6, 7, 29, 39):
            past = tokens.part(0, position + 1)
            expected = formula(past, torch.ones(4, position + 1, dtype=torch.bool), shape)
            assert_same_answer(answer[:, position], expected, f"position {position}")


@dataclass(frozen=True)
class Listens(OracleTokens):
    """Writes down what happens to it."""

    events: Any = None

    def observe(
        self, state: Any, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        self.events.append(("observe", start, start + keys.shape[1], queries is not None and queries.shape[1]))

    def select(self, *given: Any) -> Selection:
        self.events.append(("select", given[3], given[6].length))
        return super().select(*given)


def test_tokens_are_stored_then_observed_by_every_method_then_selected_from() -> None:
    prefill: list[Any] = []
    decode: list[Any] = []
    plan = Plan(
        prefill=Rule(Listens(events=prefill), Budget(tokens=60, sinks=0, window=8, dense_layers=())),
        decode=Rule(Listens(events=decode), SMALL_BUDGET),
    )
    Runner(plan).feed_all(draw_tokens(514, 0), 512, [256, 512, 513])
    assert decode == [
        ("observe", 0, 256, 256),
        ("observe", 256, 512, 256),
        ("observe", 512, 513, 1),
        ("select", 512, 513),
        ("observe", 513, 514, 1),
        ("select", 513, 514),
    ]
    assert [event for event in prefill if event[0] == "observe"] == [event for event in decode if event[0] == "observe"]
    assert [event for event in prefill if event[0] == "select"] == [("select", 256, 512)]


def test_segments_are_cut_at_absolute_positions_wherever_a_chunk_begins() -> None:
    method = OracleTokens()
    asked = spy(method)
    plan = Plan(prefill=Rule(method, Budget(tokens=60, sinks=0, window=8, dense_layers=())))
    Runner(plan).feed_all(draw_tokens(1100, 0), 1100, [700, 701])
    assert [(question.start, question.start + question.num_queries) for question in asked] == [
        (256, 512),
        (512, 700),
        (700, 701),
        (701, 768),
        (768, 1024),
        (1024, 1100),
    ]


def test_prompt_tokens_follow_the_prefill_rule_and_generated_ones_the_decode_rule() -> None:
    plan = Plan(
        prefill=Rule(StreamingLLM(), Budget(tokens=8, dense_layers=())), decode=Rule(OracleTokens(), SMALL_BUDGET)
    )
    runner = Runner(plan)
    runner.feed(draw_tokens(60, 0), decode_tokens=5)
    report = runner.stats.report()["phases"]
    assert report["prefill"]["queries"] == 55
    assert report["prefill"]["visible_tokens"] <= 8
    assert report["decode"]["queries"] == 5
    assert report["decode"]["visible_tokens"] == 24


def test_a_row_shorter_than_the_generated_tokens_holds_generated_tokens_only() -> None:
    runner = Runner(Plan(decode=Rule(OracleTokens(), SMALL_BUDGET)), num_rows=3)
    runner.feed(draw_tokens(9, 0), draw_tokens(2, 1), None, decode_tokens=3)
    assert runner.stats.phase("prefill").queries == 6
    assert runner.stats.phase("decode").queries == 5
    assert runner.store.lengths == [9, 2, 0]


@pytest.mark.parametrize("empty_row", [False, True])
@pytest.mark.parametrize("page_size", [4, 16, 5])  # the same pages, multiples, and sizes that share no factor
@pytest.mark.parametrize("method", [Quest, OraclePages, OracleTokens, RememberedMeans], ids=lambda cls: cls.__name__)
def test_a_plan_that_changes_goes_on_as_if_it_had_been_there_all_along(
    method: Any, page_size: int, empty_row: bool
) -> None:
    tokens = draw_tokens(86, 0)
    knobs = {} if method is OracleTokens else {"page_size": page_size}
    budget = Budget(tokens=52, sinks=2, window=3, dense_layers=())
    after = Plan(decode=Rule(method(**knobs), budget))
    runner = Runner(Plan(decode=Rule(Quest(page_size=4), budget)), num_rows=2)
    other = None if empty_row else tokens.part(0, 30)
    runner.feed(tokens.part(0, 80), other)
    runner.feed(tokens.part(80, 83), None, decode_tokens=3)
    runner.attention.replan(after)
    answer = runner.feed(tokens.part(83), None, decode_tokens=3)[0]
    assert_same_answer(answer, answers(after, tokens, 80)[:, 83:], "the new plan answers differently")


@pytest.mark.parametrize("sources", [[0], [1], [0, 1, 1, 0], [1, 1]])
def test_a_batch_can_shrink_and_grow_when_it_forks(sources: list[int]) -> None:
    plan = Plan(decode=Rule(RememberedMeans(), SMALL_BUDGET))
    prompts, new = [draw_tokens(50, 0), draw_tokens(41, 1)], draw_tokens(3, 2)
    runner = Runner(plan, num_rows=2)
    runner.feed(*prompts)
    runner.fork(sources)
    outputs = runner.feed(*[new] * len(sources), decode_tokens=3)
    for source, output in zip(sources, outputs):
        alone = answers(plan, prompts[source].then(new), prompts[source].length)
        assert_same_answer(output, alone[:, -3:], f"a copy of row {source}")


def test_dense_layers_and_short_contexts_are_dense_and_others_are_not() -> None:
    budget = Budget(tokens=24, sinks=4, window=4, dense_layers=(0, 5), min_context=40)
    for layer, length, sparse in [(0, 60, 0), (5, 60, 0), (1, 60, 1), (1, 39, 0), (1, 40, 1)]:
        runner = Runner(Plan(decode=Rule(Quest(page_size=4), budget)), shape=SHAPE._replace(layer=layer))
        runner.feed_all(draw_tokens(length, 0), length - 1, [length - 1])
        assert runner.stats.phase("decode").sparse_queries == sparse, (layer, length)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_answers_have_the_dtype_of_the_queries_and_nearly_the_float32_values(dtype: torch.dtype) -> None:
    plan, tokens = Plan(decode=Rule(OracleTokens(), SMALL_BUDGET)), draw_tokens(61, 0)
    rounded = Tokens(*(tensor.to(dtype) for tensor in tokens))
    attention = SparseAttention(SHAPE, plan, 1, rounded.keys, RunStats())
    attention.attend(Chunk(*(tensor[None] for tensor in rounded.part(0, 60)), [60]))
    answer = attention.attend(Chunk(*(tensor[None] for tensor in rounded.part(60)), [1]), 1)
    assert answer.dtype == dtype
    assert attention.store.keys.dtype == dtype
    exact = answers(plan, Tokens(*(tensor.float() for tensor in rounded)), 60)[:, 60:]
    torch.testing.assert_close(answer[0].float(), exact, rtol=0.02, atol=0.02)


@dataclass(frozen=True)
class Answers(Method):
    """Selects what it is told to, whatever the question."""

    selection: Any = None
    size: int = 4
    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")

    @property
    def unit_size(self) -> int:
        return self.size

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        return self.selection


def attended(selection: Selection, size: int = 4, length: int = 61) -> tuple[Tensor, Tokens]:
    tokens = draw_tokens(length, 0)
    plan = Plan(decode=Rule(Answers(selection, size), Budget(tokens=40, sinks=4, window=4, dense_layers=())))
    return answers(plan, tokens, length - 1)[:, -1], tokens


@pytest.mark.parametrize("num_heads", [1, 2, 4])  # shared by the layer, per KV head, per query head
def test_heads_see_the_units_of_their_row(num_heads: int) -> None:
    units = torch.tensor([[2, 5, 9], [3, 5, -1], [1, -1, -1], [-1, -1, -1]])[:num_heads]
    answer, tokens = attended(Selection(units, 4))
    seen = Selection(units, 4).to_mask(61).repeat_interleave(4 // num_heads, 0)
    seen[:, :4] = seen[:, 56:] = True
    assert_same_answer(answer, formula(tokens, seen), "other tokens were attended")


@pytest.mark.parametrize("size", [1, 2, 6, 12, 16])  # units below, at odds with and above the pages of the store
def test_units_need_not_be_pages(size: int) -> None:
    """The store of this plan has pages of 4; its prefill rule would choose among larger or smaller units."""
    tokens = draw_tokens(512 + 90, 0)
    budget = Budget(tokens=120, sinks=0, window=16, dense_layers=())
    plan = Plan(Rule(OraclePages(page_size=size), budget), Rule(Quest(page_size=4), SMALL_BUDGET))
    assert plan.page_size == 4
    alone = Plan(prefill=Rule(OraclePages(page_size=size), budget))
    assert alone.page_size == (None if size == 1 else size)
    assert_same_answer(answers(plan, tokens, tokens.length), answers(alone, tokens, tokens.length), "pages mattered")


def test_a_weighted_unit_counts_as_often_as_its_weight_says() -> None:
    units = torch.tensor([[2, 5, -1], [3, -1, -1]])
    weight = torch.log(torch.tensor([[3.0, 1.0, 1.0], [2.0, 1.0, 1.0]]))
    answer, tokens = attended(Selection(units, 4, log_weight=weight))
    copies = [[*range(8, 12)] * 3 + [*range(20, 24)], [*range(12, 16)] * 2]
    for head in range(4):
        chosen = torch.tensor([*range(4), *copies[head // 2], *range(56, 61)])
        keys, values = tokens.keys[head // 2, chosen], tokens.values[head // 2, chosen]
        expected = (tokens.queries[head, -1] @ keys.T * SHAPE.scale).softmax(-1) @ values
        assert_same_answer(answer[head], expected, f"head {head}")


def test_an_estimate_of_the_rest_is_merged_as_if_its_tokens_had_been_attended() -> None:
    tokens = draw_tokens(61, 0)
    rest = torch.tensor([*range(4, 8), *range(12, 56)])
    keys, values = (tensor[:, rest].repeat_interleave(2, 0) for tensor in (tokens.keys, tokens.values))
    logits = tokens.queries[:, -1:] @ keys.mT * SHAPE.scale
    extra = Part((logits.softmax(-1) @ values)[None], logits.logsumexp(-1)[None])
    answer, _ = attended(Selection(torch.tensor([[2]]), 4, extra=extra))
    assert_same_answer(answer, formula(tokens, torch.ones(4, 61, dtype=torch.bool)), "an exact rest is dense")


def test_a_selection_of_nothing_leaves_what_is_always_visible() -> None:
    always = torch.zeros(4, 61, dtype=torch.bool)
    always[:, :4] = always[:, 56:] = True
    for units in (torch.full((2, 3), -1), torch.zeros(2, 0, dtype=torch.int64)):
        answer, tokens = attended(Selection(units, 4))
        assert_same_answer(answer, formula(tokens, always), "something else was attended")


def test_mass_budgets_tell_the_method_what_is_always_visible() -> None:
    shape, tokens = revealing_tokens(80, 0)
    method = OracleTokens(heads="query")
    asked = spy(method)
    plan = Plan(decode=Rule(method, Budget(mass=0.9, sinks=4, window=4, dense_layers=())))
    Runner(plan, shape=shape).feed_all(tokens, 79, [79])
    logits = (tokens.queries[:, -1:] @ tokens.keys.repeat_interleave(2, 0).mT * shape.scale).squeeze(1)
    expected = torch.cat([logits[:, :4], logits[:, -4:]], 1).logsumexp(-1)
    torch.testing.assert_close(asked[0].limit.always_lse[:, 0], expected, rtol=1e-4, atol=1e-4)
    assert asked[0].limit.mass == 0.9
