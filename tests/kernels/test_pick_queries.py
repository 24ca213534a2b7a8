"""The picked queries: by hand, and the twin against the reference."""

from pathlib import Path

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, crossed, far_memory, needs_triton

from kvsift.kernels.pick_queries import pick_queries, pick_queries_reference, pick_queries_triton

WAYS = [(True, True), (False, True), (True, False), (False, False)]  # shared, mean


@pytest.mark.parametrize("pick", [pick_queries_reference, pytest.param(pick_queries_triton, marks=needs_triton)])
def test_by_hand(pick: object) -> None:
    queries = torch.tensor([[[1.0], [2], [3]], [[10], [20], [30]]], device=DEVICE)
    scores = torch.tensor([[[0.5, 2, 0.5], [0.5, 0, 2]]], device=DEVICE)
    found = {
        ways: pick(queries, scores, 1, 2, shared=ways[0], mean=ways[1], unit=False).flatten().tolist()  # type: ignore[operator]
        for ways in WAYS
    }
    # the means are 0.5, 1 and 1.25
    assert found[True, True] == [16.5, 11]
    assert found[True, False] == [3, 2, 30, 20]
    assert found[False, True] == [16, 5.5]
    assert found[False, False] == [2, 1, 30, 10]  # of a tie the first


@needs_triton
@crossed(
    shape=[(4, 2, 128, 64, 16), (3, 3, 100, 80, 5), (6, 1, 65, 16, 65), (2, 1, 16, 128, 1)],
    shared=[True, False],
    mean=[True, False],
    dtype=DTYPES,
)
def test_the_twin(shape: tuple[int, int, int, int, int], shared: bool, mean: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, size, head_dim, count = shape  # query heads, KV heads, queries, head_dim, count
    generator = torch.Generator().manual_seed(size)
    queries = torch.randn(3 * size, heads, head_dim, generator=generator).to(DEVICE, dtype).transpose(0, 1)
    scores = torch.randint(40, (3, heads, size), generator=generator).to(DEVICE, torch.float32)  # with ties
    for unit in (True, False):
        found, expected = (
            run(queries, scores, kv_heads, count, shared=shared, mean=mean, unit=unit)
            for run in (pick_queries_triton, pick_queries_reference)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@needs_triton
def test_scores_that_are_not_numbers_pick_no_query_of_another_segment() -> None:
    queries = torch.full((2, 40, 16), torch.nan, device=DEVICE)
    queries[:, :20] = 1
    scores = torch.full((2, 2, 20), torch.nan, device=DEVICE)
    found = pick_queries_triton(queries, scores, 1, 4, shared=True, mean=True, unit=False)
    assert torch.equal(found[0], torch.ones_like(found[0]))


@needs_triton
def test_queries_that_lie_beyond_32_bits_are_read_where_they_lie(tmp_path: Path) -> None:
    stride = 1 << 29  # of a token, as in test_unlikeness
    queries = far_memory(tmp_path, 6 * stride, torch.float16).view(1, 6, stride)[..., :16]
    queries.copy_(torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(0)))
    scores = torch.arange(6.0, device=DEVICE).view(1, 1, 6)
    found = pick_queries(queries, scores, 1, 2, shared=True, mean=True, unit=False)
    assert torch.equal(found[0, 0], queries[0, [5, 4]].float())
    assert torch.equal(pick_queries_triton(queries, scores, 1, 2, shared=True, mean=True, unit=False), found)
