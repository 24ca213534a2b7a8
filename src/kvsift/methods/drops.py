"""Which tokens of a sequence are left where some were dropped for good, and what that takes to be taken back."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.types import KVReader

NEVER = torch.iinfo(torch.int32).max


class Drops:
    """Tokens that one layer still sees of one sequence, by head: the rows are query heads, KV heads or one for all.

    A token that was dropped never comes back, unless the query that it was dropped for is taken back. Rows drop equally
    many, until ``keep`` is told that they are ragged: those with fewer left than others then begin with pads, -1. Every
    row thus ascends, and all end with the newest tokens.

    Args:
        num_rows: heads that drop for themselves.
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
        """Tokens that each row has dropped."""
        return [0] * self.num_rows if self._dropped_for is None else (self._dropped_for != NEVER).sum(1).tolist()

    def left(self, stop: int, device: torch.device) -> Tensor:
        """Tokens before ``stop`` that are left, ascending behind pads, int64 [num_rows, count]."""
        if self._dropped_for is None:
            return torch.arange(stop, device=device).expand(self.num_rows, -1)
        if self._left is None or stop < self._stop:
            return self.left_for(NEVER - 1, stop, device)
        new = torch.arange(self._stop, stop, device=device).expand(self.num_rows, -1)
        return torch.cat([self._left.to(device), new], 1)

    def left_for(self, position: int, stop: int, device: torch.device) -> Tensor:
        """Tokens before ``stop`` that the query at ``position`` saw, or that came after it; as ``left``."""
        if self._dropped_for is None or (self._left is not None and position >= self.newest and stop >= self._stop):
            return self.left(stop, device)
        known = self._dropped_for[:, :stop]
        left = self._listed(known > position).to(device)
        new = torch.arange(known.shape[1], stop, device=device).expand(self.num_rows, -1)
        return torch.cat([left, new], 1)

    def index(self, tokens: Tensor) -> Tensor:
        """Tokens as an index along tokens: pads point to the first one, and what is found there means nothing."""
        return tokens.clamp_min(0) if self.ragged else tokens

    def seen(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Whether each query saw each token: tokens int64 [num_rows, count], positions int64 [num_queries] -> bool
        [num_rows, num_queries, count]. Nobody saw a pad."""
        past = tokens.unsqueeze(1) <= positions.unsqueeze(1)
        if self._dropped_for is None:
            return past
        if self.ragged:
            past &= tokens.unsqueeze(1) >= 0
        known = self.index(tokens).clamp_max(self._dropped_for.shape[1] - 1)
        until = self._dropped_for.to(tokens.device).gather(1, known).masked_fill(known < tokens, NEVER)
        return past & (until.unsqueeze(1) > positions.unsqueeze(1))

    @torch.inference_mode()  # what is remembered outlives the block it was made in
    def keep(self, kept: Tensor, stop: int, position: int, ragged: bool = False) -> None:
        """Drop all tokens before ``stop`` but these, for the query at a position: ascending int64 [num_rows, count], if
        ``ragged`` behind pads."""
        left = self.left(stop, kept.device)
        self._grow(stop, kept.device)
        self.ragged |= ragged
        assert self._dropped_for is not None
        if self.ragged:  # a pad is written too, so it must change nothing
            for tokens, of_pads, value, how in ((left, NEVER, position, "amin"), (kept, -1, NEVER, "amax")):
                values = torch.where(tokens < 0, of_pads, value).int()
                self._dropped_for.scatter_reduce_(1, self.index(tokens), values, how)
        else:
            self._dropped_for.scatter_(1, left, position)
            self._dropped_for.scatter_(1, kept, NEVER)
        self._left, self._stop, self.newest = kept, stop, position

    def _listed(self, there: Tensor) -> Tensor:
        """Tokens that are there by a bool [num_rows, num_tokens], ascending behind pads, int64 [num_rows, count]."""
        if not self.ragged:
            return there.nonzero()[:, 1].view(self.num_rows, -1)
        tokens = torch.where(there, torch.arange(there.shape[1], device=there.device), -1).sort(-1).values
        return tokens[:, there.shape[1] - int(there.sum(1).max()) :]

    def _grow(self, stop: int, device: torch.device) -> None:
        old = self._dropped_for
        if old is not None and old.shape[1] >= stop:
            return
        capacity = stop if old is None else max(stop, old.shape[1] * 5 // 4)
        self._dropped_for = torch.full((self.num_rows, capacity), NEVER, dtype=torch.int32, device=device)
        if old is not None:
            self._dropped_for[:, : old.shape[1]] = old

    def fork(self) -> Drops:
        copy = Drops(self.num_rows)
        copy._dropped_for = None if self._dropped_for is None else self._dropped_for.clone()
        copy._left, copy._stop, copy.newest, copy.ragged = self._left, self._stop, self.newest, self.ragged
        return copy

    @torch.inference_mode()
    def crop(self, length: int) -> None:
        """Take back what was dropped for queries from position ``length`` on."""
        if self._dropped_for is None:
            return
        self.newest = min(self.newest, length - 1)
        self._dropped_for = self._dropped_for.masked_fill(self._dropped_for >= length, NEVER)
        self._left = None
        if bool((self._dropped_for == NEVER).all()):
            self._dropped_for, self.ragged = None, False


def keys_of(reader: KVReader, tokens: Tensor, stop: int, ragged: bool = False) -> Tensor:
    """Keys of tokens that are left before ``stop``, ascending int64 [num_rows, count], if ``ragged`` behind pads, which
    get some key: [num_heads, count, head_dim], num_heads the KV heads or more."""
    keys = reader.borrow(0, stop)  # [num_kv_heads, stop, head_dim], or as many as are left where the others were freed
    if keys.shape[1] == tokens.shape[1] and not ragged:  # else one row may have them all, and another pads
        return reader.keys(0, stop)
    num_heads = max(len(keys), len(tokens))
    heads = torch.arange(num_heads, device=keys.device) // (num_heads // len(keys))
    chosen = keys[heads.unsqueeze(1), tokens.to(keys.device)]
    reader.count_bytes(chosen.numel() * chosen.element_size())
    return chosen
