"""Exact search, one key at a time: what every index is compared with."""

import math
import random

import pytest
import torch
from torch import Tensor

from kvsift import native

needs_core = pytest.mark.skipif(not native.available(), reason=f"no compiled core: {native.why_missing()}")


def nearest(queries: Tensor, keys: Tensor, k: int) -> list[list[tuple[float, int]]]:
    """(score, id) of the k best keys of each query head, best first, ties to the lower id; fewer if there are fewer."""
    group = queries.shape[0] // keys.shape[0]
    found = []
    for head, query in enumerate(queries.double()):
        scores = (keys[head // group].double() @ query).tolist()
        order = sorted(range(len(scores)), key=lambda row: (-scores[row], row))[:k]
        found.append([(scores[row], row) for row in order])
    return found


def assert_exact(found: tuple[Tensor, Tensor], queries: Tensor, keys: Tensor, k: int) -> None:
    """The result of a search holds the k best keys, in order, up to what float32 cannot tell apart."""
    ids, scores = found
    assert ids.dtype == torch.int64
    assert scores.dtype == torch.float32
    assert ids.shape == scores.shape == (queries.shape[0], k)
    assert not bool(scores.isnan().any())
    group = queries.shape[0] // keys.shape[0]
    for head, expected in enumerate(nearest(queries, keys, k)):
        own_ids, own = ids[head].tolist(), scores[head].tolist()
        count = len(expected)
        assert own_ids[count:] == [-1] * (k - count)
        assert own[count:] == [-torch.inf] * (k - count)
        assert len(set(own_ids[:count])) == count
        ordered = sorted(range(count), key=lambda place: (-own[place], own_ids[place]))
        assert ordered == list(range(count)), "not in order, or a tie does not go to the lower id"
        for (score, _), row, claimed in zip(expected, own_ids, own):
            true = float(keys[head // group, row].double() @ queries[head].double())
            slack = 1e-5 * float(keys[head // group, row].double().abs() @ queries[head].double().abs()) + 1e-6
            assert abs(claimed - true) <= slack, "a score is wrong"
            assert abs(score - true) <= 2 * slack, "a better key was missed"


def assert_true_of_what_was_found(
    found: tuple[Tensor, Tensor], queries: Tensor, keys: Tensor, least: float = 0
) -> None:
    """What a search returned may miss keys, up to a share, and says nothing false: true scores, in order."""
    ids, scores = found
    group, there = queries.shape[0] // keys.shape[0], (ids >= 0).sum(1).tolist()
    assert torch.equal(ids < 0, scores == -torch.inf)
    assert int(ids.max()) < keys.shape[1]
    for head, count in enumerate(there):
        own_ids, own = ids[head].tolist(), scores[head].tolist()
        assert min(own_ids[:count], default=0) >= 0
        assert len(set(own_ids[:count])) == count
        assert sorted(range(count), key=lambda place: (-own[place], own_ids[place])) == list(range(count))
        rows, query = keys[head // group, own_ids[:count]].double(), queries[head].double()
        slack = 1e-5 * (rows.abs() @ query.abs()) + 1e-6
        assert bool(((torch.tensor(own[:count]).double() - rows @ query).abs() <= slack).all()), "a score is wrong"
    best = nearest(queries, keys, ids.shape[1])
    hits = sum(len({row for _, row in of} & set(own.tolist())) for of, own in zip(best, ids))
    assert hits >= least * sum(len(of) for of in best), "too much was missed"


def attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output [num_query_heads, d] and lse [num_query_heads] in float64 inside; 0 and -inf where nothing is seen."""
    group = queries.shape[0] // keys.shape[0]
    output, lse = [], []
    for head, query in enumerate(queries.double()):
        logits = (keys[head // group].double() @ query * scale).tolist()
        top = max(logits, default=-math.inf)
        weights = [0.0 if top == -math.inf else math.exp(logit - top) for logit in logits]
        total = sum(weights)
        lse.append(top + math.log(total) if total else -math.inf)
        rows = values[head // group].double()
        output.append(
            torch.tensor(weights, dtype=torch.float64) @ rows / total if total else rows.new_zeros(rows.shape[1])
        )
    return torch.stack(output).float(), torch.tensor(lse)


class Layers:
    """Random layers with odd sizes: no key at all, one, duplicates, more wanted than there are."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, most: int = 80) -> tuple[Tensor, Tensor, int]:
        """queries [num_query_heads, d], keys [num_kv_heads, n, d], k."""
        heads, group = self.random.choice([1, 2, 3]), self.random.choice([1, 2, 4, 5])
        n = self.random.choice([0, 1, 2, 3, 17, self.random.randint(4, most)])
        width = self.random.choice([8, 16, 40])
        dtype = self.random.choice([torch.float32, torch.bfloat16])
        keys = self.normal(heads, n, width)
        if n > 1 and self.random.random() < 0.4:
            keys = keys[:, torch.randint(0, max(n // 3, 1), (n,), generator=self.generator)]  # most of them twice
        if self.random.random() < 0.1:
            keys = torch.zeros_like(keys)
        k = self.random.choice([1, 2, 5, max(n, 1), n + 3])
        return self.normal(heads * group, width).to(dtype), keys.to(dtype), k

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)
