"""Summaries of the pages that tokens have just filled, from the cache, for a whole step in one launch.

A page's row is computed when its last token is written: until then the page is in the window of every query that sees
it, so nobody reads its row. Nothing is kept between steps, so that a page may be filled in chunks, or again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.block_pages import BlockPages
from kvsift.kernels.page_summary import row_twin, summarise
from kvsift.kernels.sketch import SKETCHES, SketchLayout, rotation
from kvsift.kernels.sketch_append import write_sketch
from kvsift.kernels.summary_twins import write_row
from kvsift.kernels.triton_shim import jit, power_of_two, runs_on_triton, tl

FEW = 1024  # tokens; of so many each has a program of its own


def summarise_slots(kind: str, slots: Tensor, keys: Tensor, values: Tensor, rows: Tensor, pages: BlockPages) -> None:
    """Write the rows of the pages whose last slot is among ``slots``.

    Args:
        kind: of summary; one with a Triton twin, or a sketch.
        slots: int64 [num_tokens], where tokens have been written; negative ones are padding.
        keys, values: [num_kv_heads, num_pages, page_size, head_dim] by page number (``BlockPages.split``).
        rows: [num_kv_heads, num_pages, width], the last stride 1.
        pages: of the cache.
    """
    if not len(slots):
        return
    run = summarise_slots_triton if runs_on_triton(slots) else summarise_slots_reference
    run(kind, slots, keys, values, rows, pages)


def compile_ahead(kind: str, keys: Tensor, values: Tensor, rows: Tensor, pages: BlockPages) -> None:
    """Compile what ``summarise_slots`` runs, for any number of tokens: Triton tells 1 and multiples of 16 apart."""
    for count in (1, 2, 16, FEW + 1, FEW + 16):
        summarise_slots(kind, torch.full((count,), -1, device=keys.device), keys, values, rows, pages)


def summarise_slots_reference(
    kind: str, slots: Tensor, keys: Tensor, values: Tensor, rows: Tensor, pages: BlockPages
) -> None:
    numbers = pages.of_slots(slots[(slots >= 0) & (slots % pages.page_size == pages.page_size - 1)])
    rows[:, numbers] = summarise(kind, keys[:, numbers], None, values[:, numbers])


def summarise_slots_triton(
    kind: str, slots: Tensor, keys: Tensor, values: Tensor, rows: Tensor, pages: BlockPages
) -> None:
    count, heads = len(slots), keys.shape[0]
    tokens = 1 if count <= FEW else pages.page_size  # of a program: one row in most of a long prompt
    grid = (-(-count // tokens), heads)
    layout = (pages.block_size, pages.step, pages.page_size)
    slots_of_page = max(16, power_of_two(pages.page_size))
    if kind in SKETCHES:
        sketch = SketchLayout(SKETCHES[kind], keys.shape[3], pages.page_size)
        _sketches_kernel[grid](
            slots, count, keys, values, rotation(sketch.head_dim, rows.device), rows.view(torch.int32),
            rows.view(torch.float16), rows.view(torch.int8), *keys.stride()[:3], *values.stride()[:3],
            *rows.stride()[:2], *layout, TOKENS=tokens, D=sketch.head_dim, DP=32 * power_of_two(sketch.words),
            SLOTS=slots_of_page, BITS=sketch.bits, WORDS=sketch.words, FACTORS=sketch.factors,
            KEY_MEAN=sketch.key_mean, VALUE_MEAN=sketch.value_mean, SCALES=sketch.scales, WIDTH=sketch.width,
            num_warps=4 if slots_of_page <= 32 else 8,
        )  # fmt: skip
        return
    assert row_twin(kind) is not None, f"{kind} has no twin"
    _rows_kernel[grid](
        slots, count, keys, rows.view(torch.uint8) if rows.element_size() == 1 else rows, *keys.stride()[:3],
        *rows.stride()[:2], *layout, TOKENS=tokens, SLOTS=slots_of_page, KIND=kind, D=keys.shape[3],
        DP=power_of_two(keys.shape[3]), num_warps=1,
    )  # fmt: skip


@jit
def filled_page(slots_ptr, token, count, BLOCK: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr):
    """The page of a token, its place there, and whether that is the last."""
    slot = tl.load(slots_ptr + token, mask=token < count, other=-1).to(tl.int64)
    place = slot % PAGE
    return slot // BLOCK * STEP + slot % BLOCK // PAGE, place, (slot >= 0) & (place == PAGE - 1)


@jit
def _rows_kernel(
    slots_ptr, count, keys_ptr, rows_ptr, k_head, k_page, k_slot, r_head, r_page, BLOCK: tl.constexpr,
    STEP: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr, KIND: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    head, slots, d = tl.program_id(1).to(tl.int64), tl.arange(0, SLOTS), tl.arange(0, DP)
    for i in range(TOKENS):
        page, place, filled = filled_page(slots_ptr, tl.program_id(0) * TOKENS + i, count, BLOCK, STEP, PAGE)
        if filled:
            valid = slots <= place
            at = keys_ptr + head * k_head + page * k_page + (slots * k_slot)[:, None] + d[None, :]
            keys = tl.load(at, mask=valid[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
            write_row(rows_ptr + head * r_head + page * r_page, keys, valid, KIND, D, DP)


@jit
def _sketches_kernel(
    slots_ptr, count, keys_ptr, values_ptr, rotation_ptr, words_ptr, halves_ptr, octets_ptr, k_head, k_page, k_slot,
    v_head, v_page, v_slot, head_bytes, page_bytes, BLOCK: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SLOTS: tl.constexpr, BITS: tl.constexpr,
    WORDS: tl.constexpr, FACTORS: tl.constexpr, KEY_MEAN: tl.constexpr, VALUE_MEAN: tl.constexpr,
    SCALES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    for i in range(TOKENS):
        page, place, filled = filled_page(slots_ptr, tl.program_id(0) * TOKENS + i, count, BLOCK, STEP, PAGE)
        if filled:
            write_sketch(
                keys_ptr + head * k_head + page * k_page, values_ptr + head * v_head + page * v_page, rotation_ptr,
                words_ptr, halves_ptr, octets_ptr, head * head_bytes + page * page_bytes, place, k_slot, v_slot, D, DP,
                PAGE, SLOTS, BITS, WORDS, FACTORS, KEY_MEAN, VALUE_MEAN, SCALES, WIDTH,
            )  # fmt: skip
