"""The graph index: what it finds against brute force, what it covers, and what does not change it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvsift_lab.bench.index_data import IndexData, index_data
from refusals import refused
from torch import Tensor

from kvsift import native
from kvsift.indexes.from_samples import sample_lists
from kvsift.indexes.graph import GraphIndex
from kvsift.indexes.knn import knn
from kvsift.indexes.samples import QuerySamples

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_missing())


def scanned_ids(queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The true answer of a search."""
    scores = torch.einsum("hgd,hnd->hgn", queries.float().unflatten(0, (len(keys), -1)), keys.float()).flatten(0, 1)
    order = scores.sort(dim=-1, descending=True, stable=True)
    short = max(0, k - keys.shape[1])
    ids = torch.nn.functional.pad(order.indices[:, :k], (0, short), value=-1)
    return ids, torch.nn.functional.pad(order.values[:, :k], (0, short), value=-torch.inf)


def recall(found: Tensor, truth: Tensor) -> float:
    return float((found.unsqueeze(-1) == truth.unsqueeze(-2)).any(-1).float().mean())


def whole(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers: products are exact in any order, and many are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(scope="module")
def data() -> IndexData:
    return index_data("S", 8192, num_kv_heads=2, group_size=2, head_dim=64, num_samples=1024, num_queries=12)


@pytest.fixture(scope="module")
def lists(data: IndexData) -> Tensor:
    return sample_lists(data.keys, samples_of(data), 1024, 50, rope=data.rope)


def samples_of(data: IndexData) -> QuerySamples:
    return QuerySamples(data.samples, data.positions)


def mean_recall(index: GraphIndex, data: IndexData, k: int = 50) -> float:
    steps = data.queries.unbind(1)
    return sum(recall(index.search(q, data.keys, k)[0], scanned_ids(q, data.keys, k)[0]) for q in steps) / len(steps)


@pytest.mark.parametrize(
    ("options", "least"),
    [({}, 0.93), ({"per": "query_head"}, 0.9), ({"per": "query_head", "compat": "paper", "degree": 16}, 0.6)],
    ids=["ours", "per query head", "paper"],
)
def test_most_of_the_best_keys_are_found_in_a_part_of_them(
    data: IndexData, lists: Tensor, options: dict[str, object], least: float
) -> None:
    index = GraphIndex.from_lists(data.keys, lists, beam=150, **options)
    assert mean_recall(index, data) >= least
    assert index.statistics()["scanned"] < 0.35 * data.keys.shape[1]


def test_a_wider_search_finds_more_and_scans_more(data: IndexData, lists: Tensor) -> None:
    index = GraphIndex.from_lists(data.keys, lists)
    found = []
    for beam in (20, 80, 320):
        counted = index.fork()
        counted.beam = [beam] * 2
        found.append((mean_recall(counted, data), counted.statistics()["scanned"]))
    assert found == sorted(found)
    assert found[0][0] < found[2][0]


def test_samples_turned_to_where_decoding_asks_build_the_better_graph(data: IndexData) -> None:
    turned = GraphIndex.build(data.keys, samples_of(data), rope=data.rope, lists=50, beam=60)
    causal = GraphIndex.build(data.keys, samples_of(data), lists=50, window=64, beam=60)
    assert mean_recall(turned, data) > mean_recall(causal, data)


def test_nothing_is_out_of_reach_and_unseen_keys_are_counted(data: IndexData, lists: Tensor) -> None:
    stats = GraphIndex.from_lists(data.keys, lists).statistics()
    assert stats["unreachable"] == [0, 0]
    seen = [len(lists[2 * head : 2 * head + 2].unique()) for head in range(2)]
    assert stats["unseen"] == [8192 - count for count in seen]
    assert stats["bytes"] <= 130 * 2 * 8192


def test_the_graph_is_the_same_on_any_number_of_threads_and_level(data: IndexData, lists: Tensor) -> None:
    threads, level = torch.get_num_threads(), native.level()
    built, found = [], []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            index = GraphIndex.from_lists(data.keys, lists)
            built.append(index.neighbours)
            found += [index.search(data.queries[:, 0], data.keys, 30)]
        for name in native.levels():
            native.use_level(name)
            ids, scores = index.search(data.queries[:, 0], data.keys, 30)
            assert recall(ids, found[0][0]) > 0.98
            torch.testing.assert_close(scores, found[0][1], rtol=1e-4, atol=1e-3)
    finally:
        torch.set_num_threads(threads)
        native.use_level(level)
    assert torch.equal(built[0], built[1])
    assert torch.equal(found[0][0], found[1][0])


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 200), tail=st.integers(0, 300), k=st.integers(1, 40), degree=st.integers(4, 12),
    dim=st.sampled_from([1, 7, 32, 40]), group_size=st.integers(1, 2), per=st.sampled_from(["kv_head", "query_head"]),
    compat=st.sampled_from([None, None, "paper"]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    cropped=st.integers(0, 60), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_a_beam_as_wide_as_the_keys_is_a_scan(
    n: int, tail: int, k: int, degree: int, dim: int, group_size: int, per: str, compat: str | None,
    dtype: torch.dtype, cropped: int, seed: int,
) -> None:  # fmt: skip
    pool = whole((2, n + tail + 5, dim), seed, dtype)  # heads are further apart than their rows take
    keys, queries = pool[:, : n + tail], whole((2 * group_size, dim), seed + 1, dtype)
    asked = whole((2 * group_size, 6, dim), seed + 2, dtype)
    index = GraphIndex.from_lists(
        keys[:, :n],
        knn(asked, keys[:, :n], 8),
        degree=degree,
        per=per,
        compat=compat,
        beam=n,  # type: ignore[arg-type]
    )
    index.crop(max(0, n - cropped))
    stats = index.statistics()
    ids, scores = index.search(queries, keys, k)
    true_ids, true_scores = scanned_ids(queries, keys, k)
    if not any(stats["unreachable"]):
        assert torch.equal(ids, true_ids)
        assert torch.equal(scores, true_scores)
    assert compat or not any(stats["unreachable"])
    assert bool((ids[:, 1:] != ids[:, :-1]).logical_or(ids[:, 1:] == -1).all())
    assert torch.equal(ids == -1, scores == -torch.inf)


def test_patience_ends_searches_that_find_nothing_more(data: IndexData, lists: Tensor) -> None:
    wide = GraphIndex.from_lists(data.keys, lists, beam=400)
    narrow = wide.fork()
    narrow.patience = [12, 0]  # of the first KV head alone
    queries = data.queries[:, 0]
    (ids, _), (early, _) = wide.search(queries, data.keys, 20), narrow.search(queries, data.keys, 20)
    assert narrow.bytes_read < wide.bytes_read
    assert 0.7 < recall(early[:2], ids[:2]) <= 1
    assert torch.equal(early[2:], ids[2:])
    assert narrow.fork().patience == [12, 0]
    narrow.widen([1000.0, 1.0])
    assert torch.equal(narrow.search(queries, data.keys, 20)[0], ids)


def test_rows_after_the_build_are_scanned(data: IndexData, lists: Tensor) -> None:
    longer = torch.cat([data.keys, 3 * data.keys[:, :100]], 1)
    index = GraphIndex.from_lists(data.keys, lists)
    index.extend(longer)
    queries = data.queries[:, 0]
    ids, _ = index.search(queries, longer, 20)
    truth, _ = scanned_ids(queries, longer, 20)
    tail = truth >= 8192
    assert bool(tail.any())
    assert torch.equal((ids >= 8192).sum(1), tail.sum(1))
    assert index.statistics()["scanned"] >= 100


def test_cropped_rows_are_never_found_and_what_replaces_them_is(data: IndexData, lists: Tensor) -> None:
    index = GraphIndex.from_lists(data.keys, lists)
    twin = index.fork()
    index.crop(4000)
    queries = data.queries[:, 0]
    assert int(index.search(queries, data.keys[:, :4000].contiguous(), 50)[0].max()) < 4000
    replaced = torch.cat([data.keys[:, :4000], 2 * data.keys[:, 4000:4200]], 1)
    ids, scores = index.search(queries, replaced, 50)
    keys = replaced.repeat_interleave(2, 0).float()
    exact = (keys.gather(1, ids.unsqueeze(-1).expand(-1, -1, 64)) * queries.float().unsqueeze(1)).sum(-1)
    torch.testing.assert_close(scores, exact, rtol=1e-4, atol=1e-3)
    assert twin.rows == 8192


def test_keys_that_are_not_numbers_are_never_found() -> None:
    keys, queries = whole((1, 50, 8), 0), whole((2, 8), 1)
    keys[0, 7] = torch.nan
    index = GraphIndex.from_lists(keys[:, :40], torch.arange(40).int().view(1, 1, 40).expand(2, 1, 40), beam=40)
    ids, scores = index.search(queries, keys, 50)
    assert not bool((ids == 7).any())
    assert not bool(scores.isnan().any())


def test_without_any_list_positions_lead_everywhere() -> None:
    keys, queries = whole((1, 300, 8), 0), whole((1, 8), 1)
    index = GraphIndex.from_lists(keys, torch.full((1, 4, 5), -1, dtype=torch.int32), beam=300)
    assert torch.equal(index.search(queries, keys, 9)[0], scanned_ids(queries, keys, 9)[0])
    assert index.statistics()["unseen"] == [300]


def test_what_cannot_be_used_is_refused(data: IndexData, lists: Tensor) -> None:
    index, queries = GraphIndex.from_lists(data.keys, lists), data.queries[:, 0]
    with refused("invalid_tensor"):
        GraphIndex.from_lists(data.keys[:, :100], lists)
    with refused("invalid_value"):
        GraphIndex.from_lists(data.keys, lists, degree=3)
    with refused("invalid_tensor"):
        index.search(queries, data.keys.transpose(1, 2).contiguous().transpose(1, 2), 5)
    with refused("invalid_tensor"):
        index.search(queries, data.keys[:, :100], 5)
    starved = index.fork()
    starved.beam = [0, 5]
    with refused("invalid_tensor"):
        starved.search(queries, data.keys, 5)
    with refused("not_finite"):
        index.search(torch.full_like(queries, torch.nan), data.keys, 5)
    with refused("invalid_value: k=0"):
        index.search(queries, data.keys, 0)
