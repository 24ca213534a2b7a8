"""Values in 8 bits with a scale per token and head."""

from __future__ import annotations

import pytest
import torch

from kvsift.stores.packed_values import pack_values, packed_width, unpack_values


def test_a_worked_example() -> None:
    values = torch.tensor([[2.54, -1.0, 0.006, 0.0]])  # scale 2.54 / 127 = 0.02: codes 127, -50, 0.3, 0
    rows = pack_values(values)
    assert rows.shape == (1, 8)
    assert rows[0, :4].tolist() == [127, -50, 0, 0]
    assert rows[:, 4:].view(torch.float32).item() == pytest.approx(0.02)
    torch.testing.assert_close(unpack_values(rows, torch.float32), torch.tensor([[2.54, -1.0, 0.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_is_off_by_half_a_step_of_its_own_token_at_most(dtype: torch.dtype) -> None:
    loud = torch.logspace(-3, 3, 50).unsqueeze(1)  # tokens of all sizes: none spoils another
    values = (torch.randn(3, 50, 16, generator=torch.Generator().manual_seed(0)) * loud).to(dtype)
    off = (unpack_values(pack_values(values), torch.float32) - values.float()).abs()
    step = values.float().abs().amax(-1, keepdim=True) / 127
    assert bool((off <= 0.5001 * step).all())
    assert bool((off > 0.3 * step).any())


def test_nothing_but_zeros_stays_so() -> None:
    assert not unpack_values(pack_values(torch.zeros(2, 3, 6)), torch.float32).any()


def test_a_row_takes_half_the_bytes_and_its_scale() -> None:
    assert packed_width(128) == 132
    assert pack_values(torch.zeros(2, 3, 5, dtype=torch.bfloat16)).shape == (2, 3, 9)  # any head_dim
