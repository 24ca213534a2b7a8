"""The fast path of a decode step: the budget's arithmetic on the device, and the composed path's answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from contracts.harness import assert_same_answer, draw_tokens, poison
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.conftest import DEVICE
from torch import Tensor

from kvsift.kernels.page_spans import page_spans_triton
from kvsift.kernels.page_summary import SUMMARIES
from kvsift.kernels.summary_rows import summary_pools
from kvsift.kernels.triton_shim import HAVE_TRITON
from kvsift.methods.base import Phase
from kvsift.methods.dense import Dense
from kvsift.methods.pages import PagedMethod
from kvsift.methods.quest import Quest
from kvsift.runtime.budget import Budget
from kvsift.runtime.paged_decode import (
    DecodeBatch,
    DecodeLayer,
    list_capacity,
    page_spans,
    reason_against,
    rule_of,
)
from kvsift.runtime.plan import Plan, Rule
from kvsift.runtime.sequence import SparseAttention
from kvsift.runtime.spec import parse_plan
from kvsift.runtime.stats import RunStats
from kvsift.types import Chunk, LayerShape

SHAPE = LayerShape(layer=2, num_query_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
LENGTHS = [90, 3, 61]  # a long row, one that all budgets show in full, one whose last page is partial
STEPS = 6  # across the end of a page


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    size: dict[str, Any] = draw(
        st.one_of(
            st.builds(lambda tokens: {"tokens": tokens}, st.integers(150, 2500)),
            st.builds(lambda ratio: {"ratio": ratio}, st.floats(1e-4, 1.0)),
        )
    )
    return Budget(
        sinks=draw(st.integers(0, 40)), window=draw(st.integers(1, 80)),
        min_context=draw(st.sampled_from([0, 0, 900, 2000])), **size,
    )  # fmt: skip


@settings(max_examples=60)
@given(budget=budgets(), page_size=st.sampled_from([1, 8, 16, 32]), start=st.integers(1, 3000))
def test_spans_are_what_the_budget_says_and_lists_have_room(budget: Budget, page_size: int, start: int) -> None:
    lengths = [*range(start, start + 2 * page_size + 2), 2 * start, 3999]
    capacity = list_capacity(budget, -(-max(lengths) // page_size), page_size)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    spans = page_spans(budget, on_device, page_size)
    assert spans.dtype == torch.int32
    if HAVE_TRITON:
        twin, size = torch.full_like(spans, -7), (budget.tokens, budget.ratio, budget.min_context)
        page_spans_triton(on_device, twin, page_size, budget.sinks, budget.window, *size)
        assert torch.equal(twin, spans)
    for length, (first, stop, chosen, held) in zip(lengths, spans.tolist()):
        candidates = budget.candidates(length - 1, page_size)
        units = min(budget.units(length - 1, page_size), candidates.count)
        if length < budget.min_context:
            units = candidates.count
        assert (first, stop, chosen, held) == (candidates.first, candidates.stop, units, -(-length // page_size))
        assert first + chosen + held - stop <= capacity
        assert held > stop, "the page being filled is not shown"


@pytest.mark.parametrize("page_size", [8, 16])
def test_lists_hold_no_more_than_there_is(page_size: int) -> None:
    assert list_capacity(None, 50, page_size) == 50
    assert list_capacity(Budget(tokens=10_000), 50, page_size) == 50
    assert list_capacity(Budget(tokens=256), 500, page_size) == 256 // page_size
    assert list_capacity(Budget(tokens=256, min_context=1000), 500, page_size) == -(-1000 // page_size)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("dense", None),
        ("quest:budget=256", None),
        ("quest:ratio=0.1:score_by=minmax_fp8:heads=query:page_size=32", None),
        ("quest:budget=256:compat=code", None),
        ("prefill=streaming_llm:budget=300,decode=quest:budget=256", None),
        ("prefill=streaming_llm:budget=300", None),
        ("streaming_llm:budget=256", "streaming_llm does not rank pages by a summary"),
        ("oracle_pages:budget=256", "oracle_pages does not rank pages by a summary"),
        ("quest:budget=256:page_size=24", "page_size=24 is not a power of two"),
        ("quest:budget=256:prefilter=8", "prefilter=8 ranks blocks first"),
        ("quest:mass=0.9", "mass= chooses as many pages as the scores ask for"),
        ("quest:budget=256:window=0", "window=0 lets the page being filled compete"),
        ("quest:budget=256:compat=paper", "window=0 lets the page being filled compete"),
    ],
)
def test_every_refusal_has_its_reason(plan: str, reason: str | None) -> None:
    found = reason_against(parse_plan(plan))
    assert found is None if reason is None else found is not None and found.startswith(reason)


@dataclass(frozen=True)
class MeanOnly(PagedMethod):
    """Of another package, by a summary of its own."""

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    summaries: ClassVar[tuple[str, ...]] = ("mean_only",)


@dataclass(frozen=True)
class MeanStd(MeanOnly):
    summaries: ClassVar[tuple[str, ...]] = ("mean_std",)


@pytest.mark.parametrize("decode", [None, Rule(Quest(), Budget(tokens=256))], ids=["dense", "quest"])
def test_a_summary_that_only_prefill_reads_keeps_steps_from_kernels_that_cannot_write_it(
    decode: Rule | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They met an assertion in the first captured step."""
    monkeypatch.setitem(SUMMARIES, "mean_only", SUMMARIES["mean_std"])
    plan = Plan(prefill=Rule(MeanOnly(), Budget(tokens=256)), decode=decode)
    assert reason_against(plan) == "no kernel writes page summaries of kind mean_only"
    with pytest.raises(AssertionError, match="mean_only"):
        summary_pools(dict.fromkeys(plan.summaries, torch.zeros(1, 4, 16)))


def test_a_method_that_scores_summaries_itself_is_not_said_to_have_none() -> None:
    reason = reason_against(Plan(decode=Rule(MeanStd(), Budget(tokens=256))))
    assert reason == "MeanStd scores page summaries in its own way"


def test_a_rule_that_skips_nothing_is_none() -> None:
    rule = Rule(Quest(), Budget(tokens=256))
    assert rule_of(Plan(decode=rule)) is rule
    assert rule_of(Plan()) is None
    assert rule_of(Plan(decode=Rule(Dense()))) is None


class SideBySide:
    """The composed path, and a layer of the fast one over the same pools.

    Args:
        plan: for both.
        shape: of the layer.
        sink_logit: [num_query_heads].
    """

    def __init__(self, plan: str, shape: LayerShape = SHAPE, sink_logit: Tensor | None = None) -> None:
        longest = [length + STEPS for length in LENGTHS]
        self.stats, self.sink_logit, rule = RunStats(probe_every=0), sink_logit, rule_of(parse_plan(plan))
        self.composed = SparseAttention(
            shape, parse_plan(plan), len(LENGTHS), torch.empty(0, device=DEVICE), self.stats, max(longest)
        )
        self.store = self.composed.store
        self.store.reserve_rows(longest)
        self.tokens = [draw_tokens(length, seed, shape) for seed, length in enumerate(longest)]
        for row, length in enumerate(LENGTHS):
            self._feed(row, 0, length, decode_tokens=0)
        self.stats.clear()
        planned = [torch.tensor(self.store.table.planned(row)) for row in range(len(LENGTHS))]
        table = torch.nn.utils.rnn.pad_sequence(planned, batch_first=True).int().to(DEVICE)
        self.batch = DecodeBatch(table, LENGTHS, self.store.page_size, rule and rule.budget)
        self.layer = DecodeLayer(
            shape, self.batch, self.store.keys, self.store.values,
            self.store.summaries[rule.method.summaries[0]] if rule else None, rule and rule.method,
            sink_logit=sink_logit,
        )  # fmt: skip

    def check(self, dense: bool = False) -> None:
        """Some steps of every row: the same answers, and as many tokens shown."""
        for step in range(STEPS):
            composed = [self._feed(row, length + step, length + step + 1, 1) for row, length in enumerate(LENGTHS)]
            if DEVICE == "cpu":
                poison(self.store)
            self.batch.advance()
            assert self.batch.lengths.tolist() == self.store.lengths
            queries = [tokens.queries[:, length + step] for tokens, length in zip(self.tokens, LENGTHS)]
            fast = self.layer.attend(torch.stack(queries).to(DEVICE), dense)
            assert_same_answer(fast, torch.stack(composed), f"step {step}")
        tally = self.stats.tally(SHAPE.layer, "decode")
        shape = self.layer.shape
        rows = shape.num_kv_heads if dense or self.layer.shares else shape.num_query_heads
        assert int(self.layer.visible) == round(rows * float(tally.visible_tokens))
        assert (tally.sparse_queries == 0) == dense, "the plan should have skipped something"

    def _feed(self, row: int, start: int, stop: int, decode_tokens: int) -> Tensor:
        """The last answer, [num_query_heads, head_dim]."""
        part = self.tokens[row].part(start, stop)
        chunk = Chunk(*(tensor[None].to(DEVICE) for tensor in part), [stop - start])
        return self.composed.attend(chunk, decode_tokens, self.sink_logit, first_row=row)[0, :, -1]


QUEST = "quest:page_size=4:dense_layers=none"


@pytest.mark.parametrize(
    "settings_of_plan",
    [
        "budget=40:sinks=4:window=5",
        "budget=40:sinks=4:window=5:heads=query",
        "budget=40:sinks=4:window=5:heads=kv",
        "budget=30:sinks=0:window=1",
        "budget=48:sinks=9:window=17",
        "budget=28:compat=code",
        "ratio=0.4:sinks=2:window=6",
        "ratio=0.01:sinks=2:window=6:heads=query",  # less than what is always shown: a page all the same
        "budget=40:sinks=4:window=5:min_context=65",  # which the third row reaches on its way
        *(f"budget=40:sinks=4:window=5:score_by={kind}" for kind in SUMMARIES),
    ],
)
def test_steps_answer_and_count_as_the_composed_path_does(settings_of_plan: str) -> None:
    SideBySide(f"{QUEST}:{settings_of_plan}").check()


@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_groups_of_any_size(num_kv_heads: int) -> None:
    both = SideBySide(f"{QUEST}:budget=40:sinks=4:window=5", SHAPE._replace(num_kv_heads=num_kv_heads))
    both.check()
    pages, counts = both.layer.pages, both.layer.counts
    assert pages is not None
    assert counts is not None
    assert pages.shape == (3, num_kv_heads, both.batch.capacity)
    assert counts.tolist() == [[10] * num_kv_heads, [3] * num_kv_heads, [10] * num_kv_heads]


@pytest.mark.parametrize("plan", [f"{QUEST}:budget=40:sinks=4:window=5", "dense"])
def test_softcap_and_sink_logit_bend_both_paths_alike(plan: str) -> None:
    sinks = torch.tensor([1.0, -2.0, 4.0, 0.0], device=DEVICE)
    SideBySide(plan, SHAPE._replace(softcap=3.0), sinks).check(dense=plan == "dense")


@pytest.mark.parametrize("plan", ["dense", "quest:page_size=4:budget=40:sinks=4:window=5:dense_layers=2"])
def test_dense_layers_show_everything(plan: str) -> None:
    SideBySide(plan).check(dense=True)


def test_a_layer_may_have_a_table_of_its_own() -> None:
    both = SideBySide(f"{QUEST}:budget=40:sinks=4:window=5")
    shape, batch, kv, method = both.layer.shape, both.batch, both.layer.kv, both.layer.method
    both.layer = DecodeLayer(shape, batch, kv.keys, kv.values, both.layer.summary, method, table=kv.table.clone())
    batch.table.fill_(10**6)
    both.check()


def test_buffers_stay_where_they_are() -> None:
    """Captured steps read and write the memory they were captured with."""
    both = SideBySide(f"{QUEST}:budget=40:sinks=4:window=5")
    buffers = (both.batch.lengths, both.batch.spans, both.layer.pages, both.layer.counts, both.layer.visible)
    before = [buffer.data_ptr() for buffer in buffers if buffer is not None]
    both.check()
    after = (both.batch.lengths, both.batch.spans, both.layer.pages, both.layer.counts, both.layer.visible)
    assert [buffer.data_ptr() for buffer in after if buffer is not None] == before


def test_one_workspace_serves_layers_of_the_same_shape() -> None:
    batch = DecodeBatch(torch.zeros(1, 4, dtype=torch.int32), [1], 4, None)
    made: list[int] = []

    def make(size: int) -> int:
        made.append(size)
        return len(made)

    assert [batch.space(make, size, key=(size,)) for size in (3, 5, 3)] == [1, 2, 1]
    assert made == [3, 5]
