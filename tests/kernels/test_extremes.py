"""Extremes of segments: the reference by hand, the twin the same to the bit."""

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, needs_triton

from kvsift.kernels.extremes import extremes_reference, extremes_triton


def test_by_hand() -> None:
    x = torch.tensor([[[1.0, -2.0], [0.0, 5.0], [-3.0, 4.0]]])
    assert extremes_reference(x, 2).tolist() == [[[1.0, 5.0, 0.0, -2.0], [-3.0, 4.0, -3.0, 4.0]]]
    assert extremes_reference(x, 3).tolist() == [[[1.0, 5.0, -3.0, -2.0]]]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "size"), [((4, 256, 64), 128), ((3, 250, 80), 100), ((1, 5, 128), 16)], ids=str)
def test_the_twin(shape: tuple[int, int, int], size: int, dtype: torch.dtype) -> None:
    drawn = torch.randn(shape[1], shape[0], shape[2], generator=torch.Generator().manual_seed(size))
    x = drawn.to(DEVICE, dtype).transpose(0, 1)
    assert torch.equal(extremes_triton(x, size), extremes_reference(x, size))
