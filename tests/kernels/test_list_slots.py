"""Slots of listed units: by hand, and the twin against the reference."""

import pytest
import torch
from kernels.conftest import DEVICE, needs_triton

from kvsift.kernels.list_slots import list_slots, list_slots_reference, list_slots_triton
from kvsift.kernels.segment_attention import Rows

POOL = torch.empty(1, 400, 4, 2, device=DEVICE)  # pages of 4 tokens


def rows(*table: int) -> Rows:
    return Rows(POOL, POOL, torch.tensor(table, dtype=torch.int32, device=DEVICE))


def listed(*units: list[int]) -> torch.Tensor:
    return torch.tensor(units, dtype=torch.int32, device=DEVICE).unsqueeze(0)


def test_by_hand() -> None:
    counts = torch.tensor([[2, 1]], dtype=torch.int32, device=DEVICE)
    slots, held = list_slots(listed([0, 3, -1], [1, -1, -1]), counts, 2, rows(7, 5), 4)
    assert held.tolist() == [[4, 4, 2, 2]]
    assert slots[0, 1, :4].tolist() == slots[0, 0, :4].tolist() == [28, 29, 22, 23]
    assert slots[0, 3, :2].tolist() == slots[0, 2, :2].tolist() == [30, 31]


@needs_triton
@pytest.mark.parametrize(("unit_size", "heads", "num_lists"), [(1, 3, 3), (1, 1, 2), (8, 2, 2), (2, 2, 4)])
def test_the_twin(unit_size: int, heads: int, num_lists: int) -> None:
    generator = torch.Generator().manual_seed(unit_size)
    lists = torch.randint(400 * 4 // unit_size, (2, heads, 1100), generator=generator).to(DEVICE, torch.int32)
    counts = torch.tensor([0, 1, 1024, 1025, 1099, 1100], dtype=torch.int32, device=DEVICE)[: 2 * heads].view(2, heads)
    lists[torch.arange(1100, device=DEVICE) >= counts.unsqueeze(2)] = 1 << 29  # not to be read
    table = rows(*torch.randperm(400, generator=generator).tolist())
    (found, held), (expected, also) = (
        run(lists, counts, unit_size, table, num_lists) for run in (list_slots_triton, list_slots_reference)
    )
    assert torch.equal(held, also)
    inside = torch.arange(found.shape[2], device=DEVICE) < held.unsqueeze(2)
    assert torch.equal(found[inside], expected[inside])


@needs_triton
def test_lists_without_room_for_a_unit_have_none() -> None:
    lists = torch.empty(2, 3, 0, dtype=torch.int32, device=DEVICE)
    found, held = list_slots_triton(lists, torch.zeros(2, 3, dtype=torch.int32, device=DEVICE), 4, rows(7, 5), 3)
    assert held.tolist() == [[0] * 3] * 2
    assert found.shape == (2, 3, 0)
