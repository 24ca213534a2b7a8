"""Pages of keys and values in 8 bits, as kernels read them: the codes of a page's tokens, and behind them their scales.

``native.coded_rows`` says what codes and scales are, and that keys are turned: queries are turned before they meet
them. There a token's scale is behind its codes; here codes are together, so that those of a token are aligned. Kernels
tell such pools by their dtype, int8, and find the scales of a page behind ``page_size * head_dim`` codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.triton_shim import constant, jit, tl
from kvsift.native.coded_rows import LARGEST_CODE, decode_codes
from kvsift.native.shapes import SCALE_BYTES

LARGEST = constant(float(LARGEST_CODE))
ROUNDING = constant(12582912.0)  # 1.5 * 2^23: numbers added to it lose their fraction, halves to the even side
TINY = constant(1.1754943508222875e-38)  # the smallest normal float32
NEAR = constant(16)  # channels that are mixed first; the others in groups of them
CHANNELS = constant(32)  # of a product with the rotation, of which shared memory does not hold all


def codes_of(pool: Tensor) -> Tensor:
    """Return the codes in a pool of pages, int8 [num_kv_heads, num_pages, page_size, head_dim], a view.

    pool int8 [num_kv_heads, num_pages, page_size, head_dim + 4], contiguous.
    """
    page_size, head_dim = pool.shape[2], pool.shape[3] - SCALE_BYTES
    return pool.flatten(2)[..., : page_size * head_dim].unflatten(2, (page_size, head_dim))


def scales_of(codes: Tensor) -> Tensor:
    """Return the scales behind the codes of each page, float32 [num_kv_heads, num_pages, page_size], a view."""
    heads, pages, page_size, head_dim = codes.shape
    sizes, strides = (heads, pages, SCALE_BYTES * page_size), (*codes.stride()[:2], 1)
    octets = codes.as_strided(sizes, strides, int(codes.storage_offset()) + page_size * head_dim)
    return octets.view(torch.float32)


def write_rows(codes: Tensor, pages: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write coded rows int8 [num_kv_heads, count, head_dim + 4] (``native.coded_rows``) to slots of pages."""
    codes[:, pages, slots] = rows[..., :-SCALE_BYTES]
    scales_of(codes)[:, pages, slots] = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32).squeeze(-1)


def read_rows(codes: Tensor, pages: Tensor, slots: Tensor, heads: Tensor | slice = slice(None)) -> Tensor:
    """Return the coded rows of slots of pages, int8 [num_kv_heads, count, head_dim + 4], or of as many of each of
    ``heads``, which have indices of their own."""
    scales = scales_of(codes)[heads, pages, slots].unsqueeze(-1).view(torch.int8)
    return torch.cat([codes[heads, pages, slots], scales], -1)


def read_pages(
    pool: Tensor, pages: Tensor | slice, dtype: torch.dtype = torch.float32, *, turned: bool = False
) -> Tensor:  # fmt: skip
    """Return keys (``turned``) or values of pages of a pool [num_kv_heads, num_pages, page_size, head_dim], as a model
    has them; what is in 8 bits in ``dtype``."""
    if pool.element_size() > 1:
        return pool[:, pages]
    if pool.dtype != torch.int8:
        return pool[:, pages].to(dtype)
    return decode_codes(pool[:, pages], scales_of(pool)[:, pages], dtype, turned=turned)


@jit
def mixed(i, j, D: tl.constexpr, SIZE: tl.constexpr):
    """Entries [i, j] of the rotation (``sketch_format.random_rotation``) times sqrt(SIZE), without signs, float32."""
    parity = (i % SIZE)[:, None] & (j % SIZE)[None, :]
    parity ^= parity >> 8
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    entries = 1.0 - 2.0 * (parity & 1).to(tl.float32)
    if SIZE < D:
        blocks: tl.constexpr = D // SIZE
        column = (j // SIZE)[None, :]
        cosines = tl.cos(3.141592653589793 / blocks * ((i // SIZE).to(tl.float32) + 0.5)[:, None] * column)
        entries *= cosines * tl.where(column == 0, blocks**-0.5, (blocks / 2) ** -0.5)
    return entries


@jit
def signs(i):
    """Of channels, before they are mixed: 1.0 or -1.0."""
    return 1.0 - 2.0 * ((i * 0x79B1 >> 15) & 1).to(tl.float32)


@jit
def turned_rows(at, mask, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr):
    """Vectors [M, DP] at addresses [M], turned, in their dtype; zero where the mask is false."""
    SIZE: tl.constexpr = D & -D
    STEP: tl.constexpr = min(CHANNELS, DP)
    n, acc = tl.arange(0, DP), tl.zeros((M, DP), tl.float32)
    for first in range(0, DP, STEP):
        k = first + tl.arange(0, STEP)
        x = tl.load(at[:, None] + k[None, :], mask=mask[:, None] & (k < D)[None, :], other=0.0)
        part = mixed(k, n, D, SIZE) * signs(k)[:, None]
        if SIZE < D:  # entries are no whole numbers
            acc = tl.dot(x.to(tl.float32), part, acc, input_precision="tf32x3")
        else:
            acc = tl.dot(x, part.to(x.dtype), acc, input_precision="tf32x3")
    acc = tl.where((n < D)[None, :], acc * SIZE**-0.5, 0.0)
    return acc.to(at.dtype.element_ty)


@jit
def load_scales(page_ptr, slots, mask, PAGE: tl.constexpr, D: tl.constexpr):
    """Scales of tokens, whose pages begin at ``page_ptr`` and have PAGE tokens."""
    scales = (page_ptr + PAGE * D).to(tl.pointer_type(tl.float32))
    return tl.load(scales + slots, mask=mask, other=0.0)


@jit
def load_keys(page_ptr, slots, mask, token, PAGE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SLOTS: tl.constexpr):
    """Keys of a page as the model has them, float32 [SLOTS, DP], zero where the mask [SLOTS] is false."""
    d = tl.arange(0, DP)
    if page_ptr.dtype.element_ty == tl.int8:
        SIZE: tl.constexpr = D & -D
        STEP: tl.constexpr = min(CHANNELS, DP)
        acc = tl.zeros((SLOTS, DP), tl.float32)
        for first in range(0, DP, STEP):
            k = first + tl.arange(0, STEP)
            inside = mask[:, None] & (k < D)[None, :]
            codes = tl.load(page_ptr + (slots * token)[:, None] + k[None, :], mask=inside, other=0)
            part = tl.trans(mixed(d, k, D, SIZE) * signs(d)[:, None])
            if SIZE < D:
                acc = tl.dot(codes.to(tl.float32), part, acc, input_precision="tf32x3")
            else:  # exact
                acc = tl.dot(codes.to(tl.float16), part.to(tl.float16), acc)
        acc = tl.where((d < D)[None, :], acc, 0.0)
        return acc * (load_scales(page_ptr, slots, mask, PAGE, D) * SIZE**-0.5)[:, None]
    else:
        inside = mask[:, None] & (d < D)[None, :]
        return tl.load(page_ptr + (slots * token)[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)


@jit
def turn(x, BACK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """A vector [DP] times the rotation and the root of the power of two in D, or BACK: NEAR neighbouring channels are
    mixed first, and then groups of them."""
    SIZE: tl.constexpr = D & -D
    LOW: tl.constexpr = min(SIZE, NEAR)
    HIGH: tl.constexpr = DP // LOW
    d, low, high = tl.arange(0, DP), tl.arange(0, LOW), tl.arange(0, HIGH)
    if not BACK:
        x = x * signs(d)
    of_groups = mixed(high, high, D // LOW, SIZE // LOW)
    if BACK:
        of_groups = tl.trans(of_groups)
    groups = tl.reshape(x, (HIGH, LOW))
    groups = tl.sum(groups[:, :, None] * mixed(low, low, LOW, LOW)[None, :, :], 1)
    groups = tl.sum(of_groups[:, :, None] * groups[:, None, :], 0)
    x = tl.where(d < D, tl.reshape(groups, (DP,)), 0.0)
    if BACK:
        x = x * signs(d)
    return x


@jit
def encode(x):
    """Codes of a vector float32 [DP], whole numbers in float32, and their scale."""
    scale = tl.div_rn(tl.max(tl.abs(x), 0), LARGEST)
    codes = tl.div_rn(x, tl.maximum(scale, TINY) + tl.zeros_like(x))
    return (codes + ROUNDING) - ROUNDING, scale


@jit
def store_coded(page_ptr, slot, token, codes, scale, PAGE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Write a token into its page."""
    d = tl.arange(0, DP)
    tl.store(page_ptr + slot * token + d, codes.to(tl.int8), mask=d < D)
    tl.store((page_ptr + PAGE * D).to(tl.pointer_type(tl.float32)) + slot, scale)
