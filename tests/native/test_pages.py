"""Page scores and the choice of pages against the summaries and the selection of the library."""

from __future__ import annotations

import pytest
import torch
from refusals import refused
from torch import Tensor

from kvsift import native
from kvsift.kernels.page_summary import SUMMARIES, page_scores, summarise
from kvsift.methods.scoring import top_units
from kvsift.native import twins


def pages(heads: int, num_pages: int, dim: int, dtype: torch.dtype, whole: bool = False) -> Tensor:
    """Summaries of random keys, of small whole numbers if scores are to tie exactly."""
    keys = torch.randint(-3, 4, (heads, num_pages, 16, dim)) if whole else torch.randn(heads, num_pages, 16, dim)
    return summarise("minmax", keys.to(dtype)) if num_pages else torch.zeros(heads, 0, 2 * dim).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("heads", "group", "dim", "num_pages"),
    [
        (2, 4, 128, 300),
        (1, 1, 64, 1),
        (2, 5, 80, 17),
        (1, 8, 256, 70),
        (8, 2, 96, 3),
        (2, 4, 128, 0),
        (1, 2, 128, 2500),
    ],
)
def test_scores_are_those_of_the_summary(
    level: str, heads: int, group: int, dim: int, num_pages: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    rows, queries = pages(heads, num_pages, dim, dtype), torch.randn(heads * group, dim).to(dtype)
    features = SUMMARIES["minmax"].features(queries.float() * dim**-0.5).unflatten(0, (heads, group))
    expected = page_scores(features, rows).flatten(0, 1)
    torch.testing.assert_close(native.page_scores(queries, rows, dim**-0.5), expected, rtol=1e-5, atol=1e-5)


def test_a_negative_scale_turns_the_bound_around(level: str) -> None:
    torch.manual_seed(1)
    rows, queries = pages(2, 40, 64, torch.float32), torch.randn(4, 64)
    expected = twins.page_scores(queries, rows, -0.3)
    torch.testing.assert_close(native.page_scores(queries, rows, -0.3), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_selections", [1, 2, 8])
@pytest.mark.parametrize("k", [0, 1, 30, 299, 300, 500])
def test_the_choice_is_that_of_a_method_ties_included(level: str, k: int, num_selections: int) -> None:
    torch.manual_seed(2)
    rows, queries = pages(2, 300, 64, torch.bfloat16, whole=True), torch.randint(-3, 4, (8, 64)).float()
    scores = twins.page_scores(queries, rows, 0.125).unflatten(0, (num_selections, -1)).amax(1)
    assert any(len(row.unique()) < 300 for row in scores)  # there are ties
    expected = top_units(scores, k)
    assert torch.equal(native.choose_pages(queries, rows, 0.125, k, num_selections), expected)
    assert torch.equal(twins.choose_pages(queries, rows, 0.125, k, num_selections), expected)


def test_equal_pages_are_chosen_from_the_front(level: str) -> None:
    rows = torch.zeros(1, 100, 128)
    assert native.choose_pages(torch.ones(1, 64), rows, 1.0, 5, 1).tolist() == [[0, 1, 2, 3, 4]]


def test_choices_do_not_depend_on_the_number_of_threads(level: str) -> None:
    torch.manual_seed(4)
    rows, queries = pages(2, 3000, 128, torch.bfloat16), torch.randn(8, 128).bfloat16()
    one, two = (native.choose_pages(queries, rows, 0.1, 128, 2, threads=threads) for threads in (1, 2))
    assert torch.equal(one, two)


def test_queries_that_rank_nothing_are_refused(core: None) -> None:
    rows = torch.zeros(1, 10, 128)
    for bad in (torch.nan, torch.inf):
        queries = torch.ones(1, 64)
        queries[0, 3] = bad
        with refused("not_finite: NaN or infinity"):
            native.choose_pages(queries, rows, 1.0, 5, 1)
    with refused("invalid_value"):
        native.choose_pages(torch.ones(4, 64), rows, 1.0, 5, 3)


@pytest.mark.parametrize("wrong", [None, torch.zeros(2, 4, 128).numpy()], ids=["None", "array"])
def test_what_is_no_tensor_is_refused(core: None, wrong: object) -> None:
    queries, rows = torch.randn(4, 64), pages(2, 4, 64, torch.float32)
    for given in ((wrong, rows), (queries, wrong)):
        with refused(f"invalid_tensor: {type(wrong).__name__} was given"):
            native.choose_pages(*given, 0.1, 2, 2)  # type: ignore[arg-type]
