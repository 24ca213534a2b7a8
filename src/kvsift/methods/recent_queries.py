"""The newest queries of a sequence, for methods that judge keys by them."""

from __future__ import annotations

import torch
from torch import Tensor

KEPT_BACK = 256  # tokens that can be taken back without losing sight of the queries before them


class RecentQueries:
    """Keeps the newest ``wanted`` + 256 queries or more: after a roll-back by up to 256 tokens ``wanted`` are known.

    Args:
        wanted: newest queries that are asked for.

    Attributes:
        length: tokens seen.
        first: the oldest position from which on all queries are known.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.length = self.first = 0
        self._room: Tensor | None = None  # [num_query_heads, capacity, head_dim], from ``first`` on

    @torch.inference_mode()  # the room outlives the block it was made in
    def observe(self, queries: Tensor | None, start: int, stop: int) -> None:
        """See the queries of new tokens, [num_query_heads, stop - start, head_dim]; None: they are not known."""
        held, self.length = start - self.first, stop
        if queries is None:
            self.first, self._room = stop, None
            return
        if self._room is None or held + stop - start > self._room.shape[1]:
            held = self._make_room(queries, held)
            self.first = max(stop - self.wanted - KEPT_BACK, start - held)
        new = queries[:, max(self.first - start, 0) :]
        self._room[:, held : held + new.shape[1]] = new  # type: ignore[index]

    def _make_room(self, like: Tensor, held: int) -> int:
        """A room with the newest of ``held`` queries at its front, and how many those are."""
        kept = self.wanted + KEPT_BACK
        old = min(held, max(kept - like.shape[1], 0)) if self._room is not None else 0
        room = like.new_empty(like.shape[0], 2 * kept, like.shape[2])
        if self._room is not None:
            room[:, :old] = self._room[:, held - old : held]
        self._room = room
        return old

    def read(self, start: int, stop: int) -> Tensor | None:
        """Queries at positions start to stop, [num_query_heads, stop - start, head_dim]; None if one is not known."""
        if self._room is None or start < self.first or stop > self.length:
            return None
        return self._room[:, start - self.first : stop - self.first]

    def fork(self) -> RecentQueries:
        copy = RecentQueries(self.wanted)
        copy.length, copy.first = self.length, self.first
        copy._room = None if self._room is None else self._room.clone()  # both will write on
        return copy

    def crop(self, length: int) -> None:
        """Forget the queries from position ``length`` on."""
        self.length = min(self.length, length)
        if self.length < self.first:
            self.first, self._room = self.length, None
