"""Visible pages of a row: its sinks, the best of its candidates and its window, ascending.

The k-th largest score is found by narrowing a bracket four ways at a time, in the order-preserving integers of the
floats; a few rounds are enough. Long rows are first reduced to the k groups of pages with the best maxima: no other
group holds a chosen page, since k groups hold a better one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.triton_shim import jit, jit_for_any, runs_on_triton, tl

GROUP_PAGES = 16
LONG_LIST, GROUP_OF_LONG, SHARE_OF_LONG = 1024, 4, 64  # lists so long, of more than a 64th of a row, have small groups
TILE, WARPS = 2048, 8  # twice that for long rows
LONG_ROW = 1 << 14


Lists = tuple[Tensor, Tensor]


def visible_pages(scores: Tensor, spans: Tensor, capacity: int, out: Lists | None = None) -> Lists:
    """List the visible pages of each row: sinks, the k best candidates (ties to the lower page), window.

    Args:
        scores: float32 [batch, num_rows, max_pages], column i is candidate first + i; NaN counts as -inf.
        spans: int32 [batch, 4]: first candidate page, the page behind the last, pages to choose, pages held.
        capacity: capacity of the lists, at least what the spans need.
        out: lists and counts to write; new ones by default.

    Returns:
        Logical pages int32 [batch, num_rows, capacity], ascending; counts int32 [batch, num_rows].
    """
    run = visible_pages_triton if runs_on_triton(scores) else visible_pages_reference
    return run(scores, spans, capacity, out)


def _new_lists(scores: Tensor, capacity: int) -> Lists:
    pages = torch.full((*scores.shape[:2], capacity), -1, dtype=torch.int32, device=scores.device)
    return pages, pages.new_empty(scores.shape[:2])


def visible_pages_reference(scores: Tensor, spans: Tensor, capacity: int, out: Lists | None = None) -> Lists:
    pages, counts = out or _new_lists(scores, capacity)
    for row, (first, stop, k, held) in enumerate(spans.tolist()):
        numbers = scores[row, :, : stop - first]
        order = (
            torch.where(numbers.isnan(), -torch.inf, numbers).sort(dim=-1, descending=True, stable=True).indices[:, :k]
        )
        sinks, window = (
            torch.arange(*span, device=scores.device).expand(len(order), -1) for span in ((0, first), (stop, held))
        )
        chosen = torch.cat([sinks, first + order.sort(-1).values, window], 1)
        pages[row, :, : chosen.shape[1]] = chosen
        counts[row] = chosen.shape[1]
    return pages, counts


def visible_pages_triton(scores: Tensor, spans: Tensor, capacity: int, out: Lists | None = None) -> Lists:
    batch, num_rows, max_pages = scores.shape
    pages, counts = out or _new_lists(scores, capacity)
    is_long = capacity >= LONG_LIST and max_pages <= SHARE_OF_LONG * capacity
    group = min(GROUP_PAGES, GROUP_OF_LONG) if is_long else GROUP_PAGES
    num_groups = -(-max_pages // group)
    maxima = scores.new_empty(batch, num_rows, num_groups)
    groups = pages.new_empty(batch, num_rows, capacity)
    factor = 2 if max_pages > LONG_ROW else 1
    _visible_kernel[(batch * num_rows,)](
        scores.contiguous(), maxima, groups, spans, pages, counts, num_rows, max_pages, num_groups, capacity,
        TILE=factor * TILE, GROUP=group, num_warps=factor * WARPS,
    )  # fmt: skip
    return pages, counts


@jit
def ordered(x):
    """Integers in the order of the floats. NaN, which a broken model or memory without keys brings, is -inf: no bracket
    holds its bits, so lists would not be filled, and what was in their memory would be taken for pages."""
    x = tl.where(x == x, x, float("-inf"))
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)  # the zeros are equal
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def load_keys(values_ptr, map_ptr, index, inside, MAPPED: tl.constexpr):
    """Ordered scores number ``index``, of listed groups of MAPPED scores if MAPPED is not 0."""
    where = index
    if MAPPED > 0:
        where = tl.load(map_ptr + index // MAPPED, mask=inside, other=0) * MAPPED + index % MAPPED
    return ordered(tl.load(values_ptr + where, mask=inside, other=float("-inf"))), where


@jit
def find_bracket(values_ptr, map_ptr, count, limit, k, least, MAPPED: tl.constexpr, TILE: tl.constexpr):
    """Return low and high so that [low, inf) holds at least k of ``count`` scores and [high, inf) fewer, ``above`` of
    them: either exactly k, or high is low + 1 and the scores between are ties. Scores at index ``limit`` of their row
    and behind do not count. At least k are known not to be below ``least``."""
    offsets = tl.arange(0, TILE)
    top = tl.full((TILE,), -2147483648, tl.int32)
    bottom = tl.full((TILE,), 2147483647, tl.int32)
    for start in range(0, count, TILE):
        keys, where = load_keys(values_ptr, map_ptr, start + offsets, start + offsets < count, MAPPED)
        real = (start + offsets < count) & (where < limit)
        top = tl.maximum(top, tl.where(real, keys, -2147483648))
        bottom = tl.minimum(bottom, tl.where(real, keys, 2147483647))
    low = tl.maximum(tl.min(bottom, 0), least).to(tl.int64)
    high = tl.max(top, 0).to(tl.int64) + 1
    inside, above = count, 0  # [low, inf) holds at least k; the count is an upper bound
    while (inside != k) & (high - low > 1):
        width = high - low
        first, second, third = low + width // 4, low + width // 2, low + width * 3 // 4
        seen = tl.zeros((TILE,), tl.int64)  # three counts of 21 bits, of every TILE-th score each
        for start in range(0, count, TILE):
            keys, where = load_keys(values_ptr, map_ptr, start + offsets, start + offsets < count, MAPPED)
            real = (start + offsets < count) & (where < limit)
            seen += tl.where(real & (keys >= first.to(tl.int32)), 1, 0).to(tl.int64)
            seen += tl.where(real & (keys >= second.to(tl.int32)), 1 << 21, 0).to(tl.int64)
            seen += tl.where(real & (keys >= third.to(tl.int32)), 1, 0).to(tl.int64) << 42
        if count <= 0x1FFFFF:  # the sums of all three fit too, and one reduction has them
            total = tl.sum(seen, 0)
            one, two, three = total & 0x1FFFFF, (total >> 21) & 0x1FFFFF, total >> 42
        else:
            one, two = tl.sum(seen & 0x1FFFFF, 0), tl.sum((seen >> 21) & 0x1FFFFF, 0)
            three = tl.sum(seen >> 42, 0)
        high = tl.where(three >= k, high, tl.where(two >= k, third, tl.where(one >= k, second, first)))
        above = tl.where(three >= k, above, tl.where(two >= k, three, tl.where(one >= k, two, one))).to(tl.int32)
        low = tl.where(three >= k, third, tl.where(two >= k, second, tl.where(one >= k, first, low)))
        inside = tl.where(three >= k, three, tl.where(two >= k, two, tl.where(one >= k, one, inside))).to(tl.int32)
    return low.to(tl.int32), high.to(tl.int32), above


@jit
def write_best(values_ptr, map_ptr, out_ptr, count, limit, k, first, least, MAPPED: tl.constexpr, TILE: tl.constexpr):
    """Write the ids of the k best of ``count`` scores, ascending, ties to the lower id, plus ``first``. Return a number
    that all of them reach."""
    low, high, above = find_bracket(values_ptr, map_ptr, count, limit, k, least, MAPPED, TILE)
    offsets = tl.arange(0, TILE)
    written, ties = 0, 0
    for start in range(0, count, TILE):
        keys, where = load_keys(values_ptr, map_ptr, start + offsets, start + offsets < count, MAPPED)
        real = (start + offsets < count) & (where < limit)
        tied = (real & (keys >= low) & (keys < high)).to(tl.int32)
        kept = (real & (keys >= high)) | ((tied == 1) & (ties + tl.cumsum(tied, 0) <= k - above))
        place = written + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(out_ptr + place, first + where, mask=kept)
        written += tl.sum(kept.to(tl.int32), 0)
        ties += tl.sum(tied, 0)
    return low


@jit
def write_spans(out_ptr, first, stop, k, held, TILE: tl.constexpr):
    """Write the sinks before the k chosen pages and the window behind them."""
    count = first + held - stop
    for start in range(0, count, TILE):
        i = start + tl.arange(0, TILE)
        slot, page = tl.where(i < first, i, i + k), tl.where(i < first, i, i - first + stop)
        tl.store(out_ptr + slot, page, mask=i < count)


@jit
def choose_pages(
    scores_ptr, maxima_ptr, groups_ptr, out_ptr, first, stop, k, held,
    TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write the visible list of one row; ``maxima_ptr`` holds the largest score of every GROUP candidates."""
    count = stop - first
    k = tl.minimum(k, count)
    if count > GROUP * k:
        if k > 0:
            num_groups = (count + GROUP - 1) // GROUP
            least = write_best(maxima_ptr, maxima_ptr, groups_ptr, num_groups, num_groups, k, 0, -2147483648, 0, TILE)
            tl.debug_barrier()
            write_best(scores_ptr, groups_ptr, out_ptr + first, k * GROUP, count, k, first, least, GROUP, TILE)
    else:
        write_best(scores_ptr, scores_ptr, out_ptr + first, count, count, k, first, -2147483648, 0, TILE)
    write_spans(out_ptr, first, stop, k, held, TILE)
    return first + k + held - stop


@jit_for_any("num_groups", "capacity")
def _visible_kernel(
    scores_ptr, maxima_ptr, groups_ptr, spans_ptr, pages_ptr, counts_ptr, num_rows, max_pages, num_groups, capacity,
    TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    spans_ptr += tl.program_id(0) // num_rows * 4
    row = tl.program_id(0).to(tl.int64)  # rows of a million tokens are more than 2^31 numbers apart
    first, stop, k, held = tl.load(spans_ptr), tl.load(spans_ptr + 1), tl.load(spans_ptr + 2), tl.load(spans_ptr + 3)
    scores_ptr += row * max_pages
    maxima_ptr += row * num_groups
    if stop - first > GROUP * k:
        for start in range(0, stop - first, TILE):
            index = start + tl.arange(0, TILE)
            scores = tl.load(scores_ptr + index, mask=index < stop - first, other=float("-inf"))
            scores = tl.where(scores == scores, scores, float("-inf"))
            largest = tl.max(tl.reshape(scores, (TILE // GROUP, GROUP)), 1)
            group = start // GROUP + tl.arange(0, TILE // GROUP)
            tl.store(maxima_ptr + group, largest, mask=group * GROUP < stop - first)
        tl.debug_barrier()
    count = choose_pages(
        scores_ptr, maxima_ptr, groups_ptr + row * capacity, pages_ptr + row * capacity, first, stop, k, held,
        TILE, GROUP,
    )  # fmt: skip
    tl.store(counts_ptr + row, count)
