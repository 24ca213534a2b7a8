"""What scoring methods share: ranking, ties, masses; and what a bare method says about itself."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from contracts.harness import SHAPE
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from torch import Tensor

from kvsift.methods import BUILT_IN, catalogue, method_class
from kvsift.methods.base import Method
from kvsift.methods.pages import PagedMethod
from kvsift.methods.scoring import ScoringMethod, _top_without_sync, top_units
from kvsift.types import Candidates, KVReader, LayerShape, Limit


@given(
    scores=st.lists(st.lists(st.integers(-3, 3), min_size=7, max_size=7), min_size=1, max_size=4), k=st.integers(0, 9),
    keep=st.integers(0, 9),
)  # fmt: skip
def test_the_best_units_ascending_with_ties_to_the_lower_id(scores: list[list[int]], k: int, keep: int) -> None:
    chosen = top_units(torch.tensor(scores, dtype=torch.float32), k)
    for row, units in zip(scores, chosen.tolist()):
        assert units == sorted(sorted(range(7), key=lambda unit: (-row[unit], unit))[:k])
    wanted = torch.full((len(scores),), keep)
    kept = top_units(torch.tensor(scores, dtype=torch.float32), k, wanted)
    for row, units in zip(scores, kept.tolist()):
        best = sorted(sorted(range(7), key=lambda unit: (-row[unit], unit))[: min(k, keep)])
        assert units == best + [-1] * (min(k, 7) - len(best))


def test_ties_go_to_the_lower_id_in_rows_too_long_for_a_simple_sort() -> None:
    scores = torch.zeros(2, 5000)
    scores[1, 3000] = 1.0
    assert top_units(scores, 3).tolist() == [[0, 1, 2], [0, 1, 3000]]


@pytest.mark.parametrize("levels", [2, 50, 10**9])  # of the scores: nearly all tie, some do, none does
@pytest.mark.parametrize("k", [1, 37, 999, 1000])
def test_the_best_units_are_those_of_a_full_sort(levels: int, k: int) -> None:
    generator = torch.Generator().manual_seed(levels + k)
    scores = torch.randint(-levels, levels, (6, 1000), generator=generator).float()
    scores[0], scores[1, ::2], scores[2, 100:] = 0.0, -torch.inf, -torch.inf
    scores[3, ::3] = -0.0
    check_top(scores, k)


def check_top(scores: Tensor, k: int) -> None:
    expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
    assert torch.equal(top_units(scores, k), expected)
    best = scores.topk(k).values
    least = best.masked_fill(best.isnan(), torch.inf).amin(-1, keepdim=True)
    assert torch.equal(_top_without_sync(scores, least, k), expected), "as on a GPU"


NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("k", [1, 3, 4, 40, 60])
def test_a_score_that_is_no_number_spoils_no_others(k: int, device: str) -> None:
    """One NaN was answered with ids behind the last unit on a GPU, a whole row of them."""
    scores = torch.randn(6, 60, generator=torch.Generator().manual_seed(k)).to(device)
    scores[0, 7] = torch.nan
    scores[1, 3::20], scores[1, ::2] = torch.nan, torch.inf
    scores[2, 10:], scores[3] = torch.nan, torch.nan
    scores[4, ::2] = 9.0
    scores[4, [5, 6]] = torch.nan
    check_top(scores, k)


@dataclass(frozen=True)
class Fixed(ScoringMethod):
    """Scores that are given."""

    table: Any = None

    @property
    def unit_size(self) -> int:
        return 4

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        return self.table


def select(table: Tensor, limit: Limit, heads: Any = "auto", shape: LayerShape = SHAPE) -> list[list[int]]:
    queries = torch.zeros(shape.num_query_heads, table.shape[1], shape.head_dim)
    candidates = Candidates(10, table.shape[2], 4)
    selection = Fixed(heads, table).select(None, shape, queries, 99, candidates, limit, None)  # type: ignore[arg-type]
    assert selection.unit_size == 4
    return selection.units.tolist()


TABLE = torch.tensor([[5.0, 0, 0, 1], [0, 6.0, 0, 1], [0, 0, 7.0, 1], [0, 0, 8.0, 1]]).unsqueeze(1)


def test_auto_shares_selections_in_grouped_models_and_only_there() -> None:
    assert select(TABLE, Limit(1)) == [[11], [12]]  # the larger of two heads wins
    assert select(TABLE, Limit(1), "kv") == [[11], [12]]
    assert select(TABLE, Limit(1), "query") == [[10], [11], [12], [12]]
    assert select(TABLE, Limit(1), shape=SHAPE._replace(num_kv_heads=4)) == [[10], [11], [12], [12]]


def test_queries_of_a_segment_share_a_selection_by_their_largest_score() -> None:
    table = torch.zeros(4, 3, 5)
    table[:, 1, 4] = 2.0
    table[:, 2, 0] = 1.0
    assert select(table, Limit(1), "query") == [[14]] * 4
    assert select(table, Limit(2), "query") == [[10, 14]] * 4


def test_mass_takes_the_fewest_units_that_reach_it_with_what_is_always_visible() -> None:
    """Weights of 4 tokens per unit: 8, 4, 2 and 2 of 32 in all, with 16 always visible."""
    scores = torch.log(torch.tensor([2.0, 1.0, 0.5, 0.5])).expand(4, 1, 4)
    always = torch.log(torch.full((4, 1), 16.0))
    for mass, expected in [
        (0.3, []),
        (0.49, []),
        (0.74, [10]),
        (0.76, [10, 11]),
        (0.9, [10, 11, 12]),
        (0.99, [10, 11, 12, 13]),
    ]:
        for units in select(scores, Limit(4, mass, always)):
            assert units == expected + [-1] * (4 - len(expected)), mass
    for units in select(scores, Limit(2, 0.99, always)):
        assert units == [10, 11]


def test_mass_is_averaged_over_heads_that_share() -> None:
    """One head of a pair has all it needs in its sinks, the other needs its unit: half of the mass is not enough."""
    scores = torch.full((4, 1, 2), -9.0)
    scores[1::2, 0, 1] = 9.0
    always = torch.tensor([[9.0], [-9.0]] * 2)
    assert select(scores, Limit(2, 0.45, always)) == [[-1, -1]] * 2
    assert select(scores, Limit(2, 0.6, always)) == [[11, -1]] * 2
    assert select(scores, Limit(2, 0.6, always), "query") == [[-1, -1], [11, -1]] * 2


def test_scores_of_another_shape_are_refused_with_the_shape_that_is_asked_for() -> None:
    for table in (torch.zeros(2, 1, 5), torch.zeros(4, 2, 5), torch.zeros(4, 1, 6), torch.zeros(4, 5)):
        with refused("invalid_method: each query head, query and candidate, here [4, 1, 5]."):
            Fixed("auto", table).select(
                None, SHAPE, torch.zeros(4, 1, 8), 99, Candidates(10, 5, 4), Limit(1), None  # type: ignore[arg-type]
            )  # fmt: skip


def test_features_of_another_width_than_the_rows_are_refused() -> None:
    class Narrow(PagedMethod):
        def features(self, queries: Tensor) -> Tensor:
            return queries

    with refused("invalid_method: of Narrow returned 8 numbers for each query; a row of its summary has 16"):
        Narrow()._scores(SHAPE, torch.zeros(4, 1, 8), torch.zeros(2, 5, 16))


def test_a_method_that_cannot_select_says_so() -> None:
    with refused("invalid_method: Method"):
        Method().select(None, SHAPE, torch.zeros(4, 1, 8), 0, Candidates(0, 2, 1), Limit(1), None)  # type: ignore[arg-type]
    with refused("invalid_method: ScoringMethod"):
        ScoringMethod().select(None, SHAPE, torch.zeros(4, 1, 8), 0, Candidates(0, 2, 1), Limit(1), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", catalogue())
def test_the_catalogue_holds_frozen_methods_with_a_line_each(name: str) -> None:
    cls = method_class(name)
    assert issubclass(cls, Method)
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert cls() == cls()
    assert hash(cls()) == hash(cls())
    assert set(cls.phases) <= {"prefill", "decode"}
    assert catalogue()[name].summary
    assert not catalogue()[name].summary.endswith(".")


def test_installed_packages_add_methods_and_may_not_replace_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Distribution:
        name = "their-package"

    class Point:
        value = "contracts.toy:RememberedMeans"
        dist = Distribution()

        def __init__(self, name: str) -> None:
            self.name = name

    def install(name: str) -> None:
        monkeypatch.setattr(
            "kvsift.methods.entry_points", lambda group: [Point(name)] if group == "kvsift.methods" else []
        )
        catalogue.cache_clear()

    try:
        install("remembered")
        assert method_class("remembered").__name__ == "RememberedMeans"
        assert catalogue()["remembered"].summary == "added by their-package"
        assert set(BUILT_IN) < set(catalogue())
        install("quest")
        assert catalogue() == BUILT_IN
        assert "'quest' of the installed package their-package is left out: kvsift has" in caplog.text
    finally:
        monkeypatch.undo()
        catalogue.cache_clear()


@pytest.mark.parametrize("name", [name for name in BUILT_IN if "chunk" in method_class(name).__dataclass_fields__])
@pytest.mark.parametrize("chunk", [0, -128, 2.5])
def test_chunks_have_limits_in_methods_with_a_default_of_their_own_too(name: str, chunk: float) -> None:
    with refused(f"invalid_value: chunk={chunk}"):
        method_class(name)(chunk=chunk)
