"""Data sets for indexes: reproducible, and of the kind they are named for."""

import pytest
import torch
from kvsift_lab.bench.index_data import IndexData, index_data
from torch import Tensor

from kvsift.errors import InputError
from kvsift.kernels.rerotate import rerotate


def small(kind: str, n: int = 4096, seed: int = 0) -> IndexData:
    return index_data(kind, n, num_kv_heads=2, group_size=2, num_samples=64, num_queries=24, seed=seed)


def weights(data: IndexData) -> Tensor:
    """float32 [num_query_heads, m, n], attention of the decode queries, heaviest first."""
    keys = data.keys.float().repeat_interleave(2, 0)
    logits = data.queries.float() @ keys.transpose(1, 2) / keys.shape[2] ** 0.5
    return logits.softmax(-1).sort(-1, descending=True).values


@pytest.mark.parametrize("kind", ["R", "S", "T"])
def test_shapes_positions_and_seeds(kind: str) -> None:
    data, again, other = small(kind), small(kind), small(kind, seed=1)
    assert data.keys.shape == (2, 4096, 128)
    assert data.samples.shape == (4, 64, 128)
    assert data.queries.shape == (4, 24, 128)
    assert data.keys.dtype == data.queries.dtype == torch.bfloat16
    assert data.positions.tolist() == sorted(set(data.positions.tolist()))
    assert int(data.positions[-1]) < 4096 <= int(data.query_positions[0])
    assert int(data.query_positions[-1]) < 4096 + 512
    assert torch.equal(data.keys, again.keys)
    assert torch.equal(data.queries, again.queries)
    assert not torch.equal(data.keys, other.keys)


def test_s_is_peaky_and_t_is_not() -> None:
    peaky, diffuse = (weights(small(kind, 16384))[..., :100].sum(-1).mean() for kind in "ST")
    assert 0.6 < peaky < 0.97  # 0.76 at 32K
    assert 0.1 < diffuse < 0.45  # 0.2 at 32K
    noise = weights(small("R"))[..., :100].sum(-1).mean()
    assert noise < 0.4


def test_s_has_keys_that_most_queries_want_and_t_has_not() -> None:
    def most_wanted(kind: str) -> float:
        data = small(kind, 16384)
        best = (data.queries[:2].float() @ data.keys[0].float().T).topk(100, -1).indices
        return float(torch.bincount(best.flatten()).max()) / best[..., 0].numel()

    assert most_wanted("S") > 1.5 * most_wanted("T")


def test_queries_far_apart_ask_alike_only_once_they_are_turned() -> None:
    data = small("S")
    mean = data.samples[0].float().mean(0)
    turned = rerotate(data.samples, data.positions, torch.full_like(data.positions, 4096), data.rope)
    assert turned[0].float().mean(0).norm() > mean.norm()


@pytest.mark.parametrize(("kind", "n", "dim"), [("Z", 100, 128), ("S", 0, 128), ("S", 100, 15)])
def test_what_cannot_be_made_is_refused(kind: str, n: int, dim: int) -> None:
    with pytest.raises(InputError):
        index_data(kind, n, head_dim=dim)
