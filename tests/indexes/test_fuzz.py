"""Searches of odd layers, and merges of attention over their parts, against brute force.

An index that looks at everything answers as brute force does. A thousand searches and merges by default;
KVSIFT_FUZZ=10000 makes ten thousand.
"""

import os

import pytest
import torch
from indexes.brute_force import Layers, assert_exact, assert_true_of_what_was_found, attention, needs_core
from refusals import refused
from torch import Tensor

from kvsift import native
from kvsift.indexes import auto, trial
from kvsift.indexes.auto import AutoIndex
from kvsift.indexes.base import Index
from kvsift.indexes.flat import FlatIndex, overfetch, scan_in_torch
from kvsift.indexes.graph import GraphIndex
from kvsift.indexes.samples import QuerySamples
from kvsift.kernels.merge import merge
from kvsift.types import Part

TOTAL = int(os.environ.get("KVSIFT_FUZZ", "1000"))
SEARCHES = 5  # of each layer
BUILDS = max(2, TOTAL // 10 // SEARCHES)  # of a kind; a quarter of the total are merges
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
        assert_exact(scan_in_torch(queries, keys, k), queries, keys, k)


@needs_core
@pytest.mark.parametrize("behind", [0, 9], ids=["all rows", "some rows came later"])
def test_flat_int8(behind: int) -> None:
    layers = Layers(15 + behind)
    for _ in range(BUILDS // 2):
        queries, keys, k = layers.draw()
        coded = max(keys.shape[1] - behind, 0)
        index = FlatIndex.build(keys[:, :coded], codes="int8")
        if int(overfetch(k) * k) >= coded:  # every code is a candidate
            search_all(index, layers, queries, keys, k)
            continue
        for _ in range(SEARCHES):
            assert_true_of_what_was_found(index.search(queries, keys, k), queries, keys, least=0.8)
            queries = layers.normal(*queries.shape).to(queries.dtype)


@needs_core
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_graph_with_a_beam_as_wide_as_the_context(per: str) -> None:
    layers = Layers(20)
    for _ in range(BUILDS):
        queries, keys, k = layers.draw()
        built = keys.shape[1] - layers.random.choice([0, 0, min(3, keys.shape[1])])
        index = GraphIndex.build(
            keys[:, :built], samples_for(layers, queries), degree=8, per=per, beam=max(keys.shape[1], 1)
        )
        search_all(index, layers, queries, keys, k)


@needs_core
def test_graph_with_little_patience_says_nothing_false() -> None:
    layers = Layers(25)
    for _ in range(BUILDS):
        queries, keys, k = layers.draw()
        index = GraphIndex.build(keys, samples_for(layers, queries), degree=8)
        index.beam = [layers.random.choice([1, 5, 40])] * len(keys)
        index.patience = [layers.random.choice([0, 1, 10])] * len(keys)
        for _ in range(SEARCHES):
            assert_true_of_what_was_found(index.search(queries, keys, k), queries, keys)
            queries = layers.normal(*queries.shape).to(queries.dtype)


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
    monkeypatch.setattr(trial, "AHEAD", 10.0**6)  # a beam that holds all
    monkeypatch.setattr(trial, "PATIENCE", (10.0**6,))
    costs = {"flat": 2.0, "flat_int8": 2.0, "graph": 1.5, "mixed": 1.4} | {fastest: 1.0}
    monkeypatch.setattr(trial, "timed", lambda searches, queries: {name: costs[name] for name in searches})
    layers, kinds = Layers(40), set()
    for _ in range(max(12, BUILDS // 2)):
        queries, keys, k = layers.draw()
        if keys.shape[1] <= 4 * k and layers.random.random() < 0.9:
            k = max(keys.shape[1] // 5, 1)
        index = AutoIndex.build(keys, samples_for(layers, queries), k=k)
        kinds |= set(index.statistics()["heads"])
        if fastest == "flat_int8":
            continue  # codes are not exact for so few keys
        search_all(index, layers, queries, keys, k)
    assert ("graph" if fastest == "mixed" else fastest) in kinds


@needs_core
@pytest.mark.parametrize("blind", [0.0, 0.3], ids=["every key counts", "some logits are -inf"])
def test_attention_over_parts_merges_to_attention_over_all(blind: float) -> None:
    layers = Layers(50)
    for _ in range(max(10, TOTAL // 8)):
        queries, keys, _ = layers.draw()
        keys = keys.contiguous()
        if layers.random.random() < blind:  # all of them, or those of some tokens
            rows = layers.random.choice([slice(None), slice(0, keys.shape[1] // 2)])
            queries, keys[:, rows] = queries.abs() + 0.1, -torch.inf
        values = layers.normal(*keys.shape).to(keys.dtype)
        owner = torch.randint(0, 4, (keys.shape[1],), generator=layers.generator)  # a part may get nothing
        whole = Part(
            torch.zeros(1, queries.shape[0], 1, queries.shape[1]), torch.full((1, queries.shape[0], 1), -torch.inf)
        )
        for part in range(4):
            ids = (owner == part).nonzero().T.contiguous()
            output, lse = native.attend_units(queries.float(), keys, values, ids, 1, (), 0.3)
            whole = merge(whole, Part(output[None, :, None], lse[None, :, None]))
        expected, expected_lse = attention(queries, keys, values, 0.3)
        torch.testing.assert_close(whole.lse[0, :, 0], expected_lse, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(whole.output[0, :, 0], expected, rtol=0, atol=1e-4)


@needs_core
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_a_number_is_refused(odd: float) -> None:
    layers = Layers(60)
    for _ in range(20):
        queries, keys, k = layers.draw()
        built, bad = FlatIndex.build(keys), queries.clone()
        bad[-1, layers.random.randrange(queries.shape[1])] = odd
        indexes: list[Index] = [
            built,
            GraphIndex.build(keys, samples_for(layers, queries)),
            AutoIndex.build(keys, None),
        ]
        for index in indexes:
            with refused("not_finite"):
                index.search(bad, keys, k)
        if not keys.shape[1]:
            continue
        broken = keys.clone()
        broken[-1, layers.random.randrange(keys.shape[1]), 0] = odd
        samples = samples_for(layers, queries)
        with refused("not_finite"):
            FlatIndex.build(broken)
        with refused("not_finite"):
            FlatIndex.build(broken, codes="int8")
        with refused("not_finite"):
            GraphIndex.build(broken, samples)
        with refused("not_finite"):
            AutoIndex.build(broken, samples)
        for empty in (FlatIndex.build(keys[:, :0]), GraphIndex.build(keys[:, :0], samples)):
            with refused("not_finite"):
                empty.extend(broken)
