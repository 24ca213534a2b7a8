"""How unlike the mean each query is: by hand, and the twin against the reference."""

from pathlib import Path

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, far_memory, needs_triton

from kvsift.kernels.unlikeness import unlikeness, unlikeness_reference, unlikeness_triton


def test_by_hand() -> None:
    queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [3.0, 3.0], [0.0, 0.0]]])
    expected = torch.tensor([-(0.5**0.5), -(0.5**0.5), -1.0, 0.0])
    torch.testing.assert_close(unlikeness(queries, 1, 1)[0, 0], expected)


@pytest.mark.parametrize("how", [unlikeness_reference, pytest.param(unlikeness_triton, marks=needs_triton)])
def test_queries_that_cancel_out_are_taken_evenly(how: object) -> None:
    queries = torch.tensor([1.0, -1.0] * 4, device=DEVICE)[None, :, None].expand(1, 8, 16)
    assert how(queries, 1, 2)[0, 0].tolist() == [1, -1, -1, -1, 1, -1, -1, -1]  # type: ignore[operator]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 128, 64), (3, 100, 80), (1, 16, 128)], ids=str)  # heads, queries, head_dim
def test_the_twin(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    heads, size, head_dim = shape
    drawn = torch.randn(3 * size, heads, head_dim, generator=torch.Generator().manual_seed(size)) + 0.3
    queries = drawn.to(DEVICE, dtype).transpose(0, 1)
    found, expected = (run(queries, 3, 16) for run in (unlikeness_triton, unlikeness_reference))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@needs_triton
def test_queries_that_lie_beyond_32_bits_are_read_where_they_lie(tmp_path: Path) -> None:
    stride = 1 << 29  # of a token: 6 of them go as far as 400,000 tokens of 32 query and 8 KV heads
    queries = far_memory(tmp_path, 6 * stride, torch.float16).view(1, 6, stride)[..., :16]
    queries.copy_(torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(0)))
    found, expected = (run(queries, 1, 2) for run in (unlikeness_triton, unlikeness_reference))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
