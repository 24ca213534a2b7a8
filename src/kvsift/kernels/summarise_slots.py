"""Summaries of the pages that tokens fill, from the cache, for a whole step in one launch, which may write the tokens.

A page's row is computed when its last token is written: until then the page is in the window of every query that sees
it, so its row is not read. Nothing is kept between steps, so that a page may be filled in chunks, or again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.block_pages import BlockPages
from kvsift.kernels.coded_pages import load_keys
from kvsift.kernels.page_summary import row_twin, summarise_pages
from kvsift.kernels.sketch import SKETCHES, SketchLayout, random_rotation
from kvsift.kernels.sketch_append import write_sketch
from kvsift.kernels.summary_twins import write_row
from kvsift.kernels.triton_shim import jit, power_of_two, runs_on_triton, tl

FEW = 1024  # tokens; of so many each has a program of its own


def summarise_slots(
    kind: str, slots: Tensor, keys: Tensor, values: Tensor, rows: Tensor, pages: BlockPages,
    tokens: tuple[Tensor, Tensor] | None = None, *, pdl: bool = False,
) -> None:  # fmt: skip
    """Write the rows of the pages whose last slot is among ``slots``.

    Args:
        kind: kind of summary; one with a Triton twin, or a sketch.
        slots: int64 [num_tokens], of tokens in the order of their sequences; negative ones are padding.
        keys, values: [num_kv_heads, num_pages, page_size, head_dim] by page number (``BlockPages.split``),
            float8_e4m3fn, and int8 (``kernels.coded_pages``) if there are no tokens to write, among their dtypes.
        rows: [num_kv_heads, num_pages, width], the last stride 1.
        pages: the pages of the cache.
        tokens: keys and values of the slots, each [>= num_tokens, num_kv_heads, head_dim] with last strides (head_dim,
            1), to be written first; by default they are there. Up to ``FEW``: a launch saved for steps that decode.
        pdl: programmatic dependent launch: may start while the kernel before still runs, and lets the one behind it
            start, which must not read the rows written here before this one has ended (Hopper and later).
    """
    if not len(slots):
        return
    if runs_on_triton(slots):
        summarise_slots_triton(kind, slots, keys, values, rows, pages, tokens, pdl=pdl)
    else:
        summarise_slots_reference(kind, slots, keys, values, rows, pages, tokens)


def compile_ahead(kind: str, keys: Tensor, values: Tensor, rows: Tensor, pages: BlockPages, pdl: bool) -> None:
    """Compile what ``summarise_slots`` runs, for any number of tokens: Triton specializes 1 and multiples of 16."""
    new = torch.empty(2, FEW + 16, 3, *keys.shape[::3], dtype=keys.dtype, device=keys.device)  # strides as of a model's
    for count in (1, 2, 16, FEW + 1, FEW + 16):
        slots, tokens = torch.full((count,), -1, device=keys.device), tuple(new[:, :count, 0])
        for each in (None, tokens) if count <= FEW and keys.element_size() > 1 else (None,):
            summarise_slots(kind, slots, keys, values, rows, pages, each, pdl=pdl)


def summarise_slots_reference(
    kind: str, slots: Tensor, keys: Tensor, values: Tensor, rows: Tensor, pages: BlockPages,
    tokens: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    # head by head: the pages of different heads may share numbers, which deterministic index_put on a GPU cannot write
    if tokens is not None:
        held = (slots >= 0).nonzero().squeeze(1)
        numbers, places = pages.of_slots(slots[held]), slots[held] % pages.page_size
        for pool, new in zip((keys, values), tokens):
            for head, tokens_of_head in zip(pool, new[held].unbind(1)):
                head[numbers, places] = tokens_of_head
    numbers = pages.of_slots(slots[(slots >= 0) & (slots % pages.page_size == pages.page_size - 1)])
    for head, summaries in zip(rows, summarise_pages(kind, keys, values, numbers, rows)):
        head[numbers] = summaries


def summarise_slots_triton(
    kind: str, slots: Tensor, keys: Tensor, values: Tensor, rows: Tensor, pages: BlockPages,
    tokens: tuple[Tensor, Tensor] | None = None, *, pdl: bool = False,
) -> None:  # fmt: skip
    count, heads = len(slots), keys.shape[0]
    of_program = 1 if count <= FEW else pages.page_size  # one row in most of a long prompt
    grid = (-(-count // of_program), heads)
    new_keys, new_values = tokens if tokens is not None else (keys, values)
    new = (slots, count, new_keys, new_values, new_keys.stride(0), new_values.stride(0))
    layout = (pages.block_size, pages.step, pages.page_size, of_program, tokens is not None)
    early = {"launch_pdl": True} if pdl else {}
    slots_of_page = max(16, power_of_two(pages.page_size))
    if kind in SKETCHES:
        sketch = SketchLayout(SKETCHES[kind], keys.shape[3], pages.page_size)
        _sketches_kernel[grid](
            *new, keys, values, random_rotation(sketch.head_dim, rows.device), rows.view(torch.int32),
            rows.view(torch.float16), rows.view(torch.int8), *keys.stride()[:3], *values.stride()[:3],
            *rows.stride()[:2], *layout, D=sketch.head_dim, DP=32 * power_of_two(sketch.words),
            SLOTS=slots_of_page, BITS=sketch.bits, WORDS=sketch.words, FACTORS=sketch.factors,
            KEY_MEAN=sketch.key_mean, VALUE_MEAN=sketch.value_mean, SCALES=sketch.scales, WIDTH=sketch.width, PDL=pdl,
            num_warps=4 if slots_of_page <= 32 else 8, **early,
        )  # fmt: skip
        return
    assert row_twin(kind) is not None, f"{kind} has no twin"
    _rows_kernel[grid](
        *new, keys, values, rows.view(torch.uint8) if rows.element_size() == 1 else rows, *keys.stride()[:3],
        *values.stride()[:3], *rows.stride()[:2], *layout, SLOTS=slots_of_page, KIND=kind, D=keys.shape[3],
        DP=power_of_two(keys.shape[3]), PDL=pdl, num_warps=1, **early,
    )  # fmt: skip


@jit
def take_token(
    i, slots_ptr, count, new_keys_ptr, new_values_ptr, nk_token, nv_token, keys_ptr, values_ptr, k_head, k_page, k_slot,
    v_head, v_page, v_slot, BLOCK: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    NEW: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Write the i-th token of a program if it is NEW; return whether it fills its page, the page, the token's place
    there, and where the page's keys and values lie."""
    head, token = tl.program_id(1).to(tl.int64), tl.program_id(0) * TOKENS + i
    slot = tl.load(slots_ptr + token, mask=token < count, other=-1).to(tl.int64)
    page, place = slot // BLOCK * STEP + slot % BLOCK // PAGE, slot % PAGE
    keys_ptr += head * k_head + page * k_page
    values_ptr += head * v_head + page * v_page
    if NEW:
        write_token(
            keys_ptr, values_ptr, k_slot, v_slot, slots_ptr, slot, place, token, new_keys_ptr + head * D,
            new_values_ptr + head * D, nk_token, nv_token, PAGE, SLOTS, D, DP,
        )  # fmt: skip
    return (slot >= 0) & (place == PAGE - 1), page, place, keys_ptr, values_ptr


@jit
def write_token(
    keys_ptr, values_ptr, k_slot, v_slot, slots_ptr, slot, place, token, new_keys_ptr, new_values_ptr, nk_token,
    nv_token, PAGE: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """A token into its page. The last one writes those of its step before it too: their programs may run later."""
    d, slots = tl.arange(0, DP), tl.arange(0, SLOTS)
    if slot >= 0:
        key = tl.load(new_keys_ptr + token * nk_token + d, mask=d < D)
        value = tl.load(new_values_ptr + token * nv_token + d, mask=d < D)
        tl.store(keys_ptr + place * k_slot + d, key, mask=d < D)
        tl.store(values_ptr + place * v_slot + d, value, mask=d < D)
        if place == PAGE - 1:
            others = token - place + slots
            found = tl.load(slots_ptr + others, mask=(others >= 0) & (others < token), other=-1)
            fresh = (found == slot - place + slots)[:, None] & (d < D)[None, :]
            keys = tl.load(new_keys_ptr + (others * nk_token)[:, None] + d[None, :], mask=fresh)
            values = tl.load(new_values_ptr + (others * nv_token)[:, None] + d[None, :], mask=fresh)
            tl.store(keys_ptr + (slots * k_slot)[:, None] + d[None, :], keys, mask=fresh)
            tl.store(values_ptr + (slots * v_slot)[:, None] + d[None, :], values, mask=fresh)
            tl.debug_barrier()  # other threads read them


@jit
def _rows_kernel(
    slots_ptr, count, new_keys_ptr, new_values_ptr, nk_token, nv_token, keys_ptr, values_ptr, rows_ptr, k_head, k_page,
    k_slot, v_head, v_page, v_slot, r_head, r_page, BLOCK: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, NEW: tl.constexpr, SLOTS: tl.constexpr, KIND: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # attention reads early what is older than the kernel before this one
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head, slots = tl.program_id(1).to(tl.int64), tl.arange(0, SLOTS)
    for i in range(TOKENS):
        fills, page, _, keys_of_page, _ = take_token(
            i, slots_ptr, count, new_keys_ptr, new_values_ptr, nk_token, nv_token, keys_ptr, values_ptr, k_head, k_page,
            k_slot, v_head, v_page, v_slot, BLOCK, STEP, PAGE, TOKENS, NEW, SLOTS, D, DP,
        )  # fmt: skip
        if fills:
            valid = slots < PAGE
            keys = load_keys(keys_of_page, slots, valid, k_slot, PAGE, D, DP, SLOTS)
            write_row(rows_ptr + head * r_head + page * r_page, keys, valid, KIND, D, DP)


@jit
def _sketches_kernel(
    slots_ptr, count, new_keys_ptr, new_values_ptr, nk_token, nv_token, keys_ptr, values_ptr, rotation_ptr, words_ptr,
    halves_ptr, octets_ptr, k_head, k_page, k_slot, v_head, v_page, v_slot, head_bytes, page_bytes,
    BLOCK: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, NEW: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, SLOTS: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr,
    FACTORS: tl.constexpr, KEY_MEAN: tl.constexpr, VALUE_MEAN: tl.constexpr, SCALES: tl.constexpr,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # attention reads early what is older than the kernel before this one
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(1).to(tl.int64)
    for i in range(TOKENS):
        fills, page, place, keys_of_page, values_of_page = take_token(
            i, slots_ptr, count, new_keys_ptr, new_values_ptr, nk_token, nv_token, keys_ptr, values_ptr, k_head, k_page,
            k_slot, v_head, v_page, v_slot, BLOCK, STEP, PAGE, TOKENS, NEW, SLOTS, D, DP,
        )  # fmt: skip
        if fills:
            write_sketch(
                keys_of_page, values_of_page, rotation_ptr, words_ptr, halves_ptr, octets_ptr,
                head * head_bytes + page * page_bytes, place, k_slot, v_slot, D, DP, PAGE, SLOTS, BITS, WORDS, FACTORS,
                KEY_MEAN, VALUE_MEAN, SCALES, WIDTH,
            )  # fmt: skip
