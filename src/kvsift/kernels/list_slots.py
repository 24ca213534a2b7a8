"""Addresses of the tokens of listed units, for attention that reads tokens one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.segment_attention import Rows
from kvsift.kernels.triton_shim import jit_for_any, runs_on_triton, tl, triton

TILE = 1024  # tokens of a program

Slots = tuple[Tensor, Tensor]


def list_slots(lists: Tensor, counts: Tensor, unit_size: int, rows: Rows, num_lists: int) -> Slots:
    """Return the slots of the tokens of listed units, and how many there are.

    Args:
        lists: int32 [num_segments, num_heads, capacity], units; those behind the count of a list are not read.
        counts: int32 [num_segments, num_heads], units listed.
        unit_size: tokens per unit.
        rows: the cache.
        num_lists: lists of each segment, a multiple of num_heads: consecutive ones are equal.

    Returns:
        Slots int32 [num_segments, num_lists, capacity * unit_size], undefined behind the count; counts int32
        [num_segments, num_lists].
    """
    run = list_slots_triton if runs_on_triton(lists) else list_slots_reference
    return run(lists, counts, unit_size, rows, num_lists)


def list_slots_reference(lists: Tensor, counts: Tensor, unit_size: int, rows: Rows, num_lists: int) -> Slots:
    tokens = (lists.unsqueeze(-1) * unit_size + torch.arange(unit_size, device=lists.device)).flatten(2)
    listed = torch.arange(tokens.shape[2], device=lists.device) < (counts * unit_size).unsqueeze(2)
    repeats = num_lists // lists.shape[1]
    slots = rows.slots(tokens.masked_fill(~listed, 0)).to(torch.int32)
    return slots.repeat_interleave(repeats, 1), (counts * unit_size).repeat_interleave(repeats, 1)


def list_slots_triton(lists: Tensor, counts: Tensor, unit_size: int, rows: Rows, num_lists: int) -> Slots:
    num_segments, num_heads, capacity = lists.shape
    slots = lists.new_empty(num_segments, num_lists, capacity * unit_size)
    held = counts.new_empty(num_segments, num_lists)
    with torch.cuda.device_of(lists):
        _slots_kernel[num_segments * num_lists, max(triton.cdiv(capacity * unit_size, TILE), 1)](
            lists.contiguous(), counts.contiguous(), rows.table, slots, held, capacity, REPEATS=num_lists // num_heads,
            SIZE=unit_size, PAGE=rows.keys.shape[2], TILE=TILE, num_warps=4,
        )  # fmt: skip
    return slots, held


@jit_for_any("capacity")
def _slots_kernel(
    lists_ptr, counts_ptr, table_ptr, slots_ptr, held_ptr, capacity, REPEATS: tl.constexpr, SIZE: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    source = row // REPEATS
    count = tl.load(counts_ptr + source) * SIZE
    if first == 0:
        tl.store(held_ptr + row, count)
    i = first + tl.arange(0, TILE)
    token = tl.load(lists_ptr + source * capacity + i // SIZE, mask=i < count, other=0) * SIZE + i % SIZE
    page = tl.load(table_ptr + token // PAGE, mask=i < count, other=0)
    tl.store(slots_ptr + row * (capacity * SIZE) + i, page * PAGE + token % PAGE, mask=i < count)
