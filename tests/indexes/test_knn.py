"""Exact nearest keys: as a full sort finds them, whatever the blocks."""

import pytest
import torch
from indexes.brute_force import needs_core
from refusals import refused
from torch import Tensor

from kvsift.indexes import knn as module
from kvsift.indexes.from_samples import sample_lists
from kvsift.indexes.knn import knn
from kvsift.indexes.samples import QuerySamples


def draw(num_query_heads: int, num_kv_heads: int, t: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Whole numbers: their products are exact, and many of them are equal."""
    generator = torch.Generator().manual_seed(n)
    queries, keys = (
        torch.randint(-2, 3, shape, generator=generator).to(dtype)
        for shape in ((num_query_heads, t, 8), (num_kv_heads, n, 8))
    )
    return queries, keys


def sorted_ids(queries: Tensor, keys: Tensor, k: int, stops: Tensor | None) -> Tensor:
    group_size = queries.shape[0] // keys.shape[0]
    scores = queries.float() @ keys.float().repeat_interleave(group_size, 0).transpose(1, 2)
    if stops is not None:
        scores.masked_fill_(torch.arange(keys.shape[1]) >= stops[:, None], -torch.inf)
    order = scores.sort(dim=-1, descending=True, stable=True)
    ids = order.indices.masked_fill(order.values == -torch.inf, -1)[..., :k]
    return torch.nn.functional.pad(ids, (0, k - ids.shape[-1]), value=-1).int()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [1, 5, 700, 3000, 3007])  # from 2560 on strips are ranked first; 3007 leaves a rest
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("by", ["torch", pytest.param("core", marks=needs_core)])
def test_the_nearest_keys_in_order_equal_ones_by_id(
    by: str, dtype: torch.dtype, n: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "torch":
        monkeypatch.setattr(module.native, "available", lambda: False)
    monkeypatch.setattr(module, "BLOCK_BYTES", 7 * n * dtype.itemsize)  # blocks of 7 queries
    queries, keys = draw(4, 2, 20, n, dtype)
    stops = torch.arange(20) * (n + 30) // 20 if causal else None
    found = knn(queries, keys, 10, stops)
    assert found.dtype == torch.int32
    assert torch.equal(found, sorted_ids(queries, keys, 10, stops))


@needs_core
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [1, 100, 600])
def test_core_and_torch_find_the_same(dtype: torch.dtype, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(k)
    scores = torch.randn(11, 5000, generator=generator).to(dtype)
    scores[1, 5:] = -torch.inf  # fewer than k are left
    scores[2] = 0.0
    scores[2, ::2] = -0.0  # equal to 0
    scores[3, :] = scores[3].sort().values  # all better than all before
    scores[4, 7] = torch.inf
    stops = torch.tensor([5000, 5000, 4000, 5000, 5000, 0, 1, 99, 4999, 5000, 6000])
    found = module._top(scores, k, stops)
    monkeypatch.setattr(module.native, "available", lambda: False)
    assert torch.equal(found, module._top(scores.clone(), k, stops))


@needs_core
def test_a_score_that_is_no_number_is_never_found() -> None:
    scores = torch.tensor([[1.0, torch.nan, 3.0, -torch.nan]])
    assert module._top(scores, 4, None).tolist() == [[2, 0, -1, -1]]


def test_no_keys_no_neighbours() -> None:
    queries, keys = draw(2, 1, 3, 0, torch.float32)
    assert torch.equal(knn(queries, keys, 4), torch.full((2, 3, 4), -1, dtype=torch.int32))


@pytest.mark.parametrize(("heads", "k"), [((3, 2), 5), ((2, 2), 0)])
def test_what_does_not_fit_is_refused(heads: tuple[int, int], k: int) -> None:
    queries, keys = draw(*heads, 3, 10, torch.float32)
    with refused("invalid_tensor"):
        knn(queries, keys, k)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lists_of_queries_on_a_gpu_are_made_there_and_come_back(dtype: torch.dtype) -> None:
    queries, keys = draw(4, 2, 300, 6000, dtype)
    positions = torch.arange(300) * 20
    here, there = (
        sample_lists(keys, QuerySamples(queries.to(device), positions), 200, 50, window=100)
        for device in ("cpu", "cuda")
    )
    assert there.device.type == "cpu"
    assert torch.equal(there, here)
