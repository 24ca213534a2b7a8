"""What a budget says about the query at the end of each row, on the device: one launch at the start of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.kernels.triton_shim import jit, power_of_two, runs_on_triton, tl


def page_spans(
    lengths: Tensor, page_size: int, *, sinks: int, window: int, tokens: int | None, ratio: float | None,
    min_context: int = 0, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Spans of every row (``runtime.budget.Budget`` defines them; this is its arithmetic).

    Args:
        lengths: int32 [batch], tokens cached, the query's own included.
        page_size: tokens per page.
        sinks, window: always visible tokens at the two ends; at least one of window.
        tokens, ratio: visible tokens, as a number or as a share of the length; everything without either.
        min_context: below so many tokens everything is visible.
        out: written; a new one by default.

    Returns:
        int32 [batch, 4]: first candidate page, the page behind the last, pages to choose, pages held.
    """
    run = page_spans_triton if runs_on_triton(lengths) else page_spans_reference
    spans = lengths.new_empty(len(lengths), 4, dtype=torch.int32) if out is None else out
    run(lengths, spans, page_size, sinks, window, tokens, ratio, min_context)
    return spans


def page_spans_reference(
    lengths: Tensor, out: Tensor, page_size: int, sinks: int, window: int, tokens: int | None, ratio: float | None,
    min_context: int,
) -> None:  # fmt: skip
    window_start = (lengths - window).clamp_min(0) // page_size * page_size
    sinks_stop = window_start.clamp_max(-(-sinks // page_size) * page_size)
    count = (window_start - sinks_stop) // page_size
    limit = lengths if ratio is None else (ratio * lengths.double()).ceil()
    limit = limit.to(lengths.dtype) if tokens is None else torch.full_like(lengths, tokens)
    room = limit - sinks_stop - (lengths - window_start)
    chosen = (room // page_size).clamp_min(1 if tokens is None else 0)
    everything = (limit >= lengths) | (lengths < min_context)
    chosen = torch.where(everything, count, torch.minimum(chosen, count))
    first = sinks_stop // page_size
    out.copy_(torch.stack([first, first + count, chosen, -(-lengths // page_size)], 1))


def page_spans_triton(
    lengths: Tensor, out: Tensor, page_size: int, sinks: int, window: int, tokens: int | None, ratio: float | None,
    min_context: int,
) -> None:  # fmt: skip
    limits = (lengths if ratio is None else (ratio * lengths.double()).ceil()).int() if tokens is None else lengths
    _page_spans_kernel[(1,)](
        lengths, limits, out, len(lengths), -(-sinks // page_size), window, tokens or 0, min_context,
        PAGE=page_size, COUNTED=tokens is not None, ROWS=power_of_two(len(lengths)), num_warps=1,
    )  # fmt: skip


@jit
def _page_spans_kernel(
    lengths_ptr, limits_ptr, out_ptr, rows, sink_pages, window, tokens, min_context,
    PAGE: tl.constexpr, COUNTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    inside = row < rows
    length = tl.load(lengths_ptr + row, mask=inside, other=1)
    stop = tl.maximum(length - window, 0) // PAGE
    first = tl.minimum(stop, sink_pages)
    limit = tl.load(limits_ptr + row, mask=inside, other=1)
    if COUNTED:
        limit = tokens + tl.zeros_like(length)
    room = limit - first * PAGE - (length - stop * PAGE)
    chosen = tl.maximum(room, 0) // PAGE
    if not COUNTED:
        chosen = tl.maximum(chosen, 1)
    everything = (limit >= length) | (length < min_context)
    chosen = tl.where(everything, stop - first, tl.minimum(chosen, stop - first))
    out_ptr += row * 4
    tl.store(out_ptr, first, mask=inside)
    tl.store(out_ptr + 1, stop, mask=inside)
    tl.store(out_ptr + 2, chosen, mask=inside)
    tl.store(out_ptr + 3, (length + PAGE - 1) // PAGE, mask=inside)
