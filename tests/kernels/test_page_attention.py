"""Split attention over listed pages, or all of them: the textbook formula, and nothing behind the length."""

from typing import Any

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, crossed, needs_triton
from kernels.decode_cases import DecodeCase, Lists, draw_case, everything, exact_attention, tokens_of
from kernels.decode_checks import error_ratio
from kernels.paged_cases import plain
from torch import Tensor

import kvsift.kernels.page_attention as module
from kvsift.kernels.page_attention import (
    SplitSpace,
    page_attention,
    page_attention_reference,
    page_attention_triton,
    split_count,
)

SHAPES = [  # (KV heads, group, head_dim, page_size)
    (2, 1, 16, 8),  # no grouping
    (1, 3, 12, 4),  # group and head_dim not powers of two
    (2, 2, 16, 16),  # the usual page
]
if DEVICE == "cuda":  # real widths
    SHAPES = [(1, 1, 64, 8), (2, 3, 80, 16), (1, 4, 96, 32), (4, 8, 128, 16), (2, 2, 256, 16), (1, 12, 128, 16)]
    SHAPES += [(2, 8, 512, 16)]
LENGTHS = [250, 1, 61, 64]  # two splits; a single token; a partial and a full last page


def lists_of(case: DecodeCase, shared: bool) -> Lists:
    """Random pages of every row, its last one among them; no list is full."""
    generator = torch.Generator().manual_seed(1)
    held = (-(-case.kv.lengths // case.kv.page_size)).tolist()
    pages, counts = case.new_lists(shared, max(held))
    for row, pages_held in enumerate(held):
        for head in range(pages.shape[1]):
            wanted = 1 + int(torch.randint(0, pages_held, (1,), generator=generator))
            chosen = torch.randperm(pages_held - 1, generator=generator)[: wanted - 1].tolist()
            pages[row, head, :wanted] = torch.tensor([*sorted(chosen), pages_held - 1])
            counts[row, head] = wanted
    return pages, counts


def attend(function: Any, case: DecodeCase, lists: Lists | tuple[None, None], **how: Any) -> Tensor:
    output = function(case.queries, case.kv, *lists, scale=case.scale, **how)
    assert output.shape == case.queries.shape
    assert output.dtype == case.queries.dtype
    return output  # type: ignore[no-any-return]


def sinks(case: DecodeCase) -> Tensor:
    return torch.linspace(-3, 5, case.queries.shape[1], device=DEVICE).to(case.queries)


@needs_triton
@crossed(
    shape=SHAPES, dtype=DTYPES, rows=["per KV head", "per query head", "everything"], softcap=[None, 3.0],
    in_8_bits=[False, True],
)  # fmt: skip
def test_answers_are_at_most_twice_as_far_from_float64_as_the_reference_in_their_dtype(
    shape: tuple[int, int, int, int], dtype: torch.dtype, rows: str, softcap: float | None, in_8_bits: bool
) -> None:
    case = draw_case(LENGTHS, *shape, dtype, in_8_bits=in_8_bits)
    lists = everything(case.kv, case.kv.num_kv_heads) if rows == "everything" else lists_of(case, rows == "per KV head")
    given = (None, None) if rows == "everything" else lists
    how = {"softcap": softcap, "sink_logit": None if softcap is None else sinks(case)}
    exact, formula = (
        exact_attention(case.queries, case.kv, lists, scale=case.scale, dtype=each, **how)
        for each in (torch.float64, dtype)
    )
    own = attend(page_attention_reference, case._replace(kv=plain(case.kv, dtype)), given, **how)
    if dtype != torch.float32:  # in which both are as good as float32 can be, and which is better is chance
        assert error_ratio(own, formula, exact) <= 2
    assert error_ratio(attend(page_attention_triton, case, given, **how), own, exact) <= 2


@needs_triton
@pytest.mark.parametrize("listed", [True, False])
def test_tokens_shown_are_counted_and_the_workspace_is_left_as_it_was(listed: bool) -> None:
    case = draw_case(LENGTHS, 2, 2, 16, 8, torch.float16)
    lists = lists_of(case, True) if listed else everything(case.kv, 2)
    given = lists if listed else (None, None)
    splits = 5  # not what it would take by itself
    space = SplitSpace.make(len(LENGTHS) * 2, splits, 2, 16, torch.device(DEVICE))
    counted = {}
    for run, more in ((page_attention_reference, {}), (page_attention_triton, {"space": space})):
        visible = torch.full((len(LENGTHS),), 100, dtype=torch.int64, device=DEVICE)
        outputs = [attend(run, case, given, visible=visible, **more) for _ in range(2)]
        assert torch.equal(*outputs)
        counted[run] = visible.tolist()
    assert not space.arrived.any()
    expected = (100 + 2 * tokens_of(case.kv, lists)[1].sum((1, 2))).tolist()
    assert list(counted.values()) == [expected, expected]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_single_token_answers_with_its_value(dtype: torch.dtype) -> None:
    case = draw_case([1, 9], 2, 2, 16, 8, dtype)
    pages, counts = case.new_lists(True, 3)
    pages[:, :, 0], counts[:] = torch.tensor([0, 1], device=DEVICE)[:, None], 1
    for lists in ((pages, counts), (None, None)):
        output = attend(page_attention_triton, case, lists)
        value = case.kv.values[:, int(case.kv.table[0, 0]), 0]
        assert torch.equal(output[0], value.repeat_interleave(2, 0))
    alone = case.kv.values[:, int(case.kv.table[1, 1]), 0]  # the list shows the last page only
    assert torch.equal(attend(page_attention_triton, case, (pages, counts))[1], alone.repeat_interleave(2, 0))


@needs_triton
@pytest.mark.parametrize("rows", ["listed", "everything"])
def test_where_pages_lie_changes_nothing(rows: str) -> None:
    """Someone else's blocks, and the same pages in another order."""
    case, foreign = (draw_case(LENGTHS, 2, 3, 16, 8, torch.float16, foreign=foreign) for foreign in (False, True))
    assert foreign.kv.keys.stride() != case.kv.keys.stride()
    given = lists_of(case, True) if rows == "listed" else (None, None)
    order = torch.randperm(case.kv.keys.shape[1], generator=torch.Generator().manual_seed(1)).to(DEVICE)
    moved = case.kv._replace(
        keys=case.kv.keys[:, order], values=case.kv.values[:, order],
        table=order.argsort()[case.kv.table.long()].int(),
    )  # fmt: skip
    expected = attend(page_attention_triton, case, given)
    assert torch.equal(attend(page_attention_triton, case._replace(kv=moved), given), expected)
    lists = everything(case.kv, 2) if rows == "everything" else given
    exact = exact_attention(case.queries, case.kv, lists, scale=case.scale)  # type: ignore[arg-type]
    assert error_ratio(attend(page_attention_triton, foreign, given), expected, exact) <= 2


@needs_triton
def test_a_list_is_cut_into_no_more_splits_than_one_program_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a million tokens and more there were so many that Triton refused to merge them."""
    case = draw_case(LENGTHS, 2, 2, 16, 8, torch.float16)
    assert split_count(case.kv, 1 << 21, 2) <= 1024
    lists = lists_of(case, True)
    exact = exact_attention(case.queries, case.kv, lists, scale=case.scale)
    own = attend(page_attention_reference, case, lists)
    monkeypatch.setattr(module, "MOST_SPLITS", 2)  # of 32 that would take 8 tokens each
    monkeypatch.setattr(module, "SPLIT_TOKENS", 8)
    assert error_ratio(attend(page_attention_triton, case, lists), own, exact) <= 2


@needs_triton
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    case = draw_case(LENGTHS, 2, 3, 16, 8, torch.float16)
    pages, counts = lists_of(case, True)
    together = attend(page_attention_triton, case, (pages, counts))
    for row in range(len(LENGTHS)):
        own = slice(row, row + 1)
        kv = case.kv._replace(table=case.kv.table[own], lengths=case.kv.lengths[own])
        alone = case._replace(queries=case.queries[own], kv=kv)
        assert torch.equal(attend(page_attention_triton, alone, (pages[own], counts[own]))[0], together[row])


@needs_triton
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # tanh of a huge number, by way of infinity
def test_large_logits_do_not_overflow() -> None:
    case = draw_case(LENGTHS, 2, 2, 16, 8, torch.float32)
    for size in (1e4, -1e4):
        steep = case._replace(queries=size * case.queries)
        for lists in (lists_of(case, True), lists_of(case, False)):
            for softcap in (None, 50.0):
                exact = exact_attention(steep.queries, case.kv, lists, scale=case.scale, softcap=softcap)
                own = attend(page_attention_reference, steep, lists, softcap=softcap)
                assert error_ratio(attend(page_attention_triton, steep, lists, softcap=softcap), own, exact) <= 2


@pytest.mark.parametrize("rows", ["listed", "everything"])
def test_the_dispatcher_takes_what_the_tensors_need(rows: str) -> None:
    case = draw_case(LENGTHS, 2, 3, 16, 8, torch.float32)
    given = lists_of(case, True) if rows == "listed" else (None, None)
    output, expected = (attend(run, case, given) for run in (page_attention, page_attention_reference))
    torch.testing.assert_close(output, expected)


@needs_triton
@pytest.mark.parametrize("listed", [True, False])
def test_without_lists_only_dense_rows_are_attended_and_with_lists_only_the_others(listed: bool) -> None:
    case = draw_case(LENGTHS, 2, 2, 16, 8, torch.float16)
    given = lists_of(case, True) if listed else (None, None)
    below = torch.tensor([300, 1, 61, 65], dtype=torch.int32, device=DEVICE)
    active = [row for row, dense in enumerate([True, False, False, True]) if dense != listed]
    for run in (page_attention_reference, page_attention_triton):
        counted, expected = (torch.zeros(len(LENGTHS), dtype=torch.int64, device=DEVICE) for _ in range(2))
        whole = attend(run, case, given, visible=expected)
        out = torch.full_like(whole, 7.0)
        assert attend(run, case, given, dense_below=below, out=out, visible=counted) is out
        for row in range(len(LENGTHS)):
            assert torch.equal(out[row], whole[row] if row in active else torch.full_like(whole[row], 7.0))
            assert counted[row] == (expected[row] if row in active else 0)


@pytest.mark.parametrize("shared", [True, False], ids=["per KV head", "per query head"])
@pytest.mark.parametrize(
    "function", [page_attention_reference, pytest.param(page_attention_triton, marks=needs_triton)]
)
def test_heads_attend_the_lists_of_the_heads_that_are_named(function: Any, shared: bool) -> None:
    case = draw_case(LENGTHS, *next(shape for shape in SHAPES if shape[0] > 1), torch.float32)
    units, counts = lists_of(case, shared)
    heads = torch.arange(units.shape[1], dtype=torch.int32, device=DEVICE).flip(0)
    heads[0] = 0  # and one list twice
    moved = attend(function, case, (units[:, heads].contiguous(), counts[:, heads].contiguous()))
    assert torch.equal(attend(function, case, (units, counts), heads=heads), moved)
    assert not torch.equal(attend(function, case, (units, counts)), moved)
