"""Two thousand searches of odd layers: where an index looks at everything, it answers as brute force does."""

from __future__ import annotations

import pytest
import torch
from indexes.brute_force import Layers, assert_exact, needs_core
from torch import Tensor

from kvsift.indexes import auto, trial
from kvsift.indexes.auto import AutoIndex
from kvsift.indexes.base import Index
from kvsift.indexes.flat import FlatIndex
from kvsift.indexes.graph import GraphIndex
from kvsift.indexes.samples import QuerySamples

BUILDS, SEARCHES = 100, 5  # for each of four kinds
SAMPLES = 70


def samples_for(layers: Layers, queries: Tensor) -> QuerySamples:
    heads, width = queries.shape
    return QuerySamples(layers.normal(heads, SAMPLES, width).to(queries.dtype), torch.arange(SAMPLES))


def search_all(index: Index, layers: Layers, queries: Tensor, keys: Tensor, k: int) -> None:
    for _ in range(SEARCHES):
        assert_exact(index.search(queries, keys, k), queries, keys, k)
        queries = layers.normal(*queries.shape).to(queries.dtype)


@pytest.mark.parametrize("behind", [0, 9], ids=["all rows", "some rows came later"])
def test_flat(behind: int) -> None:
    layers = Layers(10 + behind)
    for _ in range(BUILDS // 2):
        queries, keys, k = layers.draw()
        search_all(FlatIndex.build(keys[:, : max(keys.shape[1] - behind, 0)]), layers, queries, keys, k)


@needs_core
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_graph_with_a_beam_as_wide_as_the_context(per: str) -> None:
    layers = Layers(20)
    for _ in range(BUILDS // 2):
        queries, keys, k = layers.draw()
        built = keys.shape[1] - layers.random.choice([0, 0, min(3, keys.shape[1])])
        index = GraphIndex.build(
            keys[:, :built], samples_for(layers, queries), degree=8, per=per, beam=max(keys.shape[1], 1)
        )
        search_all(index, layers, queries, keys, k)


@pytest.mark.parametrize("known", [True, False], ids=["queries known", "not known"])
def test_auto(known: bool) -> None:
    layers = Layers(30)
    for _ in range(BUILDS // 2):
        queries, keys, k = layers.draw()
        index = AutoIndex.build(keys, samples_for(layers, queries) if known else None, k=k)
        search_all(index, layers, queries, keys, k)


@needs_core
@pytest.mark.parametrize("fastest", ["graph", "mixed", "flat", "flat_int8"])
def test_auto_whatever_it_chose(fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "LEAST_ROWS", 0)
    monkeypatch.setattr(trial, "WIDTHS", (10.0**6,))  # a beam that holds all
    costs = {"flat": 2.0, "flat_int8": 2.0, "graph": 1.5, "mixed": 1.4} | {fastest: 1.0}
    monkeypatch.setattr(trial, "timed", lambda searches, queries: {name: costs[name] for name in searches})
    layers, kinds = Layers(40), set()
    for _ in range(BUILDS // 4):
        queries, keys, k = layers.draw()
        if keys.shape[1] <= 4 * k and layers.random.random() < 0.9:
            k = max(keys.shape[1] // 5, 1)
        index = AutoIndex.build(keys, samples_for(layers, queries), k=k)
        kinds |= set(index.statistics()["heads"])
        if fastest == "flat_int8":
            continue  # codes are not exact for so few keys
        search_all(index, layers, queries, keys, k)
    assert ("graph" if fastest == "mixed" else fastest) in kinds
