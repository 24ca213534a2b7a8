"""The fast path of a decode step: the budget's arithmetic on the device, and the composed path's answers."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from contracts.harness import assert_same_answer, draw_tokens, poison
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.conftest import DEVICE
from torch import Tensor

from kvsift.kernels.page_spans import page_spans_triton
from kvsift.kernels.page_summary import SUMMARIES
from kvsift.kernels.paged import SpaceShape
from kvsift.kernels.split_attention import ESTIMATED_WHOLE
from kvsift.kernels.triton_shim import HAVE_TRITON
from kvsift.layer.accounting import RunStats
from kvsift.layer.paged_decode import (
    ALWAYS,
    DecodeBatch,
    DecodeLayer,
    StepMode,
    list_capacity,
    page_spans,
    reason_against,
    rule_of,
    unit_size_of,
)
from kvsift.layer.sparse_attention import SparseAttention
from kvsift.methods.base import Phase
from kvsift.methods.dense import Dense
from kvsift.methods.pages import PagedMethod
from kvsift.methods.quest import Quest
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import parse_plan
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
        twin, batch = (
            torch.full_like(spans, -7),
            DecodeBatch(on_device[:, None], lengths, page_size, [budget] * len(lengths)),
        )
        page_spans_triton(on_device, twin, page_size, batch.budgets)
        assert torch.equal(twin, spans)
        before, twin = on_device - 1, torch.full_like(spans, -7)
        page_spans_triton(before, twin, page_size, batch.budgets, batch.growth)
        assert torch.equal(twin, spans)
        assert torch.equal(before, on_device)
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
    assert list_capacity(Budget(tokens=10_000), 50, page_size) == 50
    assert list_capacity(Budget(tokens=256), 500, page_size) == 256 // page_size
    assert list_capacity(Budget(tokens=256, min_context=1000), 500, page_size) == -(-1000 // page_size)


@dataclass(frozen=True)
class ByMean(PagedMethod):
    """Of another package: pages by the mean of a summary that kernels write."""

    summaries: ClassVar[tuple[str, ...]] = ("mean_std",)

    def features(self, queries: Tensor) -> Tensor:
        return torch.nn.functional.pad(queries, (0, queries.shape[-1]))


@pytest.mark.parametrize("decode", [None, Rule(Quest(page_size=4), Budget(tokens=256))], ids=["dense", "quest"])
def test_a_summary_that_only_prefill_reads_refuses_nothing(
    decode: Rule | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps write it by its torch functions (``test_new_summary_kind``)."""
    monkeypatch.setitem(SUMMARIES, "wide", SUMMARIES["minmax"]._replace(row_twin=None))
    assert reason_against(Plan(prefill=Rule(InPrefill(page_size=4), Budget(tokens=256)), decode=decode)) is None


class InPrefill(ByMean):
    summaries = ("wide",)
    phases: ClassVar[tuple[Phase, ...]] = ("prefill",)


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

    def __init__(self, plan: str | Plan, shape: LayerShape = SHAPE, sink_logit: Tensor | None = None) -> None:
        longest = [length + STEPS for length in LENGTHS]
        plan = parse_plan(plan) if isinstance(plan, str) else plan
        self.stats, self.sink_logit, rule = RunStats(probe_every=0), sink_logit, rule_of(plan)
        self.composed = SparseAttention(
            shape, plan, len(LENGTHS), torch.empty(0, device=DEVICE), self.stats, max(longest)
        )
        self.store = self.composed.store
        self.store.reserve_rows(longest)
        self.tokens = [draw_tokens(length, seed, shape) for seed, length in enumerate(longest)]
        for row, length in enumerate(LENGTHS):
            self._feed(row, 0, length, decode_tokens=0)
        self.stats.clear()
        planned = [torch.tensor(self.store.table.planned(row)) for row in range(len(LENGTHS))]
        table = torch.nn.utils.rnn.pad_sequence(planned, batch_first=True).int().to(DEVICE)
        self.batch = DecodeBatch(
            table, LENGTHS, self.store.page_size, [rule and rule.budget] * len(LENGTHS),
            unit_size=unit_size_of([rule], self.store.page_size),
        )  # fmt: skip
        self.layer = DecodeLayer(
            shape, self.batch, self.store.keys, self.store.values,
            self.store.summaries[rule.method.summaries[0]] if rule else None, rule and rule.method,
            sink_logit=sink_logit, estimated=torch.zeros(len(LENGTHS), dtype=torch.int64, device=DEVICE),
        )  # fmt: skip

    def check(self, dense: bool = False) -> None:
        """Some steps of every row: the same answers, and as many visible tokens."""
        for step in range(STEPS):
            composed = [self._feed(row, length + step, length + step + 1, 1) for row, length in enumerate(LENGTHS)]
            if DEVICE == "cpu":
                poison(self.store)
            self.batch.advance()
            assert self.batch.lengths.tolist() == self.store.lengths
            queries = [tokens.queries[:, length + step] for tokens, length in zip(self.tokens, LENGTHS)]
            fast = self.layer.attend(torch.stack(queries).to(DEVICE), "dense" if dense else "sparse")
            assert_same_answer(fast, torch.stack(composed), f"step {step}")
        tally = self.stats.tally(SHAPE.layer, "decode")
        shape = self.layer.shape
        lists = 0 if dense else shape.num_kv_heads if self.layer.shares else shape.num_query_heads
        assert int(self.layer.visible.sum()) == round(lists * float(tally.visible_tokens))
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


SKETCH = "sketch:dense_layers=none"  # pages of 16 are for the compiled core, which rounds queries


@pytest.mark.parametrize("page_size", [4, 8])
@pytest.mark.parametrize(
    "settings_of_plan",
    [
        "budget=30:sinks=4:window=5",
        "budget=30:sinks=4:window=5:bits=2",
        "budget=30:sinks=4:window=5:rest=false",
        "budget=30:sinks=3:window=1:heads=kv",  # candidates end in the page being filled
        "ratio=0.4:sinks=2:window=6",
        "ratio=0.01:sinks=2:window=6:bits=2",
        "budget=30:sinks=4:window=5:min_context=65",  # which the third row reaches on its way
    ],
)
def test_steps_of_sketches_answer_and_count_as_the_composed_path_does(settings_of_plan: str, page_size: int) -> None:
    both = SideBySide(f"{SKETCH}:{settings_of_plan}:page_size={page_size}")
    both.check()
    tally = both.stats.tally(SHAPE.layer, "decode")
    share = float(both.layer.estimated.sum()) / ESTIMATED_WHOLE / SHAPE.num_query_heads
    assert share == pytest.approx(float(tally.estimated), abs=1e-4 * tally.estimated_queries)
    assert (tally.estimated_queries > 0) == both.layer.estimates == ("rest=false" not in settings_of_plan)


@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_sketches_of_groups_of_any_size_with_softcap_and_sink_logit(num_kv_heads: int) -> None:
    shape, sinks = SHAPE._replace(num_kv_heads=num_kv_heads), torch.tensor([1.0, -2.0, 4.0, 0.0], device=DEVICE)
    plan = f"{SKETCH}:page_size=8:budget=30:sinks=4:window=5"
    SideBySide(plan, shape).check()
    SideBySide(plan, shape._replace(softcap=3.0), sinks).check()


def test_a_method_with_features_of_its_own_answers_as_on_the_composed_path() -> None:
    budget = Budget(tokens=40, sinks=4, window=5, dense_layers=())
    SideBySide(Plan(decode=Rule(ByMean(page_size=4), budget))).check()


@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_groups_of_any_size(num_kv_heads: int) -> None:
    both = SideBySide(f"{QUEST}:budget=40:sinks=4:window=5", SHAPE._replace(num_kv_heads=num_kv_heads))
    both.check()
    assert both.layer.lists is not None
    pages, counts = both.layer.lists
    assert pages.shape == (3, num_kv_heads, both.batch.capacity)
    assert counts.tolist() == [[10] * num_kv_heads, [3] * num_kv_heads, [10] * num_kv_heads]


@pytest.mark.parametrize("plan", [f"{QUEST}:budget=40:sinks=4:window=5", "dense"])
def test_softcap_and_sink_logit_bend_both_paths_alike(plan: str) -> None:
    sinks = torch.tensor([1.0, -2.0, 4.0, 0.0], device=DEVICE)
    SideBySide(plan, SHAPE._replace(softcap=3.0), sinks).check(dense=plan == "dense")


@pytest.mark.parametrize("plan", ["dense", "quest:page_size=4:budget=40:sinks=4:window=5:dense_layers=2"])
def test_dense_layers_show_everything(plan: str) -> None:
    SideBySide(plan).check(dense=True)


def test_buffers_stay_where_they_are() -> None:
    """Captured steps read and write the memory they were captured with."""
    both = SideBySide(f"{QUEST}:budget=40:sinks=4:window=5")
    buffers = (both.batch.lengths, both.batch.spans, *(both.layer.lists or ()), both.layer.visible)
    before = [buffer.data_ptr() for buffer in buffers if buffer is not None]
    both.check()
    after = (both.batch.lengths, both.batch.spans, *(both.layer.lists or ()), both.layer.visible)
    assert [buffer.data_ptr() for buffer in after if buffer is not None] == before


def test_one_workspace_serves_layers_of_the_same_shape() -> None:
    batch = DecodeBatch(torch.zeros(1, 4, dtype=torch.int32), [1], 4, [None])
    made: list[int] = []

    def make(size: int) -> int:
        made.append(size)
        return len(made)

    assert [batch.space(make, size, key=(size,)) for size in (3, 5, 3)] == [1, 2, 1]
    assert made == [3, 5]


def test_launches_of_any_number_of_rows_share_the_memory_that_the_largest_takes() -> None:
    class Space(NamedTuple):
        scores: Tensor
        words: Tensor
        launches: Tensor

    batch = DecodeBatch(torch.zeros(4, 4, dtype=torch.int32), [1] * 4, 4, [None] * 4)
    batch.sizes = range(1, 5)

    def shapes(rows: int) -> tuple[SpaceShape, ...] | None:
        """The launch takes no four rows, and most memory for two."""
        if rows == 4:
            return None
        words = SpaceShape((rows, 1 if rows > 1 else 2), torch.int64)
        return SpaceShape((rows, 6 // rows), torch.float32, lasts=False), words, SpaceShape((rows,), torch.int32)

    spaces = {rows: batch.launch_space(Space, shapes, rows, ("layers",)) for rows in (3, 1, 2, 4, 5)}
    assert spaces[4] is spaces[5] is None
    assert [spaces[rows].scores.shape for rows in (1, 2, 3)] == [(1, 6), (2, 3), (3, 2)]
    assert len({spaces[rows].scores.data_ptr() for rows in (1, 2, 3)}) == 1
    for tensor in ("words", "launches"):  # which launches leave for those alone whose rows lie alike
        one, two, three = (getattr(spaces[rows], tensor).data_ptr() for rows in (1, 2, 3))
        assert one != two == three
        assert not getattr(spaces[3], tensor).any()
    assert batch.launch_space(Space, shapes, 3, ("layers",)) is spaces[3]
    assert batch.launch_space(Space, shapes, 3, ("others",)) is not spaces[3]


@pytest.mark.parametrize("plan", [f"{QUEST}:budget=40:sinks=4:window=5", f"{SKETCH}:budget=30:sinks=4:window=5"])
@pytest.mark.parametrize("mode", ["sparse", "dense", "mixed"])
def test_the_first_rows_are_attended_as_among_all(plan: str, mode: StepMode) -> None:
    both = SideBySide(f"{plan}:page_size=8" if "sketch" in plan else plan)
    both.layer.dense_below.fill_(62)
    queries = torch.randn(len(LENGTHS), SHAPE.num_query_heads, SHAPE.head_dim, device=DEVICE)
    for row, length in enumerate(LENGTHS):
        both._feed(row, length, length + 1, 1)
    both.batch.advance()
    found, visible = both.layer.attend(queries, mode), both.layer.visible.clone()
    out = torch.zeros_like(queries[:2])
    assert both.layer.attend(queries[:2], mode, out=out) is out
    assert torch.equal(out, found[:2])
    assert both.layer.visible.tolist() == [*(2 * visible[:2]).tolist(), int(visible[2])]


@pytest.mark.parametrize(
    "budgets", [[("budget=40", 0), None, ("budget=28", 62)], [("budget=40", 93), ("ratio=0.5", 0), ("budget=40", 60)]]
)
def test_rows_of_a_mixed_step_answer_and_count_as_in_steps_of_one_mode(budgets: list[tuple[str, int] | None]) -> None:
    plans = [None if each is None else f"{QUEST}:{each[0]}:sinks=4:window=5" for each in budgets]
    rules = [None if plan is None else rule_of(parse_plan(plan)) for plan in plans]
    below = [ALWAYS if each is None else each[1] for each in budgets]
    both = SideBySide(f"{QUEST}:budget=40:sinks=4:window=5")
    kv, method, summary = both.layer.kv, both.layer.method, both.layer.summary
    batch = DecodeBatch(kv.table, LENGTHS, kv.page_size, [rule and rule.budget for rule in rules])
    layer = DecodeLayer(
        SHAPE, batch, kv.keys, kv.values, summary, method, dense_below=torch.tensor(below).int().to(DEVICE)
    )
    alone = [DecodeBatch(kv.table, LENGTHS, kv.page_size, [rule and rule.budget] * 3) for rule in rules]
    pure = [DecodeLayer(SHAPE, each, kv.keys, kv.values, rule and summary, method) for each, rule in zip(alone, rules)]
    for step in range(STEPS):
        for row, length in enumerate(LENGTHS):
            both._feed(row, length + step, length + step + 1, 1)
        queries = torch.stack([tokens.queries[:, length + step] for tokens, length in zip(both.tokens, LENGTHS)])
        for each in (batch, *alone):
            each.advance()
        mixed = layer.attend(queries.to(DEVICE), "mixed")
        for row, each in enumerate(pure):
            dense = LENGTHS[row] + step + 1 < below[row]
            assert torch.equal(mixed[row], each.attend(queries.to(DEVICE), "dense" if dense else "sparse")[row])
    assert layer.visible.tolist() == [int(each.visible[row]) for row, each in enumerate(pure)]
    assert any(layer.visible.tolist())
