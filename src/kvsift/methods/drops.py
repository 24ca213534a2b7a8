"""Which tokens of a sequence are left where some were dropped for good, and what that takes to be taken back."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.types import KVReader

NEVER = torch.iinfo(torch.int32).max


class Drops:
    """Tokens that one layer still sees of one sequence, by head: the rows are query heads, KV heads or one for all.

    A token that was dropped never comes back, unless the query that it was dropped for is taken back. Every row has
    dropped equally many.

    Args:
        num_rows: heads that drop for themselves.
    """

    BYTES = 4  # per token and row

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._dropped_for: Tensor | None = None  # int32 [num_rows, capacity], position of the query, or NEVER
        self._left: Tensor | None = None  # int64 [num_rows, count], of the tokens below ``_stop``
        self._stop = 0
        self.newest = -1  # no query after this one has dropped anything

    @property
    def num_dropped(self) -> int:
        """Tokens that each row has dropped."""
        return 0 if self._dropped_for is None else int((self._dropped_for[0] != NEVER).sum())

    def left(self, stop: int, device: torch.device) -> Tensor:
        """Tokens before ``stop`` that are left, ascending, int64 [num_rows, count]."""
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
        left = (known > position).nonzero()[:, 1].view(self.num_rows, -1).to(device)
        new = torch.arange(known.shape[1], stop, device=device).expand(self.num_rows, -1)
        return torch.cat([left, new], 1)

    def seen(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Whether each query saw each token: tokens int64 [num_rows, count], positions int64 [num_queries] -> bool
        [num_rows, num_queries, count]."""
        past = tokens.unsqueeze(1) <= positions.unsqueeze(1)
        if self._dropped_for is None:
            return past
        known = tokens.clamp_max(self._dropped_for.shape[1] - 1)
        until = self._dropped_for.to(tokens.device).gather(1, known).masked_fill(known < tokens, NEVER)
        return past & (until.unsqueeze(1) > positions.unsqueeze(1))

    @torch.inference_mode()  # what is remembered outlives the block it was made in
    def keep(self, kept: Tensor, stop: int, position: int) -> None:
        """Drop all tokens before ``stop`` but these, ascending int64 [num_rows, count], for the query at a position."""
        left = self.left(stop, kept.device)
        self._grow(stop, kept.device)
        assert self._dropped_for is not None
        self._dropped_for.scatter_(1, left, position)
        self._dropped_for.scatter_(1, kept, NEVER)
        self._left, self._stop, self.newest = kept, stop, position

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
        copy._left, copy._stop, copy.newest = self._left, self._stop, self.newest
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
            self._dropped_for = None


def keys_of(reader: KVReader, tokens: Tensor, stop: int) -> Tensor:
    """Keys of tokens that are left before ``stop``, ascending int64 [num_rows, count]: [num_heads, count, head_dim],
    num_heads the KV heads or more."""
    keys = reader.borrow(0, stop)  # [num_kv_heads, stop, head_dim], or as many as are left where the others were freed
    if keys.shape[1] == tokens.shape[1]:
        return reader.keys(0, stop)
    num_heads = max(len(keys), len(tokens))
    heads = torch.arange(num_heads, device=keys.device) // (num_heads // len(keys))
    chosen = keys[heads.unsqueeze(1), tokens.to(keys.device)]
    reader.count_bytes(chosen.numel() * chosen.element_size())
    return chosen
