"""Tokens of a sequence that were dropped for good, the choice of those that remain, and roll-back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvsift.methods.common.head_budgets import head_counts
from kvsift.methods.scoring import top_units
from kvsift.types import Candidates, KVReader, Limit, Selection

NEVER = torch.iinfo(torch.int32).max

Worth = Callable[[Tensor], Tensor]  # remaining tokens int64 [num_rows, count] -> float32 [num_rows, count]
Prefer = Callable[[Tensor, int], Tensor]  # worths, number of tokens kept -> worths, inf for tokens that always stay


class DroppedTokens:
    """Dropped tokens of one sequence in one layer, by head: the rows are query heads, KV heads or one for all.

    A dropped token returns only if the query that it was dropped for is rolled back. Rows drop equally many tokens
    until a call of ``keep`` is ragged: a row with fewer remaining tokens than others then begins with pads, -1. Every
    row ascends, and all end with the newest tokens.

    Args:
        num_rows: heads that drop tokens of their own.
    """

    BYTES = 4  # per token and row

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._dropped_for: Tensor | None = None  # int32 [num_rows, capacity], position of the query, or NEVER
        self._left: Tensor | None = None  # int64 [num_rows, count], of the tokens below ``_stop``
        self._stop = 0
        self.ragged = False  # rows may have dropped different numbers
        self.newest = -1  # no query after this one has dropped anything

    @property
    def num_dropped(self) -> list[int]:
        """Number of tokens that each row has dropped."""
        return [0] * self.num_rows if self._dropped_for is None else (self._dropped_for != NEVER).sum(1).tolist()

    def left(self, stop: int, device: torch.device) -> Tensor:
        """Remaining tokens before ``stop``, ascending after pads, int64 [num_rows, count]."""
        if self._dropped_for is None:
            return torch.arange(stop, device=device).expand(self.num_rows, -1)
        if self._left is None or stop < self._stop:
            return self.left_for(NEVER - 1, stop, device)
        new = torch.arange(self._stop, stop, device=device).expand(self.num_rows, -1)
        return torch.cat([self._left.to(device), new], 1)

    def left_for(self, position: int, stop: int, device: torch.device) -> Tensor:
        """Tokens before ``stop`` that the query at ``position`` saw, and later ones; as ``left``."""
        if self._dropped_for is None or (self._left is not None and position >= self.newest and stop >= self._stop):
            return self.left(stop, device)
        dropped_for = self._dropped_for[:, :stop]
        left = self._listed(dropped_for > position).to(device)
        new = torch.arange(dropped_for.shape[1], stop, device=device).expand(self.num_rows, -1)
        return torch.cat([left, new], 1)

    def index(self, tokens: Tensor) -> Tensor:
        """Tokens as an index along the token axis: pads become 0, where the value must be ignored."""
        return tokens.clamp_min(0) if self.ragged else tokens

    def seen(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Whether each query saw each token: tokens int64 [num_rows, count], positions int64 [num_queries] -> bool
        [num_rows, num_queries, count]; False for pads."""
        past = tokens.unsqueeze(1) <= positions.unsqueeze(1)
        if self._dropped_for is None:
            return past
        if self.ragged:
            past &= tokens.unsqueeze(1) >= 0
        index = self.index(tokens).clamp_max(self._dropped_for.shape[1] - 1)
        until = self._dropped_for.to(tokens.device).gather(1, index).masked_fill(index < tokens, NEVER)
        return past & (until.unsqueeze(1) > positions.unsqueeze(1))

    @torch.inference_mode()  # the tensors outlive the caller's inference mode
    def keep(self, kept: Tensor, stop: int, position: int, ragged: bool = False) -> None:
        """Drop all tokens before ``stop`` but these, for the query at ``position``: ascending int64 [num_rows, count],
        after pads if ``ragged``."""
        left = self.left(stop, kept.device)
        self._grow(stop, kept.device)
        self.ragged |= ragged
        assert self._dropped_for is not None
        if self.ragged:  # pads are written too, with a value that changes nothing
            for tokens, pad_value, value, reduction in ((left, NEVER, position, "amin"), (kept, -1, NEVER, "amax")):
                values = torch.where(tokens < 0, pad_value, value).int()
                self._dropped_for.scatter_reduce_(1, self.index(tokens), values, reduction)
        else:
            self._dropped_for.scatter_(1, left, position)
            self._dropped_for.scatter_(1, kept, NEVER)
        self._left, self._stop, self.newest = kept, stop, position

    def _listed(self, remains: Tensor) -> Tensor:
        """Tokens that remain by a bool [num_rows, num_tokens], ascending after pads, int64 [num_rows, count]."""
        if not self.ragged:
            return remains.nonzero()[:, 1].view(self.num_rows, -1)
        tokens = torch.where(remains, torch.arange(remains.shape[1], device=remains.device), -1).sort(-1).values
        return tokens[:, remains.shape[1] - int(remains.sum(1).max()) :]

    def _grow(self, stop: int, device: torch.device) -> None:
        if self._dropped_for is None:
            self._dropped_for = torch.full((self.num_rows, stop), NEVER, dtype=torch.int32, device=device)
        capacity = self._dropped_for.shape[1]
        if capacity < stop:
            more = max(stop, capacity * 5 // 4) - capacity
            self._dropped_for = torch.nn.functional.pad(self._dropped_for, (0, more), value=NEVER)

    def fork(self) -> DroppedTokens:
        copy = DroppedTokens(self.num_rows)
        copy._dropped_for = None if self._dropped_for is None else self._dropped_for.clone()
        copy._left, copy._stop, copy.newest, copy.ragged = self._left, self._stop, self.newest, self.ragged
        return copy

    @torch.inference_mode()
    def crop(self, length: int) -> None:
        """Restore the tokens that were dropped for queries from position ``length`` on."""
        if self._dropped_for is None:
            return
        self.newest = min(self.newest, length - 1)
        self._dropped_for = self._dropped_for.masked_fill(self._dropped_for >= length, NEVER)
        self._left = None
        if bool((self._dropped_for == NEVER).all()):
            self._dropped_for, self.ragged = None, False


def keys_of(reader: KVReader, tokens: Tensor, stop: int, ragged: bool = False) -> Tensor:
    """Keys of remaining tokens before ``stop``, ascending int64 [num_rows, count], after pads if ``ragged``, whose keys
    mean nothing: [num_heads, count, head_dim], num_heads the KV heads or more."""
    keys = reader.borrow(0, stop)  # [num_kv_heads, stop, head_dim], or fewer where the store has freed tokens
    if keys.shape[1] == tokens.shape[1] and not ragged:  # else one row may have them all, and another pads
        return reader.keys(0, stop)
    num_heads = max(len(keys), len(tokens))
    heads = torch.arange(num_heads, device=keys.device) // (num_heads // len(keys))
    chosen = keys[heads.unsqueeze(1), tokens.to(keys.device)]
    reader.count_bytes(chosen.numel() * chosen.element_size())
    return chosen


def as_they_are(worth: Tensor, count: int) -> Tensor:
    """Leave the worths as they are: no token always stays."""
    return worth


def select_remaining(
    drops: DroppedTokens, candidates: Candidates, limit: Limit, start: int, device: torch.device, worth: Worth,
    prefer: Prefer = as_they_are,
) -> Selection:  # fmt: skip
    """Select the remaining candidates for the query at ``start``, after each row has dropped those of least worth.

    Args:
        drops: dropped tokens of this sequence; updated.
        candidates, limit: as for ``Method.select``.
        start: position of the query.
        device: device of the selection.
        worth: worth of the remaining tokens before the query.
        prefer: marks candidates that always stay.
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


def select_remaining_shared(
    drops: DroppedTokens, candidates: Candidates, limit: Limit, start: int, device: torch.device, worth: Worth,
    prefer: Prefer, own: Callable[[], int],
) -> Selection:  # fmt: skip
    """As ``select_remaining``, where rows share one total (``Limit.adaptive``).

    ``own`` returns how many candidates each row keeps before worths of several rows are compared; it is called after
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


def _worth(drops: DroppedTokens, left: Tensor, stop: int, start: int, worth: Worth) -> Tensor:
    """Worth of the remaining tokens before ``stop``, float32 [num_rows, count]."""
    # with window=0 the query's own token is a candidate too: it is kept
    before = worth(drops.left(start, left.device))
    return torch.nn.functional.pad(before, (0, max(stop - start, 0)), value=torch.inf)[:, : left.shape[1]]
