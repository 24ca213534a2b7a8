"""A scan finds the best keys, whatever the sizes, with codes and without, and whatever happens to the keys."""

import pytest
import torch
from indexes.brute_force import Layers, assert_exact, needs_core
from refusals import refused

from kvsift import native
from kvsift.indexes import flat
from kvsift.indexes.base import best
from kvsift.indexes.flat import FlatIndex, scan_in_torch

HUGE = 1 << 30


@pytest.fixture
def no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "why_missing", lambda: "a test took it away")


@pytest.mark.parametrize("codes", [None, pytest.param("int8", marks=needs_core)])
def test_keys_that_come_and_go(codes: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "overfetch", lambda k: HUGE)
    layers = Layers(2)
    for _ in range(60):
        keys = layers.normal(2, 60, 16)
        queries, k = layers.normal(4, 16), 7
        index = FlatIndex.build(keys[:, :40], codes=codes)
        assert_exact(index.search(queries, keys, k), queries, keys, k)  # rows that it was not built over
        fork = index.fork()
        index.crop(25)
        other = torch.cat([keys[:, :25], 3 * layers.normal(2, 30, 16)], 1)
        assert_exact(index.search(queries, other, k), queries, other, k)
        index.extend(other)
        assert_exact(index.search(queries, other, k), queries, other, k)
        assert_exact(fork.search(queries, keys, k), queries, keys, k)
        assert index.statistics()["rows"] == 55
        assert fork.statistics()["rows"] == 40


def test_ties_go_to_the_lower_id_in_torch_too() -> None:
    keys = torch.ones(1, 50, 8)
    keys[:, 30] = 2
    ids, scores = scan_in_torch(torch.ones(2, 8), keys, 4)
    assert ids.tolist() == [[30, 0, 1, 2]] * 2
    assert scores.tolist() == [[16, 8, 8, 8]] * 2


def test_without_the_core_a_scan_works_and_codes_say_what_is_missing(no_core: None) -> None:
    layers = Layers(3)
    queries, keys = layers.normal(4, 8), layers.normal(2, 30, 8)
    assert_exact(FlatIndex.build(keys).search(queries, keys, 5), queries, keys, 5)
    with refused("missing_package: a test took it away"):
        FlatIndex.build(keys, codes="int8")


@pytest.mark.parametrize("codes", [None, pytest.param("int8", marks=needs_core)])
def test_heads_that_the_core_does_not_take_are_scanned_all_the_same(codes: str | None) -> None:
    layers = Layers(4)
    for width, dtype in [(73, torch.float32), (264, torch.bfloat16), (16, torch.float16)]:
        queries, keys = layers.normal(4, width).to(dtype), layers.normal(2, 30, width).to(dtype)
        index = FlatIndex.build(keys, codes=codes)
        assert_exact(index.search(queries, keys, 5), queries, keys, 5)
        assert index.statistics()["kind"] == "flat"


def test_what_cannot_be_searched_is_refused() -> None:
    keys, queries = torch.randn(2, 9, 8), torch.randn(4, 8)
    index = FlatIndex.build(keys)
    for wrong in (queries[:3], queries[:, :4], queries[None]):
        with refused("invalid_tensor"):
            index.search(wrong, keys, 3)
    with refused("invalid_value"):
        index.search(queries, keys, 0)
    for number in (torch.nan, torch.inf):
        with refused("not_finite"):
            index.search(queries.clone().index_fill(0, torch.tensor(2), number), keys, 3)
    with refused("invalid_tensor"):
        index.search(queries.to("meta"), keys.to("meta"), 3)


def test_statistics_count() -> None:
    keys, queries = torch.randn(2, 9, 8), torch.randn(4, 8)
    index = FlatIndex.build(keys[:, :5])
    index.search(queries, keys, 3)
    index.search(queries, keys[:, :5], 3)
    found = index.statistics()
    assert {name: found[name] for name in ("kind", "rows", "bytes", "searches", "scanned")} == {
        "kind": "flat", "rows": 5, "bytes": 0, "searches": 2, "scanned": 7.0,
    }  # fmt: skip
    assert index.fork().statistics()["searches"] == 0


def test_a_missing_result_is_last_whatever_it_scores() -> None:
    ids, scores = best(torch.tensor([[-1, 5, 3]]), torch.tensor([[9.0, 1.0, -torch.inf]]), 4)
    assert ids.tolist() == [[5, 3, -1, -1]]
    assert scores.tolist() == [[1, -torch.inf, -torch.inf, -torch.inf]]
