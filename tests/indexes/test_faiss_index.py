"""IVF and HNSW through faiss: exact where they look at everything, honest about what they look at."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from indexes.brute_force import Layers, assert_exact
from refusals import refused

from kvsift.indexes.faiss_index import HNSWIndex, IVFIndex

ALL = 10**6
WIDE: list[Any] = [
    pytest.param(lambda keys: IVFIndex.build(keys, nprobe=ALL), id="ivf"),
    pytest.param(lambda keys: HNSWIndex.build(keys, beam=ALL), id="hnsw"),
]


@pytest.fixture
def faiss() -> Any:
    return pytest.importorskip("faiss", reason="faiss is not installed: pip install faiss-cpu")


@pytest.mark.parametrize("build", WIDE)
def test_wide_searches_are_exact(faiss: Any, build: Callable[..., Any]) -> None:
    layers = Layers(0)
    for _ in range(40):
        queries, keys, k = layers.draw()
        if not bool(keys.any()) or len(keys[0].unique(dim=0)) < keys.shape[1]:
            continue  # a walk stops among keys that are all alike
        index = build(keys[:, : keys.shape[1] - keys.shape[1] // 4])
        assert_exact(index.search(queries, keys, k), queries, keys, k)


@pytest.mark.parametrize("build", WIDE)
def test_cropped_keys_are_not_found_and_new_ones_are(faiss: Any, build: Callable[..., Any]) -> None:
    layers = Layers(1)
    keys, queries = layers.normal(2, 80, 16), layers.normal(4, 16)
    index = build(keys)
    fork = index.fork()
    index.crop(30)
    assert_exact(index.search(queries, keys[:, :30], 9), queries, keys[:, :30], 9)
    other = torch.cat([keys[:, :30], 3 * layers.normal(2, 20, 16)], 1)
    index.extend(other)
    assert_exact(index.search(queries, other, 9), queries, other, 9)
    assert_exact(fork.search(queries, keys, 9), queries, keys, 9)
    assert (index.statistics()["rows"], fork.statistics()["rows"]) == (30, 80)


def test_ivf_scans_the_clusters_it_probes(faiss: Any) -> None:
    layers = Layers(2)
    keys, queries = layers.normal(2, 900, 16), layers.normal(4, 16)
    some, all_of_them = IVFIndex.build(keys, nlist=30, nprobe=3), IVFIndex.build(keys, nlist=30, nprobe=ALL)
    for index in (some, all_of_them):
        index.search(queries, keys, 10)
    assert 0 < some.statistics()["scanned"] < 300
    assert all_of_them.statistics()["scanned"] == 900
    assert IVFIndex.build(keys).num_lists == 30


def test_hnsw_finds_more_with_a_wider_beam(faiss: Any) -> None:
    layers = Layers(3)
    keys, queries = layers.normal(1, 3000, 32), layers.normal(4, 32)
    narrow, wide = HNSWIndex.build(keys, links=8, beam=1), HNSWIndex.build(keys, links=8, beam=500)
    scores = [index.search(queries, keys, 10)[1].clamp_min(-99).mean() for index in (narrow, wide)]
    assert scores[1] > scores[0]
    assert narrow.statistics()["scanned"] < wide.statistics()["scanned"] < 3000


@pytest.mark.parametrize("build", [IVFIndex.build, HNSWIndex.build], ids=["ivf", "hnsw"])
def test_builds_repeat(faiss: Any, build: Callable[..., Any]) -> None:
    layers = Layers(4)
    keys, queries = layers.normal(3, 400, 16), layers.normal(6, 16)
    first, second = (build(keys).search(queries, keys, 20) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("build", [IVFIndex.build, HNSWIndex.build], ids=["ivf", "hnsw"])
def test_without_faiss_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, build: Callable[..., Any]) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with refused("missing_package"):
        build(torch.randn(1, 9, 8))


def test_settings_that_mean_nothing_are_refused(faiss: Any) -> None:
    keys = torch.randn(1, 9, 8)
    with refused("invalid_value"):
        IVFIndex.build(keys, nlist=0)
    with refused("invalid_value"):
        HNSWIndex.build(keys, links=1)
