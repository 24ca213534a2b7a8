"""Triton twin of ``kernels.sketch.sketch_rows`` for the pages that hold the newest tokens of a batch, one launch.

A program takes a page of one KV head: it rotates its keys, and writes codes, factors and means. A launch of so few
programs takes as long as one, so the layers of a step share it: none reads the row of the page being filled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsift.kernels.coded_pages import ROUNDING, TINY, load_scales
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.sketch import SketchLayout, random_rotation
from kvsift.kernels.triton_shim import jit, power_of_two, tl


def pool_addresses(layers: Sequence[tuple[PagedKV, Tensor]]) -> Tensor:
    """Where the keys, the values and the rows of each layer lie, int64 [layers, 3], on their device."""
    rows = [[kv.keys.data_ptr(), kv.values.data_ptr(), rows.data_ptr()] for kv, rows in layers]
    return torch.tensor(rows, device=layers[0][1].device)


def write_newest_triton(
    kv: PagedKV, bits: int, rows: Tensor, addresses: Tensor | None = None, filled: bool = False, pdl: bool = False
) -> None:
    """Write the rows of the pages that hold each sequence's newest token, from the tokens up to it.

    Args:
        kv: keys and values of a layer.
        bits: bits per channel of the sketches.
        rows: uint8 [num_kv_heads, num_pages, width], contiguous.
        addresses: those of all written layers (``pool_addresses``), whose pools are shaped like these; by default
            this one is.
        filled: only the rows of pages of which that token is the last.
        pdl: programmatic dependent launch, see ``append_sketches``.
    """
    layout = SketchLayout(bits, kv.head_dim, kv.page_size)
    slots = max(16, power_of_two(kv.page_size))
    _sketch_kernel[kv.batch, kv.num_kv_heads, 1 if addresses is None else len(addresses)](
        kv.lengths if addresses is None else addresses, kv.keys, kv.values, kv.table, kv.lengths,
        random_rotation(kv.head_dim, rows.device), rows.view(torch.int32),
        rows.view(torch.float16), rows.view(torch.int8), *kv.keys.stride()[:3], *kv.values.stride()[:3],
        kv.table.stride(0), *rows.stride()[:2], D=kv.head_dim, DP=32 * power_of_two(layout.words), PAGE=kv.page_size,
        SLOTS=slots, BITS=bits, WORDS=layout.words, FACTORS=layout.factors, KEY_MEAN=layout.key_mean,
        VALUE_MEAN=layout.value_mean, SCALES=layout.scales, WIDTH=layout.width, LAYERED=addresses is not None,
        FILLED=filled, PDL=pdl, num_warps=4 if slots <= 32 else 8, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@jit
def rotated_keys(keys_ptr, rotation_ptr, offsets, valid, D: tl.constexpr, DP: tl.constexpr, SLOTS: tl.constexpr):
    """Keys [SLOTS, DP] times the rotation, some channels at a time: shared memory does not hold the whole matrix."""
    n, acc = tl.arange(0, DP), tl.zeros((SLOTS, DP), tl.float32)
    for first in range(0, DP, 32):
        k = first + tl.arange(0, 32)
        keys = tl.load(keys_ptr + offsets[:, None] + k[None, :], mask=valid[:, None] & (k < D)[None, :], other=0.0)
        part = tl.load(
            rotation_ptr + k[:, None] * D + n[None, :], mask=(k < D)[:, None] & (n < D)[None, :], other=0.0
        )  # fmt: skip
        acc = tl.dot(keys.to(tl.float32), part, acc, input_precision="tf32x3")
    return acc


@jit
def whole_numbers(means):
    """Whole numbers from -7 to 7, float32, and their scale, float16."""
    scale = tl.div_rn(tl.max(tl.abs(means), 0), 7.0)
    scale = tl.minimum(tl.maximum(scale, 0.000000059604644775390625), 65504.0).to(tl.float16)
    whole = tl.div_rn(means, scale.to(tl.float32) + tl.zeros_like(means))
    return (tl.minimum(tl.maximum(whole, -7.0), 7.0) + ROUNDING) - ROUNDING, scale


@jit
def store_pairs(octets_ptr, whole, count, D: tl.constexpr, DP: tl.constexpr):
    """``count`` bytes of whole numbers, two in each; zeros behind channel D."""
    channel = tl.arange(0, DP)
    halves = tl.where(channel < D, whole.to(tl.int32) + 8, 0)
    low, high = tl.split(tl.reshape(halves, (DP // 2, 2)))
    pair = tl.arange(0, DP // 2)
    tl.store(octets_ptr + pair, (low | high << 4).to(tl.int8), mask=pair < count)
    behind = DP // 2 + tl.arange(0, 32)
    tl.store(octets_ptr + behind, tl.zeros((32,), tl.int8), mask=behind < count)


@jit
def code_index(residual, D: tl.constexpr, BITS: tl.constexpr):
    """Which code each number gets, int32."""
    if BITS == 1:
        return (residual >= 0).to(tl.int32)
    else:
        step = tl.sqrt_rn(tl.sum(residual * residual, 1)) / tl.sqrt(D * 1.0)
        whole = tl.floor(residual / tl.maximum(step, TINY)[:, None])
        half: tl.constexpr = 1 << (BITS - 1)
        return tl.minimum(tl.maximum(whole + half, 0.0), 2.0 * half - 1.0).to(tl.int32)


@jit
def write_sketch(
    keys_ptr, values_ptr, rotation_ptr, words_ptr, halves_ptr, octets_ptr, start, place, k_slot, v_slot,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, SLOTS: tl.constexpr, BITS: tl.constexpr,
    WORDS: tl.constexpr, FACTORS: tl.constexpr, KEY_MEAN: tl.constexpr, VALUE_MEAN: tl.constexpr,
    SCALES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The row at byte ``start`` from a page's keys and values up to the token at ``place``."""
    slot, d = tl.arange(0, SLOTS), tl.arange(0, DP)
    valid, count = slot <= place, (place + 1).to(tl.float32)
    inside = valid[:, None] & (d < D)[None, :]
    if keys_ptr.dtype.element_ty == tl.int8:  # they are rotated
        keys = tl.load(keys_ptr + (slot * k_slot)[:, None] + d[None, :], mask=inside, other=0).to(tl.float32)
        keys *= load_scales(keys_ptr, slot, valid, PAGE, D)[:, None]
    else:
        keys = rotated_keys(keys_ptr, rotation_ptr, slot * k_slot, valid, D, DP, SLOTS)
    mean, scale = whole_numbers(tl.sum(keys, 0) / count)
    # the bytes that fill up each part are written too: they are zero
    store_pairs(octets_ptr + start + KEY_MEAN, mean, SCALES - KEY_MEAN, D, DP)
    tl.store(halves_ptr + start // 2 + SCALES // 2, scale)
    residual = tl.where(valid[:, None], keys - (mean * scale.to(tl.float32))[None, :], 0.0)
    index = tl.where(inside, code_index(residual, D, BITS), 0)
    product = tl.sum(residual * (2 * index - ((1 << BITS) - 1)).to(tl.float32), 1)
    factors = tl.sum(residual * residual, 1) / tl.maximum(product, TINY)
    factors = tl.where(product > 0, factors, 0.0).to(tl.float16)  # no residual: every code is right
    tl.store(halves_ptr + start // 2 + FACTORS // 2 + slot, factors, mask=slot < (KEY_MEAN - FACTORS) // 2)
    word = tl.arange(0, DP // 32)
    for bit in tl.static_range(BITS):
        channels = tl.reshape((index >> bit) & 1, (SLOTS, DP // 32, 32)) << tl.arange(0, 32)[None, None, :]
        at = words_ptr + start // 4 + ((bit * WORDS + word) * PAGE)[None, :] + slot[:, None]
        tl.store(at, tl.sum(channels, 2), mask=(slot < PAGE)[:, None] & (word < WORDS)[None, :])
    values = tl.load(values_ptr + (slot * v_slot)[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if values_ptr.dtype.element_ty == tl.int8:
        values *= load_scales(values_ptr, slot, valid, PAGE, D)[:, None]
    mean, scale = whole_numbers(tl.sum(values, 0) / count)
    store_pairs(octets_ptr + start + VALUE_MEAN, mean, WIDTH - VALUE_MEAN, D, DP)
    tl.store(halves_ptr + start // 2 + SCALES // 2 + 1, scale)
    end = SCALES + 4 + tl.arange(0, 32)
    tl.store(octets_ptr + start + end, tl.zeros((32,), tl.int8), mask=end < VALUE_MEAN)


@jit
def _sketch_kernel(
    addresses_ptr, keys_ptr, values_ptr, table_ptr, lengths_ptr, rotation_ptr, words_ptr, halves_ptr, octets_ptr,
    k_head, k_page, k_slot, v_head, v_page, v_slot, table_row, head_bytes, page_bytes,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, SLOTS: tl.constexpr, BITS: tl.constexpr,
    WORDS: tl.constexpr, FACTORS: tl.constexpr, KEY_MEAN: tl.constexpr, VALUE_MEAN: tl.constexpr,
    SCALES: tl.constexpr, WIDTH: tl.constexpr, LAYERED: tl.constexpr, FILLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if LAYERED:
        addresses_ptr += tl.program_id(2) * 3
        keys_ptr = tl.load(addresses_ptr).to(keys_ptr.dtype)
        values_ptr = tl.load(addresses_ptr + 1).to(values_ptr.dtype)
        words_ptr = tl.load(addresses_ptr + 2).to(words_ptr.dtype)
        halves_ptr = tl.load(addresses_ptr + 2).to(halves_ptr.dtype)
        octets_ptr = tl.load(addresses_ptr + 2).to(octets_ptr.dtype)
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tl.load(lengths_ptr + row) - 1
    if not FILLED or position % PAGE == PAGE - 1:
        page = tl.load(table_ptr + row * table_row + position // PAGE).to(tl.int64)
        write_sketch(
            keys_ptr + head * k_head + page * k_page, values_ptr + head * v_head + page * v_page, rotation_ptr,
            words_ptr, halves_ptr, octets_ptr, head * head_bytes + page * page_bytes, position % PAGE, k_slot, v_slot,
            D, DP, PAGE, SLOTS, BITS, WORDS, FACTORS, KEY_MEAN, VALUE_MEAN, SCALES, WIDTH,
        )  # fmt: skip
