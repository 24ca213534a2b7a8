"""Page summaries: one packed row per page and KV head, and the query features that score it.

Every kind is built so that the score of all pages is **one matrix product**: score = features(q) . row(page), in
units of scaled logits. Bounds stay bounds after rounding to the dtype of the row, which is the KV dtype unless the kind
has its own.

| kind            | row(page)                     | features(q)            | score                                   |
|-----------------|-------------------------------|------------------------|-----------------------------------------|
| minmax          | [max k, min k]                | [q+, q-]               | >= the page's largest logit (Quest)     |
| minmax_fp8      | [max k, min k] / 8, e4m3      | [8 q+, 8 q-]           | the same, at one byte per number        |
| mean_std        | [mean k, std k]               | [q, |q|]               | one deviation above the mean logit      |
| centroid_radius | [mean k, max |k - mean|]      | [q, |q|_2]             | >= the page's largest logit             |
| log_mass        | [mean k, var k], logits ~ N   | [q, q^2 / 2]           | log mass of the page / page_size        |

with q already multiplied by the scale. Sources: Quest (arXiv 2406.10774) for minmax; centroid_radius is the
Cauchy-Schwarz bound; log_mass the log moment of a Gaussian, log E[exp x] = mean + var / 2.

minmax_fp8 rounds outward, maxima up and minima down, so that its score is never below that of minmax. float8_e4m3fn
ends at 448: numbers beyond FP8_LARGEST = 8 * 448 are clamped, and the score of a page that holds one is no bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.kernels import summary_twins as twins
from kvsift.kernels.coded_pages import read_pages
from kvsift.kernels.sketch import SKETCHES, sketch_rows
from kvsift.kernels.summary_twins import FP8_SCALE
from kvsift.native.pages import page_extremes, takes_pages
from kvsift.native.sketch_format import sketch_layout

FP8_LARGEST = FP8_SCALE * torch.finfo(torch.float8_e4m3fn).max  # 3584


class SummaryKind(NamedTuple):
    """How pages are summarised and scored: an entry of ``SUMMARIES``.

    ``rows`` and ``features`` are all that a kind needs. Captured steps call them unless the kind has Triton twins
    (``kernels.summary_twins``); the single launch takes kinds with C++ expressions (``kernels.sifted_attention``).
    """

    width: Callable[[int], int]  # head_dim -> numbers per row; captured steps take up to 2 * head_dim
    rows: Callable[[Tensor, Tensor | None], Tensor]  # keys [.., page_size, head_dim], valid [.., page_size, 1] or None
    features: Callable[[Tensor], Tensor]  # scaled queries [.., head_dim] float32 -> [.., width]
    is_bound: bool = False  # score >= the true maximum logit of the page
    dtype: torch.dtype | None = None  # of the rows; None is the KV dtype, or under caches of a byte the model's
    merge: Callable[[Tensor], Tensor] | None = None  # rows [.., num_pages, width] -> the row of them all, [.., width]
    row_twin: Any = None  # Triton's ``rows``, of one page
    features_twin: Any = None  # Triton's ``features``
    cuda_features: tuple[str, str] | None = None  # of each half of a row, C++ of the scaled query number q


Kind = str | SummaryKind


def find_kind(kind: Kind) -> SummaryKind:
    """A kind by its name in ``SUMMARIES``, or the kind itself."""
    return SUMMARIES[kind] if isinstance(kind, str) else kind


def page_scores(features: Tensor, rows: Tensor) -> Tensor:
    """Score all pages for all queries of a group at once.

    features [num_heads, num_queries, width] float32; rows [num_heads, num_pages, width] in the dtype of their kind ->
    float32 [num_heads, num_queries, num_pages].
    """
    return features @ rows.float().mT


def row_twin(kind: str) -> Any:
    """Triton's function that writes a row of a kind, None if it has none; sketches have none."""
    return None if kind in SKETCHES else SUMMARIES[kind].row_twin


def row_format(kind: str, head_dim: int, page_size: int) -> tuple[int, torch.dtype | None]:
    """Numbers per row of a kind, or of a sketch, and their dtype; None: as of ``SummaryKind``."""
    if kind in SKETCHES:
        return sketch_layout(SKETCHES[kind], head_dim, page_size).width, torch.uint8
    return SUMMARIES[kind].width(head_dim), SUMMARIES[kind].dtype


def summarise(kind: str, keys: Tensor, valid: Tensor | None = None, values: Tensor | None = None) -> Tensor:
    """Return packed rows of pages, in the dtype of their kind, or of ``keys``.

    keys [num_kv_heads, num_pages, page_size, head_dim], any numbers and NaN where they are not valid;
    valid bool [num_pages, page_size] with at least one token per page, None if all are -> [num_kv_heads, num_pages,
    width]. A sketch (``kernels.sketch``) is made of the values too.
    """
    if kind in SKETCHES:
        assert values is not None, "a sketch holds the mean value of its page"
        return sketch_rows(SKETCHES[kind], keys, values, valid)
    if kind == "minmax" and takes_pages(keys):
        return page_extremes(keys, valid)
    return SUMMARIES[kind].rows(keys, None if valid is None else valid.unsqueeze(-1))


def summarise_pages(
    kind: str, keys: Tensor, values: Tensor, pages: Tensor | slice, rows: Tensor, valid: Tensor | None = None
) -> Tensor:  # fmt: skip
    """As ``summarise``, of pages of pools [num_kv_heads, num_pages, page_size, head_dim]. What they hold in 8 bits is
    read in the dtype of the pool of ``rows``, or if this has bytes in float32."""
    dtype = rows.dtype if rows.element_size() > 1 else torch.float32
    return summarise(kind, read_pages(keys, pages, dtype, turned=True), valid, read_pages(values, pages, dtype))


def _minmax_rows(keys: Tensor, valid: Tensor | None) -> Tensor:
    return torch.cat([_filled(keys, valid, -torch.inf).amax(-2), _filled(keys, valid, torch.inf).amin(-2)], -1)


def _filled(keys: Tensor, valid: Tensor | None, number: float) -> Tensor:
    return keys if valid is None else keys.masked_fill(~valid, number)


def _minmax_fp8_rows(keys: Tensor, valid: Tensor | None) -> Tensor:
    top, bottom = _minmax_rows(keys, valid).float().chunk(2, -1)
    # rounding -min up is rounding min down; the sign is the first bit, also of what is rounded to zero
    bits = _round_up_fp8(torch.cat([top, -bottom], -1))
    bits[..., top.shape[-1] :] ^= 0x80
    return bits.view(torch.float8_e4m3fn)


def _round_up_fp8(numbers: Tensor) -> Tensor:
    """Return the bits of the smallest e4m3 number not below each number / 8; float32 -> uint8, NaN stays NaN."""
    numbers = numbers.clamp(-FP8_LARGEST, FP8_LARGEST)
    nearest = (numbers / FP8_SCALE).to(torch.float8_e4m3fn)
    too_low = nearest.float() * FP8_SCALE < numbers  # compared unscaled: float32 loses bits of its smallest / 8
    bits = nearest.view(torch.uint8)
    # bits count away from zero: one more is the next larger number, one less if it is negative
    return torch.where(too_low, torch.where(bits < 0x80, bits + 1, bits - 1), bits)


def _minmax_merge(rows: Tensor) -> Tensor:
    top, bottom = rows.float().chunk(2, -1)  # exact: the extremes of rows are numbers of their dtype
    return torch.cat([top.amax(-2), bottom.amin(-2)], -1).to(rows.dtype)


def _minmax_features(queries: Tensor) -> Tensor:
    return torch.cat([queries.clamp_min(0), queries.clamp_max(0)], -1)


def _moments(keys: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor | int]:
    """Mean, and deviations from it with zeros where invalid, in float32; and the number of valid tokens."""
    k = _filled(keys.float(), valid, 0.0)
    count = keys.shape[-2] if valid is None else valid.sum(-2)  # [num_pages, 1]
    mean = k.sum(-2) / count
    return mean, _filled(k - mean.unsqueeze(-2), valid, 0.0), count


def _mean_std_rows(keys: Tensor, valid: Tensor | None) -> Tensor:
    mean, deviation, count = _moments(keys, valid)
    return torch.cat([mean, (deviation.square().sum(-2) / count).sqrt()], -1).to(keys.dtype)


def _mean_var_rows(keys: Tensor, valid: Tensor | None) -> Tensor:
    mean, deviation, count = _moments(keys, valid)
    return torch.cat([mean, deviation.square().sum(-2) / count], -1).to(keys.dtype)


def _centroid_radius_rows(keys: Tensor, valid: Tensor | None) -> Tensor:
    mean = _moments(keys, valid)[0].to(keys.dtype)
    # the radius belongs to the stored centroid, and is rounded outward: the bound holds in bf16
    deviation = _filled(keys.float() - mean.float().unsqueeze(-2), valid, 0.0)
    radius = deviation.norm(dim=-1).amax(-1, keepdim=True)
    # two ulp: one for rounding to the KV dtype, one for the arithmetic of the score itself
    return torch.cat([mean, (radius * (1 + 2 * torch.finfo(keys.dtype).eps)).to(keys.dtype)], -1)


def _two_vectors(head_dim: int) -> int:
    return 2 * head_dim


SUMMARIES: dict[str, SummaryKind] = {
    "minmax": SummaryKind(
        _two_vectors,
        _minmax_rows,
        _minmax_features,
        is_bound=True,
        merge=_minmax_merge,
        row_twin=twins.minmax_row,
        features_twin=twins.minmax_features,
        cuda_features=("fmaxf(q, 0.f)", "fminf(q, 0.f)"),
    ),
    "minmax_fp8": SummaryKind(
        _two_vectors,
        _minmax_fp8_rows,
        lambda q: FP8_SCALE * _minmax_features(q),
        is_bound=True,
        dtype=torch.float8_e4m3fn,
        merge=_minmax_merge,
        row_twin=twins.minmax_fp8_row,
        features_twin=twins.minmax_fp8_features,
        cuda_features=(f"{FP8_SCALE}f * fmaxf(q, 0.f)", f"{FP8_SCALE}f * fminf(q, 0.f)"),
    ),
    "mean_std": SummaryKind(
        _two_vectors,
        _mean_std_rows,
        lambda q: torch.cat([q, q.abs()], -1),
        row_twin=twins.mean_std_row,
        features_twin=twins.mean_std_features,
        cuda_features=("q", "fabsf(q)"),
    ),
    "centroid_radius": SummaryKind(
        lambda head_dim: head_dim + 1,
        _centroid_radius_rows,
        lambda q: torch.cat([q, q.norm(dim=-1, keepdim=True)], -1),
        is_bound=True,
        row_twin=twins.centroid_radius_row,
        features_twin=twins.centroid_radius_features,
    ),
    "log_mass": SummaryKind(
        _two_vectors,
        _mean_var_rows,
        lambda q: torch.cat([q, 0.5 * q.square()], -1),
        row_twin=twins.log_mass_row,
        features_twin=twins.log_mass_features,
        cuda_features=("q", "0.5f * q * q"),
    ),
}
