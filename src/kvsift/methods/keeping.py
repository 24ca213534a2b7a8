"""Which of the tokens that are left are kept, once some have to be dropped."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvsift.methods.base import top_units
from kvsift.methods.drops import Drops
from kvsift.methods.head_budgets import head_counts
from kvsift.types import Candidates, Limit, Selection

Worth = Callable[[Tensor], Tensor]  # of tokens int64 [num_rows, count], all that are left: float32 [num_rows, count]
Prefer = Callable[[Tensor, int], Tensor]  # worths with those at inf that stay in any case, if so many are kept


def as_they_are(worth: Tensor, count: int) -> Tensor:
    """No token stays whatever it is worth."""
    return worth


def select_left(
    drops: Drops, candidates: Candidates, limit: Limit, start: int, device: torch.device, worth: Worth,
    prefer: Prefer = as_they_are,
) -> Selection:  # fmt: skip
    """Candidates that are left for the query at ``start``, once each row has dropped the least worth.

    Args:
        drops: of this sequence; what is dropped now is remembered there.
        candidates, limit: as for ``Method.select``.
        start: position of the query.
        device: of the selection.
        worth: of the tokens that are left before the query.
        prefer: what to make of the worth of the candidates.
    """
    first, stop = candidates.first, candidates.stop
    if limit.units >= candidates.count:  # nothing can have been dropped under this limit
        return Selection(torch.arange(first, stop, device=device).unsqueeze(0), 1, full=True)
    left = drops.left(stop, device)  # [num_rows, first + count]: sinks are never dropped
    if left.shape[1] - first > limit.units:
        scores = prefer(_worth(drops, left, stop, start, worth)[:, first:], limit.units)
        kept = left[:, first:].gather(1, top_units(scores, limit.units))
        left = torch.cat([left[:, :first], kept], 1)
        drops.keep(left, stop, start)
    return Selection(left[:, first:], 1, full=True)


def select_left_together(
    drops: Drops, candidates: Candidates, limit: Limit, start: int, device: torch.device, worth: Worth,
    prefer: Prefer, own: Callable[[], int],
) -> Selection:  # fmt: skip
    """The same where rows share what they keep in all (``Limit.adaptive``).

    ``own`` says how many candidates each row keeps before worths of several rows are compared; it is asked after
    ``worth``.
    """
    first, stop = candidates.first, candidates.stop
    left = drops.left(stop, device)  # [num_rows, count]: pads, sinks, candidates
    if int((left >= first).sum()) > len(left) * limit.units:
        scores = prefer(_worth(drops, left, stop, start, worth), limit.units).masked_fill(left < first, -torch.inf)
        counts = head_counts(scores, limit.units, own())
        best = top_units(scores, int(counts.max()), counts)
        kept = left.gather(1, best.clamp_min(0)).masked_fill(best < 0, -1)
        sinks = torch.arange(first, device=device).expand(len(left), -1)
        left = torch.cat([sinks, kept], 1).sort(-1).values
        drops.keep(left, stop, start, ragged=True)
    units = left.masked_fill(left < first, stop).sort(-1).values[:, : left.shape[1] - first]
    return Selection(units.masked_fill(units == stop, -1), 1)


def _worth(drops: Drops, left: Tensor, stop: int, start: int, worth: Worth) -> Tensor:
    """Worth of the tokens that are left before ``stop``, float32 [num_rows, count]."""
    # with window=0 even the query's own token is a candidate: that one is kept
    before = worth(drops.left(start, left.device))
    return torch.nn.functional.pad(before, (0, max(stop - start, 0)), value=torch.inf)[:, : left.shape[1]]
