"""Page scores of a decode step: every kind's formula, one row per head or per group, whatever lies around."""

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, needs_triton
from kernels.decode_cases import DecodeCase, draw_case, exact_scores, of_candidates
from kernels.decode_checks import error_ratio
from kernels.paged_cases import distance
from torch import Tensor

from kvsift.kernels.page_summary import SUMMARIES
from kvsift.kernels.score_pages import score_pages, score_pages_reference, score_pages_triton

SHAPES = [  # (KV heads, group, head_dim, page_size), and whether the heads of a group share a row
    ((2, 1, 16, 4), True),  # no grouping
    ((1, 3, 12, 4), True),  # group and head_dim not powers of two
    ((1, 3, 12, 4), False),
]
if DEVICE == "cuda":  # real widths
    SHAPES = [((2, 1, 64, 16), True), ((1, 3, 80, 16), False), ((2, 2, 96, 8), False)]
    SHAPES += [((4, 4, 128, 16), True), ((1, 8, 256, 32), True)]
LENGTHS = [300, 1, 61]  # more candidates than a program takes; a single token; a partial last page


def run(function: object, case: DecodeCase, shared: bool) -> Tensor:
    scores = function(  # type: ignore[operator]
        case.queries, case.summary, case.kv.table, case.spans, kind=case.kind, scale=case.scale, shared=shared
    )
    return of_candidates(case, scores)


@needs_triton
@pytest.mark.parametrize("kind", SUMMARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "shared"), SHAPES, ids=str)
def test_scores_are_as_near_to_float64_as_the_formula_in_their_dtype(
    shape: tuple[int, int, int, int], shared: bool, dtype: torch.dtype, kind: str
) -> None:
    case = draw_case(LENGTHS, *shape, dtype, kind=kind)
    exact, formula = exact_scores(case, shared), exact_scores(case, shared, dtype)
    for function in (score_pages_reference, score_pages_triton):
        scores = run(function, case, shared)
        assert scores.dtype == torch.float32
        assert error_ratio(scores, formula, exact) <= 2
        if dtype != torch.float32:  # the order of pages must not hang on the dtype of the keys
            assert distance(scores, exact) <= distance(formula, exact) / 16


@needs_triton
@pytest.mark.parametrize("group", [1, 3])
def test_a_row_does_not_depend_on_its_neighbours_or_on_where_its_pages_lie(group: int) -> None:
    case = draw_case(LENGTHS, 2, group, 16, 4, torch.float16)
    together = run(score_pages_triton, case, True)
    order = torch.randperm(case.summary.shape[1], generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for row in range(3):
        table = order.argsort()[case.kv.table[row : row + 1].long()].int()
        alone = case._replace(
            queries=case.queries[row : row + 1], summary=case.summary[:, order], spans=case.spans[row : row + 1],
            kv=case.kv._replace(table=table),
        )  # fmt: skip
        assert torch.equal(run(score_pages_triton, alone, True)[0], together[row])


@needs_triton
@pytest.mark.parametrize("group", [1, 3])
def test_heads_that_share_a_row_score_as_the_best_of_them(group: int) -> None:
    case = draw_case(LENGTHS, 2, group, 16, 4, torch.float16)
    apart = run(score_pages_triton, case, False).unflatten(1, (2, group)).amax(2)
    assert error_ratio(run(score_pages_triton, case, True), apart, exact_scores(case, True)) <= 2


@needs_triton
def test_summaries_may_be_a_view_of_something_wider() -> None:
    case = draw_case(LENGTHS, 2, 3, 16, 4, torch.float16)
    wide = torch.full((2, case.summary.shape[1] + 3, 40), torch.nan, dtype=torch.float16, device=DEVICE)
    view = wide[:, 3:, 4:36]
    view.copy_(case.summary)
    own = run(score_pages_triton, case, True)
    assert error_ratio(run(score_pages_triton, case._replace(summary=view), True), own, exact_scores(case, True)) <= 2


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_keys_do_not_overflow(dtype: torch.dtype) -> None:
    """|q| |k| head_dim exceeds 65504, the largest float16."""
    case = draw_case(LENGTHS, 1, 3, 16, 4, dtype)
    case = case._replace(queries=30 * torch.ones_like(case.queries), summary=1000 * torch.ones_like(case.summary))
    exact = exact_scores(case, True)
    assert torch.equal(run(score_pages_triton, case, True).double(), exact)


@pytest.mark.parametrize("shared", [True, False], ids=["per KV head", "per query head"])
def test_the_dispatcher_takes_what_the_tensors_need(shared: bool) -> None:
    case = draw_case(LENGTHS, 2, 3, 16, 4, torch.float32)
    torch.testing.assert_close(run(score_pages, case, shared), run(score_pages_reference, case, shared))
