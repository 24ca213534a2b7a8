"""Auto tries a graph and a scan on queries that the graph has not seen, and keeps what is faster and good enough."""

from typing import Any

import pytest
import torch
from indexes.brute_force import assert_exact, needs_core
from kvsift_lab.bench.index_data import index_data
from torch import Tensor

from kvsift.indexes import auto, trial
from kvsift.indexes.auto import AutoIndex
from kvsift.indexes.flat import exact_search
from kvsift.indexes.samples import QuerySamples
from kvsift.indexes.trial import Trial, timed

N, K = 4096, 20
pytestmark = needs_core


@pytest.fixture(scope="module")
def layer() -> Any:
    return index_data(
        "S", N, num_kv_heads=2, group_size=2, head_dim=32, num_samples=1500, num_queries=16, dtype=torch.float32
    )


def build(layer: Any, monkeypatch: pytest.MonkeyPatch, costs: dict[str, float], **settings: Any) -> AutoIndex:
    """With made-up times, so that the choice does not depend on the machine."""
    monkeypatch.setattr(auto, "LEAST_ROWS", 1000)
    monkeypatch.setattr(trial, "timed", lambda searches, queries: {name: costs[name] for name in searches})
    samples = QuerySamples(layer.samples, layer.positions)
    return AutoIndex.build(layer.keys, samples, k=K, rope=layer.rope, **settings)


def recall(index: AutoIndex, layer: Any) -> float:
    """On queries of later positions."""
    hits = 0
    for queries in layer.queries.unbind(1):
        ids, _ = index.search(queries, layer.keys, K)
        truth, _ = exact_search(queries, layer.keys, K)
        hits += sum(len(set(own) & set(true)) for own, true in zip(ids.tolist(), truth.tolist()))
    return hits / layer.queries.shape[0] / layer.queries.shape[1] / K


GRAPH_WINS = {"flat": 5.0, "flat_int8": 4.0, "graph": 1.0, "mixed": 2.0}


def test_a_fast_graph_is_taken_with_patience_enough(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    index = build(layer, monkeypatch, GRAPH_WINS)
    found = index.statistics()
    assert found["heads"] == ["graph", "graph"]
    for knob in ("beam", "patience"):
        assert found[knob] == [head[knob] for head in found["measured"]["heads"]]
    assert all(head["good"] and min(head["recall"], head["mass"]) >= 0.95 for head in found["measured"]["heads"])
    assert recall(index, layer) >= 0.9  # held-out queries are few, and stand for others
    assert 0 < index.statistics()["scanned"] < N / 2
    assert index.statistics()["searches"] == 16
    assert "graph was fastest" in found["why"]


def test_less_patience_would_not_have_been_enough(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = build(layer, monkeypatch, GRAPH_WINS, target=0.99).statistics()["patience"]
    share = max(chosen) / K
    assert share > trial.PATIENCE[0], "the case is too easy to say anything"
    less = [of for of in trial.PATIENCE if of < share][-1:]
    monkeypatch.setattr(trial, "PATIENCE", tuple(less))
    heads = build(layer, monkeypatch, GRAPH_WINS, target=0.99).statistics()["measured"]["heads"]
    assert not all(head["good"] for head in heads)


@pytest.mark.parametrize("scan", ["flat", "flat_int8"])
def test_a_faster_scan_is_taken(layer: Any, monkeypatch: pytest.MonkeyPatch, scan: str) -> None:
    costs = {"flat": 2.0, "flat_int8": 2.0, "graph": 3.0, "mixed": 3.0} | {scan: 1.0}
    found = build(layer, monkeypatch, costs).statistics()
    assert found["heads"] == [scan, scan]
    assert (found["bytes"] > 0) == (scan == "flat_int8")


def test_a_graph_that_misses_too_much_is_never_taken(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "PATIENCE", (0.05,))
    index = build(layer, monkeypatch, GRAPH_WINS, target=1.0)
    assert index.statistics()["heads"] == ["flat_int8", "flat_int8"]
    assert "in 0 of 2 heads" in index.why


def half_clustered() -> tuple[Tensor, Tensor]:
    """Keys [2, N, d] and queries [4, 1000, d]: those of head 1 gather round 64 centres, those of head 0 nowhere."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(64, 32, generator=generator)
    keys, queries = torch.randn(2, N, 32, generator=generator), torch.randn(4, 1000, 32, generator=generator)
    for rows in (keys[1], queries[2], queries[3]):
        rows.mul_(0.2).add_(centres[torch.randint(64, rows.shape[:1], generator=generator)])
    return keys, queries


def test_each_head_has_its_own_and_one_search_serves_both(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "PATIENCE", (0.4,))
    keys, queries = half_clustered()
    data = layer._replace(keys=keys, samples=queries, positions=torch.arange(4, 4004, 4), rope=None)
    index = build(data, monkeypatch, {"flat": 1.0, "flat_int8": 2.0, "graph": 0.5, "mixed": 0.4}, target=0.7)
    found = index.statistics()
    assert found["heads"] == ["flat", "graph"], found["measured"]["heads"]
    assert found["beam"] == [None, K + trial.AHEAD * 0.4 * K]
    assert found["patience"] == [None, 0.4 * K]
    for asked in queries[:, ::100].unbind(1):
        ids, scores = index.search(asked, keys, K)
        assert_exact((ids[:2], scores[:2]), asked[:2], keys[:1], K)  # the heads that are scanned
        rows = keys[1, ids[2:]]  # [2, K, d]
        torch.testing.assert_close(scores[2:], (rows @ asked[2:, :, None]).squeeze(2), rtol=1e-4, atol=1e-4)
    fork = index.fork()
    fork.crop(2000)
    grown = torch.cat([keys[:, :2000], 9 * keys[:, 3000:3300]], 1)
    assert int(fork.search(queries[:, 0], grown, K)[0].max()) >= 2000
    assert index.statistics()["rows"] == N


@pytest.mark.parametrize("missing", ["samples", "rows"])
def test_what_speaks_against_a_graph_is_said(layer: Any, missing: str) -> None:
    samples = QuerySamples(layer.samples, layer.positions) if missing == "rows" else None
    index = AutoIndex.build(layer.keys, samples, k=K, rope=layer.rope)
    assert index.statistics()["heads"] == ["flat", "flat"]
    assert ("4096 tokens are too few" if missing == "rows" else "queries of the prompt") in index.why


def test_real_times_are_taken_in_turns() -> None:
    order: list[str] = []

    def search(name: str) -> Any:
        return lambda queries: order.append(f"{name}{int(queries[0, 0])}")

    queries = torch.arange(2.0).view(2, 1, 1)
    seconds = timed({"a": search("a"), "b": search("b")}, queries, rounds=2)
    assert order == ["a0", "b0", "a1", "b1", "a0", "b0"]
    assert all(of >= 0 for of in seconds.values())


def test_quality_is_recall_and_attention_among_the_nearest() -> None:
    keys: Tensor = torch.tensor([[[0.0], [1.0], [2.0], [3.0]]])
    asked = Trial.of(torch.ones(1, 2, 1), keys, 2, scale=1.0)  # both want 3 and 2
    assert asked.ids.tolist() == [[[2, 3]], [[2, 3]]]
    weight = float(torch.tensor(1.0).sigmoid())
    recall, mass = asked.judge(torch.tensor([[[3, -1]], [[2, 0]]]))
    assert recall == 0.5
    assert mass == pytest.approx((weight + 1 - weight) / 2)
    assert asked.judge(asked.ids.flip(-1)) == (1.0, pytest.approx(1.0))
