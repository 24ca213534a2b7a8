"""PQCache: centroids, codes and look-ups by hand, against the formula written out; when centroids are fitted again."""

from itertools import pairwise

import pytest
import torch
from contracts.harness import SHAPE, Runner, draw_tokens, phase_plan
from methods.weighted import Keys
from torch import Tensor

from kvsift.methods import pqcache
from kvsift.methods.common.token_rows import settled
from kvsift.methods.pqcache import PQCache
from kvsift.plan.budget import Budget
from kvsift.types import Candidates, LayerShape, Limit, Selection


def choose(method: PQCache, shape: LayerShape, queries: Tensor, keys: Tensor, units: int) -> Selection:
    given = shape, queries, keys.shape[1], Candidates(0, keys.shape[1], 1), Limit(units), Keys(keys)
    return method.select(method.new_state(shape), *given)  # type: ignore[arg-type]


def test_kmeans_by_hand() -> None:
    points = torch.tensor([[0.0], [1.0], [9.0], [10.0], [11.0]])
    first = torch.randperm(5, generator=torch.Generator().manual_seed(0))[:2]
    drawn = pqcache.fit_centroids(points, 2, 0, seed=0)
    assert sorted(drawn.flatten().tolist()) == sorted(points[first].flatten().tolist())
    assert sorted(pqcache.fit_centroids(points, 2, 9, seed=0).flatten().tolist()) == [0.5, 10.0]
    assert pqcache.nearest_centroids(points, torch.tensor([[0.5], [10.0]])).tolist() == [0, 0, 1, 1, 1]
    assert pqcache.nearest_centroids(torch.tensor([[3.0]]), torch.tensor([[2.0], [4.0], [2.0]])).tolist() == [0], (
        "a tie"
    )


def test_kmeans_never_gets_worse_and_keeps_lonely_centroids() -> None:
    points = torch.randn(2, 3, 200, 4, generator=torch.Generator().manual_seed(1))
    costs = []
    for iterations in range(6):
        centroids = pqcache.fit_centroids(points, 16, iterations, seed=2)
        mine = pqcache.nearest_centroids(points, centroids)
        picked = centroids.gather(-2, mine.unsqueeze(-1).expand(*points.shape))
        costs.append(float((points - picked).square().sum()))
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < 0.9 * costs[0]
    same = torch.zeros(10, 2)  # all points alike: every centroid but the first is nearest to none
    assert bool(pqcache.fit_centroids(same, 4, 3, seed=0).isfinite().all())
    assert pqcache.fit_centroids(same, 64, 3, seed=0).shape == (10, 2), "no more centroids than points"


def test_heads_of_a_group_add_up_their_shares() -> None:
    """Two query heads of one KV head. Logits (2, 0, 1.9) and (0, 2, 1.9): each prefers another key, and the third,
    second in both, has the largest sum of shares."""
    keys = torch.tensor([[[2.0, 0.0], [0, 2], [1.9, 1.9]]])
    queries = torch.eye(2).unsqueeze(1)
    shape, method = LayerShape(2, 2, 1, 2, 1.0), PQCache()
    assert choose(method, shape, queries, keys, 1).units.tolist() == [[2]]
    each = choose(PQCache(heads="query"), shape, queries, keys, 1).units.tolist()
    assert each == [[0], [1]]


@pytest.mark.parametrize(("bits", "parts", "seed"), [(3, 2, 0), (2, 4, 1), (4, 3, 2)])
def test_the_selection_is_that_of_the_formula_written_out(bits: int, parts: int, seed: int) -> None:
    tokens = draw_tokens(101, 9)
    keys, query = tokens.keys[:, :100], tokens.queries[:, 100:]
    method = PQCache(bits=bits, parts=parts, iterations=4, seed=seed)
    selection = choose(method, SHAPE, query, keys, 12)
    size = -(-SHAPE.head_dim // parts)
    for head in range(SHAPE.num_kv_heads):
        logits = torch.zeros(2, 100)
        for part in range(parts):
            own = keys[head, :, part * size : (part + 1) * size]
            centroids = _fitted(own[: settled(100)], 1 << bits, 4, seed)
            codes = [min(range(len(centroids)), key=lambda c: float((k - centroids[c]).square().sum())) for k in own]
            for member in range(2):
                of = query[2 * head + member, 0, part * size : (part + 1) * size]
                logits[member] += torch.tensor([float(of @ centroids[code]) for code in codes]) * SHAPE.scale
        shares = logits.softmax(-1).sum(0)
        assert selection.units[head].tolist() == sorted(shares.sort(descending=True, stable=True).indices[:12].tolist())


def _fitted(points: Tensor, count: int, iterations: int, seed: int) -> list[Tensor]:
    start = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))[:count]
    centroids = [points[i] for i in start]
    for _ in range(iterations):
        members: list[list[Tensor]] = [[] for _ in centroids]
        for point in points:
            members[min(range(count), key=lambda c: float((point - centroids[c]).square().sum()))].append(point)
        centroids = [torch.stack(of).mean(0) if of else old for of, old in zip(members, centroids)]
    return centroids


def test_as_many_centroids_as_keys_choose_exactly() -> None:
    tokens = draw_tokens(41, 4)
    keys, query = tokens.keys[:, :40], tokens.queries[:, 40:]
    chosen = choose(PQCache(heads="query"), SHAPE, query, keys, 7).units
    exact = (query @ keys.repeat_interleave(2, 0).mT)[:, 0].topk(7).indices.sort(-1).values
    assert torch.equal(chosen, exact)


def test_a_shift_of_all_keys_changes_nothing() -> None:
    tokens = draw_tokens(101, 6)
    keys, query = tokens.keys[:, :100], tokens.queries[:, 100:]
    shift = torch.randn(2, 1, SHAPE.head_dim, generator=torch.Generator().manual_seed(0)).double()
    shifted = choose(PQCache(bits=3), SHAPE, query, (keys.double() + shift), 10)
    assert torch.equal(shifted.units, choose(PQCache(bits=3), SHAPE, query, keys, 10).units)


def test_what_has_settled_grows_by_a_seventh_to_a_quarter() -> None:
    steps = sorted({settled(count) for count in range(4, 5000)})
    assert steps[:10] == [4, 5, 6, 7, 8, 10, 12, 14, 16, 20]
    assert all(8 / 7 <= after / before <= 5 / 4 for before, after in pairwise(steps))
    assert all(0.8 * count < settled(count) <= count for count in range(1, 5000))


def test_new_tokens_get_the_centroids_there_are_until_a_refit(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[int] = []
    fit = pqcache.fit_centroids
    monkeypatch.setattr(
        pqcache, "fit_centroids", lambda points, *how: (fits.append(points.shape[-2]), fit(points, *how))[1]
    )
    method = PQCache(bits=2)
    runner = Runner(phase_plan(method, Budget(tokens=20, sinks=2, window=4, dense_layers=()), "decode"))
    state = runner.state()
    tokens = draw_tokens(90, 1)
    runner.feed_all(tokens.part(0, 78), 66, range(66, 78))  # 61 to 72 candidates
    assert fits == [56, 64]
    before = state.centroids
    runner.crop(0, 70)
    runner.feed_all(tokens.part(0, 72), 66, range(70, 72), start=70)
    assert fits == [56, 64]
    assert state.centroids is before, "what is left of the sequence was fitted to"
    runner.crop(0, 60)
    runner.feed_all(tokens.part(0, 60).then(draw_tokens(15, 2)), 74, [74], start=60)  # as many candidates again
    assert fits == [56, 64, 64], "tokens that the centroids were fitted to are gone"


def test_prepare_fits_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, query = draw_tokens(100, 6).keys, draw_tokens(1, 7).queries
    method, reader, candidates = PQCache(bits=3), Keys(keys), Candidates(0, 100, 1)
    state = method.new_state(SHAPE)
    method.prepare(state, SHAPE, candidates, reader, Limit(9))  # type: ignore[arg-type]
    expected = choose(method, SHAPE, query, keys, 9)
    monkeypatch.setattr(pqcache, "fit_centroids", None)
    again = method.select(state, SHAPE, query, 100, candidates, Limit(9), reader)  # type: ignore[arg-type]
    assert torch.equal(again.units, expected.units)
