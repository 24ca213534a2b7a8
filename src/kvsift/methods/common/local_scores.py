"""Attention that keys receive from the queries shortly after them, by which InfLLM selects representatives.

Queries are grouped into tiles, cut at absolute positions. The queries of a tile attend the keys of the ``local`` tokens
before its end, whole blocks of them; each key thus receives attention from ``local`` queries, up to rounding to tiles
and blocks. Sums are kept per tile: a roll-back removes the last tiles and leaves the others unchanged.
"""

from __future__ import annotations

from copy import copy
from typing import Literal

import torch
from torch import Tensor

from kvsift.methods.common.recent_queries import KEPT_BACK, RecentQueries
from kvsift.methods.common.softmax_share import MAX_SCORES
from kvsift.methods.oracle import exact_logits
from kvsift.types import LayerShape

Kind = Literal["code", "paper"]


class LocalScores:
    """Local scores of one sequence in one layer.

    Args:
        kind: "code" sums softmax weights over the keys of a tile, the query's own key included; "paper" takes the mean
            product with the later queries. Both are summed over the query heads of a KV head.
        tile, block, local: tokens; a tile holds whole blocks, ``local`` at least a tile.

    Attributes:
        tiles: sums over the queries of each complete tile, float32 [num_kv_heads, num_keys], of the keys from
            ``first_key`` to its end; None where a query is unknown. Never written to.
        chosen: representatives of the first complete blocks, [num_kv_heads, num_blocks, head_dim].
    """

    def __init__(self, kind: Kind, tile: int, block: int, local: int) -> None:
        self.kind, self.tile, self.block, self.local = kind, tile, block, local
        self.tiles: list[Tensor | None] = []
        self.chosen: Tensor | None = None
        self._recent = RecentQueries(tile)
        self._waiting: tuple[tuple[int, Tensor], ...] = ()  # (position of the first, queries) of a large chunk
        self._checkpoint: RecentQueries | None = None

    def observe(self, queries: Tensor | None, start: int, stop: int) -> None:
        """Receive the queries of new tokens, [num_query_heads, stop - start, head_dim]; None if they are unknown."""
        self._waiting = ()
        if queries is not None and stop - start > KEPT_BACK:
            first = len(self.tiles) * self.tile
            rest = self._recent.read(first, start) if first < start else None
            self._waiting = ((start, queries),) if rest is None else ((first, rest.clone()), (start, queries))
        self._recent.observe(queries, start, stop)

    def end_chunk(self) -> None:
        """Discard the queries of a chunk: its complete tiles are summed, the rest is among the recent queries."""
        self._waiting = ()

    def queries(self, tile: int) -> Tensor | None:
        """Queries of a tile, [num_query_heads, tile, head_dim]; None if one is unknown."""
        start, stop = tile * self.tile, (tile + 1) * self.tile
        recent = self._recent.read(start, stop)
        if recent is not None or not self._waiting or start < self._waiting[0][0]:
            return recent
        return torch.cat([part[:, max(start - first, 0) : max(stop - first, 0)] for first, part in self._waiting], 1)

    def first_key(self, tile: int) -> int:
        """Position of the oldest key that the queries of a tile attend."""
        return max(-(-((tile + 1) * self.tile - self.local) // self.block) * self.block, 0)

    def tiles_of(self, block: int) -> range:
        """Tiles whose queries attend a block."""
        start = block * self.block
        return range(start // self.tile, (start + self.local) // self.tile)

    def num_complete(self, num_tiles: int) -> int:
        """Number of blocks that only the first ``num_tiles`` tiles attend."""
        return max((num_tiles + 1) * self.tile - self.local - 1, -1) // self.block + 1

    def append(self, shape: LayerShape, keys: Tensor) -> None:
        """Add the sums over the queries of the next tile, which attend ``keys`` [num_kv_heads, num_keys, head_dim]."""
        queries = self.queries(len(self.tiles))
        if queries is None:
            self.tiles.append(None)
            return
        past = keys.shape[1] - self.tile  # keys before the tile's own
        seen = torch.ones(self.tile, keys.shape[1], dtype=torch.bool, device=keys.device).tril(past - self.strictly)
        rows = max(1, MAX_SCORES // (shape.num_query_heads * keys.shape[1]))
        total = torch.zeros(shape.num_query_heads, keys.shape[1], dtype=torch.float32, device=keys.device)
        for part, visible in zip(queries.to(keys.device).split(rows, 1), seen.split(rows)):
            total += self._weights(shape, part, keys, visible).sum(1)
        self.tiles.append(total.unflatten(0, (shape.num_kv_heads, -1)).sum(1))

    def _weights(self, shape: LayerShape, queries: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
        logits = exact_logits(shape, queries, keys)  # [num_query_heads, num_queries, num_keys]
        if self.kind == "paper":
            return logits.masked_fill_(~visible, 0.0)
        return shape.capped(logits).masked_fill_(~visible, -torch.inf).softmax(-1)

    @property
    def strictly(self) -> bool:
        """Whether a query attends only the keys before its own."""
        return self.kind == "paper"

    def worth(self, first: int, stop: int, num_tiles: int) -> tuple[Tensor | None, Tensor]:
        """Worth of the keys of blocks ``first`` to ``stop`` to the queries of the first ``num_tiles`` tiles.

        Returns:
            float32 [num_kv_heads, stop - first, block], None without a query; and how many queries attended each key,
            [stop - first, block].
        """
        start, end = first * self.block, stop * self.block
        total, counts = None, torch.zeros(end - start, dtype=torch.float32)
        for tile in range(start // self.tile, min(self.tiles_of(stop - 1).stop, num_tiles)):
            sums, oldest, behind = self.tiles[tile], self.first_key(tile), (tile + 1) * self.tile
            low, high = max(oldest, start), min(behind, end)
            if sums is None or low >= high:
                continue
            total = sums.new_zeros(len(sums), end - start) if total is None else total
            total[:, low - start : high - start] += sums[:, low - oldest : high - oldest]
            counts[low - start : high - start] += (behind - self.strictly - torch.arange(low, high)).clamp_max(
                self.tile
            )
        if total is not None and self.kind == "paper":
            mean = total / counts.clamp_min(1).to(total.device)
            total = mean.masked_fill_((counts == 0).to(total.device), -torch.inf)
        shape = stop - first, self.block
        return None if total is None else total.unflatten(1, shape), counts.unflatten(0, shape)

    def fork(self) -> LocalScores:
        other = copy(self)
        other.tiles, other._recent = list(self.tiles), self._recent.fork()
        return other

    def checkpoint(self) -> None:
        """Remember the present length: the state may be rolled back to it from any later one."""
        self._checkpoint = self._recent.fork()

    def crop(self, length: int) -> None:
        if self._checkpoint is not None and length <= self._checkpoint.length:
            if self._recent.first > length // self.tile * self.tile:
                self._recent = self._checkpoint.fork()
            self._checkpoint = self._checkpoint if length == self._checkpoint.length else None
        self._recent.crop(length)
        self._waiting = ()
        del self.tiles[length // self.tile :]
        if self.chosen is not None:
            self.chosen = self.chosen[:, : self.num_complete(len(self.tiles))]
