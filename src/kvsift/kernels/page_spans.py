"""Lengths, and candidate and visible units of the query at the end of each row, on the device: one launch at the start
of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.triton_shim import jit, power_of_two, runs_on_triton, tl


def page_spans(
    lengths: Tensor, unit_size: int, budgets: Tensor, out: Tensor | None = None, growth: Tensor | None = None
) -> Tensor:
    """Return the spans of every row (``plan.budget.Budget`` defines them; this is its arithmetic).

    Args:
        lengths: int32 [batch], tokens cached, the query's own included.
        unit_size: tokens per unit: of a page, or one.
        budgets: float64 [batch, 5], of each row: sinks and window, which are always visible tokens at the two ends (at
            least one of window); visible tokens, or -1; their share of the length, for rows without that number; and
            the length below which everything is visible.
        out: written; a new one by default.
        growth: int32 [batch], what is added to ``lengths`` before, in place.

    Returns:
        int32 [batch, 4]: first candidate unit, the unit behind the last, units to choose, units held.
    """
    run = page_spans_triton if runs_on_triton(lengths) else page_spans_reference
    spans = lengths.new_empty(len(lengths), 4, dtype=torch.int32) if out is None else out
    run(lengths, spans, unit_size, budgets, growth)
    return spans


def page_spans_reference(
    lengths: Tensor, out: Tensor, page_size: int, budgets: Tensor, growth: Tensor | None = None
) -> None:
    if growth is not None:
        lengths += growth
    sinks, window, tokens, _, min_context = budgets.long().unbind(1)
    window_start = (lengths - window).clamp_min(0) // page_size * page_size
    sinks_stop = torch.minimum(window_start, -(-sinks // page_size) * page_size)
    count = (window_start - sinks_stop) // page_size
    shared = (budgets[:, 3] * lengths.double()).ceil().long()
    limit = torch.where(tokens < 0, shared, tokens)
    room = limit - sinks_stop - (lengths - window_start)
    chosen = torch.maximum(room // page_size, (tokens < 0).long())
    everything = (limit >= lengths) | (lengths < min_context)
    chosen = torch.where(everything, count, torch.minimum(chosen.clamp_min(0), count))
    first = sinks_stop // page_size
    out.copy_(torch.stack([first, first + count, chosen, -(-lengths // page_size)], 1))


def page_spans_triton(
    lengths: Tensor, out: Tensor, page_size: int, budgets: Tensor, growth: Tensor | None = None
) -> None:
    _page_spans_kernel[(1,)](
        lengths, growth, budgets, out, len(lengths), PAGE=page_size, ROWS=power_of_two(len(lengths)), num_warps=1
    )


@jit
def _page_spans_kernel(lengths_ptr, growth_ptr, budgets_ptr, out_ptr, rows, PAGE: tl.constexpr, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    inside = row < rows
    length = tl.load(lengths_ptr + row, mask=inside, other=1)
    if growth_ptr is not None:
        length += tl.load(growth_ptr + row, mask=inside, other=0)
        tl.store(lengths_ptr + row, length, mask=inside)
    budgets_ptr += row * 5
    sinks = tl.load(budgets_ptr, mask=inside, other=0.0).to(tl.int32)
    window = tl.load(budgets_ptr + 1, mask=inside, other=1.0).to(tl.int32)
    tokens = tl.load(budgets_ptr + 2, mask=inside, other=1.0).to(tl.int32)
    share = tl.load(budgets_ptr + 3, mask=inside, other=1.0)
    min_context = tl.load(budgets_ptr + 4, mask=inside, other=0.0).to(tl.int32)
    stop = tl.maximum(length - window, 0) // PAGE
    first = tl.minimum(stop, (sinks + PAGE - 1) // PAGE)
    limit = tl.where(tokens < 0, tl.ceil(share * length.to(tl.float64)).to(tl.int32), tokens)
    room = limit - first * PAGE - (length - stop * PAGE)
    chosen = tl.maximum(tl.maximum(room, 0) // PAGE, tl.where(tokens < 0, 1, 0))
    everything = (limit >= length) | (length < min_context)
    chosen = tl.where(everything, stop - first, tl.minimum(chosen, stop - first))
    out_ptr += row * 4
    tl.store(out_ptr, first, mask=inside)
    tl.store(out_ptr + 1, stop, mask=inside)
    tl.store(out_ptr + 2, chosen, mask=inside)
    tl.store(out_ptr + 3, (length + PAGE - 1) // PAGE, mask=inside)
