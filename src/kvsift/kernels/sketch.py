"""Sketches: one row of bytes per page and KV head from which the logit of each of its tokens is estimated.

With R a rotation, mean the page's mean key and x = R (k - mean) the rotated residual of a token:

    code  c  = odd integers from -(2^bits - 1) to 2^bits - 1, x rounded in steps of |x| / sqrt(head_dim)
    factor f = |x|^2 / <x, c>
    estimate = f <R q, c> + <R q, R mean>

The estimate is unbiased over rotations (RaBitQ, arXiv 2405.12497, for one bit). Its error has the variance
|q|^2 f^2 ERROR[bits], which an estimated exponential makes up for: E[exp(l + e)] = exp(l + variance / 2). As there,
queries may be rounded where they meet codes: the single launch takes R q in steps of its largest size / 63, which adds
about a 2,000th to the variance, the compiled core sums of four channels in steps of a 63rd.

Everything of a row comes from the keys and values of its own page. The bytes of a row, all offsets multiples of four:

| bytes                          | what                                             |
|--------------------------------|--------------------------------------------------|
| bits * words * page_size * 4   | codes uint32 [bit of the code, word, token]      |
| 2 * page_size, rounded up to 4 | factors of the tokens, float16                   |
| 16 * words                     | R mean, 4 bits per channel                       |
| 4                              | scales of the two means, float16                 |
| head_dim / 2, rounded up       | mean value, likewise, from a multiple of 32 on   |

Bit i % 32 of word i // 32, the lowest first, is of channel i. There are ceil(head_dim / 32) words; bits of channels
beyond head_dim are zero, as is what fills up a row, which ends at a multiple of 32. A byte of a mean has two channels,
the first in its low half: whole numbers of the scale from -7 to 7, written as 1 to 15. Codes are of what a key differs
by from its page's mean as it is written, so that they make up for its rounding too. Tokens are weighed without their
pages' mean values, so these are in sectors of memory of their own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsift import native
from kvsift.native.sketch_format import MOST_VOTE, SketchLayout, random_rotation, sketch_layout
from kvsift.types import Part

ERROR = {1: 1 - 2 / math.pi, 2: 0.4126}  # mean square of a channel of c - x / f, for Gaussian x
SKETCHES = {"sketch1": 1, "sketch2": 2}  # kind of page summary -> bits per channel
PAGES_AT_ONCE = 2048  # bounds temporary memory


class Unpacked(NamedTuple):
    """Unpacked rows of consecutive pages, float32."""

    codes: Tensor  # [num_kv_heads, num_tokens, head_dim]
    factors: Tensor  # [num_kv_heads, num_tokens], 0 where there is no token
    key_means: Tensor  # [num_kv_heads, num_pages, head_dim], rotated
    value_means: Tensor  # [num_kv_heads, num_pages, head_dim]


def sketch_rows(bits: int, keys: Tensor, values: Tensor, valid: Tensor | None = None) -> Tensor:
    """Rows of pages, uint8 [num_kv_heads, num_pages, width].

    keys, values [num_kv_heads, num_pages, page_size, head_dim], any numbers and NaN where they are not valid; valid
    bool [num_pages, page_size], None if all are.
    """
    layout = sketch_layout(bits, keys.shape[3], keys.shape[2])
    if native.takes_tokens(keys, values):
        return native.sketch_rows(layout, keys, values, valid)
    return sketch_rows_reference(layout, keys, values, valid)


def sketch_rows_reference(layout: SketchLayout, keys: Tensor, values: Tensor, valid: Tensor | None = None) -> Tensor:
    rows = keys.new_zeros(*keys.shape[:2], layout.width, dtype=torch.uint8)
    for first in range(0, keys.shape[1], PAGES_AT_ONCE):
        pages = slice(first, first + PAGES_AT_ONCE)
        there = None if valid is None else valid[pages]
        _fill(rows[:, pages], layout, keys[:, pages].float(), values[:, pages].float(), there)
    return rows


def _fill(rows: Tensor, layout: SketchLayout, keys: Tensor, values: Tensor, valid: Tensor | None) -> None:
    head_dim, page_size = layout.head_dim, layout.page_size
    count: Tensor | int = page_size
    if valid is not None:
        missing, count = ~valid.unsqueeze(-1), valid.sum(1, keepdim=True)
        keys, values = keys.masked_fill(missing, 0.0), values.masked_fill(missing, 0.0)
    rotated = keys @ random_rotation(head_dim, keys.device)
    mean_codes, mean_scale = _whole(rotated.sum(2) / count)
    value_codes, value_scale = _whole(values.sum(2) / count)
    residual = rotated - (mean_codes * mean_scale.float()).unsqueeze(2)
    if valid is not None:
        residual = residual.masked_fill(missing, 0.0)
    index = _code_index(layout, residual)
    index = index if valid is None else index.masked_fill(missing, 0)
    codes = (2 * index - (2**layout.bits - 1)).float()
    product = (residual * codes).sum(-1)
    factors = residual.square().sum(-1) / product.clamp_min(torch.finfo(torch.float32).tiny)
    factors = factors.masked_fill(product <= 0, 0.0)  # no residual: every code is right
    rows[..., : layout.factors] = _packed(layout, index)
    rows[..., layout.factors : layout.factors + 2 * page_size] = factors.to(torch.float16).view(torch.uint8)
    for start, mean in (layout.key_mean, mean_codes), (layout.value_mean, value_codes):
        rows[..., start : start + -(-head_dim // 2)] = _pairs(mean)
    scales = torch.cat([mean_scale, value_scale], -1)
    rows[..., layout.scales : layout.scales + 4] = scales.view(torch.uint8)


def _whole(means: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -7 to 7, float32 [.., n], and their scale float16 [.., 1]."""
    scale = (means.abs().amax(-1, keepdim=True) / 7).clamp(2.0**-24, 65504.0).to(torch.float16)
    return (means / scale.float()).round_().clamp_(-7, 7), scale


def _pairs(mean: Tensor) -> Tensor:
    """Whole numbers [.., n] as uint8 [.., ceil(n / 2)]."""
    halves = pad((mean + 8).to(torch.uint8), (0, mean.shape[-1] % 2)).unflatten(-1, (-1, 2))
    return halves[..., 0] | halves[..., 1] << 4


def _code_index(layout: SketchLayout, residual: Tensor) -> Tensor:
    """Which code each number gets, 0 to 2^bits - 1."""
    if layout.bits == 1:
        return (residual >= 0).to(torch.int32)
    step = residual.norm(dim=-1, keepdim=True) / math.sqrt(layout.head_dim)
    half, most = 2 ** (layout.bits - 1), 2**layout.bits - 1
    whole = (residual / step.clamp_min(torch.finfo(torch.float32).tiny)).floor_()
    return (whole + half).clamp_(0, most).to(torch.int32)


def _packed(layout: SketchLayout, index: Tensor) -> Tensor:
    """int32 [num_kv_heads, num_pages, page_size, head_dim] -> uint8 [num_kv_heads, num_pages, bytes of the codes]."""
    padded = pad(index, (0, 32 * layout.words - layout.head_dim))
    planes = torch.stack([padded >> bit & 1 for bit in range(layout.bits)], 2)  # [heads, pages, bits, tokens, channels]
    octets = planes.unflatten(-1, (layout.words, 4, 8)) << torch.arange(8, device=index.device)
    return octets.sum(-1).to(torch.uint8).transpose(3, 4).flatten(2)  # [heads, pages, bits, words, tokens, 4]


def unpack(rows: Tensor, layout: SketchLayout) -> Unpacked:
    """Unpack rows uint8 [num_kv_heads, num_pages, width]."""
    bits, head_dim, page_size = layout.bits, layout.head_dim, layout.page_size
    octets = rows[..., : layout.factors].unflatten(-1, (bits, layout.words, page_size, 4)).transpose(3, 4)
    planes = (octets.unsqueeze(-1) >> torch.arange(8, device=rows.device, dtype=torch.uint8)) & 1
    channels = planes.flatten(-3)[..., :head_dim]  # [num_kv_heads, num_pages, bits, page_size, head_dim]
    codes = sum(channels[:, :, bit].float() * 2 ** (bit + 1) for bit in range(bits)) - (2**bits - 1)
    factors = _halves(rows, layout.factors, page_size)
    return Unpacked(codes.flatten(1, 2), factors.flatten(1), *unpack_means(rows, layout))


def unpack_means(rows: Tensor, layout: SketchLayout) -> tuple[Tensor, Tensor]:
    """Mean keys, rotated, and mean values of rows, float32 [num_kv_heads, num_pages, head_dim] both."""
    scales = _halves(rows, layout.scales, 2)
    key_means, value_means = (
        _whole_numbers(rows[..., start : start + -(-layout.head_dim // 2)], layout.head_dim) * scales[..., i : i + 1]
        for i, start in enumerate((layout.key_mean, layout.value_mean))
    )
    return key_means, value_means


def _whole_numbers(pairs: Tensor, count: int) -> Tensor:
    """What ``_pairs`` wrote, float32 [.., count]."""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)[..., :count].float() - 8


def _halves(rows: Tensor, start: int, count: int) -> Tensor:
    return rows[..., start : start + 2 * count].contiguous().view(torch.float16).float()


def estimated_logits(queries: Tensor, rows: Unpacked, bits: int) -> tuple[Tensor, Tensor]:
    """Estimated logits and the variance of their errors, both float32 [num_query_heads, num_queries, num_tokens].

    queries [num_query_heads, num_queries, head_dim], scaled.
    """
    num_kv_heads, num_tokens, head_dim = rows.codes.shape
    rotated = queries.float() @ random_rotation(head_dim, queries.device)
    rotated = rotated.unflatten(0, (num_kv_heads, -1)).flatten(1, 2)
    page_size = num_tokens // max(rows.key_means.shape[1], 1)
    logits = (rotated @ rows.codes.mT) * rows.factors.unsqueeze(1)
    logits += (rotated @ rows.key_means.mT).repeat_interleave(page_size, -1)
    size = rotated.square().sum(-1, keepdim=True) * ERROR[bits]
    variance = size * rows.factors.square().unsqueeze(1)
    shape = (*queries.shape[:2], num_tokens)
    return logits.view(shape), variance.view(shape)


def log_weights(queries: Tensor, rows: Unpacked, bits: int, softcap: float | None) -> Tensor:
    """Logarithms of the estimated weights; shapes as in ``estimated_logits``.

    An estimate with noise overstates its exponential, hence the variance.
    """
    logits, variance = estimated_logits(queries, rows, bits)
    if softcap is not None:  # which also bounds what noise does to the exponential
        return softcap * torch.tanh(logits / softcap)
    return logits - variance / 2


def votes(weights: Tensor, past_lse: Tensor, num_lists: int) -> Tensor:
    """Votes for candidates, float32 [num_lists, count], of the query heads that share a list: what a token weighs next
    to all that is visible anyway.

    weights: logarithms, float32 [num_query_heads, num_queries, count]; past_lse [num_query_heads, num_queries],
    log-sum-exp of the exact logits of sinks and window, or -inf: then weights count as they are. Extreme votes tie:
    here what a head says above exp(MOST_VOTE), in the single launch sums above 2^10 and below 2^-22.
    """
    past = past_lse.masked_fill(past_lse == -torch.inf, 0.0).unsqueeze(-1)
    return (weights - past).clamp_max(MOST_VOTE).exp().mean(1).unflatten(0, (num_lists, -1)).sum(1)


def estimated_rest(weights: Tensor, places: Tensor, value_means: Tensor, page_size: int, skipped: int) -> Part:
    """Estimate attention of one query per head over the candidates that are not chosen.

    Args:
        weights: logarithms, float32 [num_query_heads, count].
        places: int64 [num_heads, k], the chosen candidates of heads that share them; ``count`` stands for none.
        value_means: [num_kv_heads, num_pages, head_dim], of the pages that hold the candidates.
        page_size: tokens per page.
        skipped: tokens of the first page that come before the first candidate.
    """
    count, num_pages = weights.shape[1], value_means.shape[1]
    places = places.repeat_interleave(len(weights) // len(places), 0)
    unseen = pad(weights, (0, 1)).scatter(1, places, -torch.inf)[:, :count]
    lse = unseen.logsumexp(-1)
    shares = (unseen - lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()
    by_page = pad(shares, (skipped, num_pages * page_size - skipped - count))
    by_page = by_page.unflatten(-1, (num_pages, page_size)).sum(-1)  # [num_query_heads, num_pages]
    values = by_page.unflatten(0, (len(value_means), -1)) @ value_means
    return Part(values.flatten(0, 1)[None, :, None], lse[None, :, None])
