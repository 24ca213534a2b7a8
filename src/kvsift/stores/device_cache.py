"""A cache on the device of pieces of pools in host memory, least recently used first out.

A piece is a granule of one KV head, a page or a token. Its id is ``granule * num_kv_heads + head``, with granules
counted through the pages of the pool: ids stay when pools grow, and sequences that share a page share its pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsift.stores.kv_pool import granules_of


class DeviceCache:
    """Pieces of one layer.

    Args:
        tokens: capacity; more if a single step requests more.
        device: device of the cache.
    """

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.tokens, self.device = tokens, device
        self._requested = self._hits = 0
        self._granule_size = self._num_kv_heads = self._clock = 0
        self._buffers: list[Tensor] = []  # [slots, granule_size, width] on the device, of keys and of values
        self._slot_of = torch.empty(0, dtype=torch.int64)  # by piece id; -1: not cached
        self._piece_in = self._slot_of.clone()  # by slot; -1: none
        self._last_used = self._slot_of.clone()  # by slot; 0: never

    @torch.inference_mode()  # what is here outlives the block it came in
    def fetch(self, pools: Sequence[Tensor], granules: Tensor, granule_size: int) -> tuple[list[Tensor], int]:
        """Pieces of the pools [num_kv_heads, num_pages, page_size, width], copied to the device if not cached.

        Args:
            pools: pools of keys and values, on the host.
            granules: int64 [num_heads, count] on the host; num_heads is a multiple of the KV heads.
            granule_size: tokens of a piece; divides the page size.

        Returns:
            One tensor [num_heads, count * granule_size, width] per pool, on the device; bytes that were copied.
        """
        num_kv_heads = len(pools[0])
        heads = torch.arange(len(granules)) // (len(granules) // num_kv_heads)
        pieces, which = (granules * num_kv_heads + heads.unsqueeze(1)).unique(return_inverse=True)
        self._make_room(pools, len(pieces), granule_size)
        self._clock += 1
        slots = self._slot_of[pieces]
        missing = slots < 0
        count = int(missing.sum())
        self._requested, self._hits = self._requested + len(pieces), self._hits + len(pieces) - count
        self._last_used[slots[~missing]] = self._clock
        copied = 0
        if count:
            slots[missing] = self._replace(pieces[missing])
            copied = self._copy(pools, pieces[missing], slots[missing])
        index = slots[which].flatten().to(self.device)
        shape = len(granules), granules.shape[1] * granule_size
        return [buffer.index_select(0, index).view(*shape, buffer.shape[2]) for buffer in self._buffers], copied

    @torch.inference_mode()
    def forget(self, tokens: Tensor) -> None:
        """Drop pieces with these tokens, int64 [count], counted through the pages of the pool: they are rewritten."""
        if not self._buffers:
            return
        granules = (tokens // self._granule_size).unique()
        pieces = (granules.unsqueeze(1) * self._num_kv_heads + torch.arange(self._num_kv_heads)).flatten()
        slots = self._slot_of[pieces[pieces < len(self._slot_of)]]
        self._empty(slots[slots >= 0])

    def _empty(self, slots: Tensor) -> None:
        pieces = self._piece_in[slots]
        self._slot_of[pieces[pieces >= 0]] = -1
        self._piece_in[slots] = -1
        self._last_used[slots] = 0

    def _make_room(self, pools: Sequence[Tensor], requested: int, granule_size: int) -> None:
        num_kv_heads, num_pages, page_size = pools[0].shape[:3]
        num_slots = max(requested, -(-self.tokens * num_kv_heads // granule_size))
        if granule_size != self._granule_size or requested > len(self._piece_in):
            self._granule_size, self._num_kv_heads = granule_size, num_kv_heads
            self._buffers = []  # freed before new ones are allocated
            self._buffers = [
                pool.new_empty(num_slots, granule_size, pool.shape[3], device=self.device) for pool in pools
            ]
            self._piece_in = torch.full((num_slots,), -1)
            self._last_used = torch.zeros(num_slots, dtype=torch.int64)
            self._slot_of = torch.empty(0, dtype=torch.int64)
        num_pieces = num_pages * (page_size // granule_size) * num_kv_heads
        if num_pieces > len(self._slot_of):
            more = torch.full((num_pieces - len(self._slot_of),), -1)
            self._slot_of = torch.cat([self._slot_of, more])

    def _replace(self, pieces: Tensor) -> Tensor:
        """Slots for new pieces: the least recently used ones, none of this step."""
        slots = self._last_used.topk(len(pieces), largest=False).indices
        self._empty(slots)
        self._slot_of[pieces], self._piece_in[slots], self._last_used[slots] = slots, pieces, self._clock
        return slots

    def _copy(self, pools: Sequence[Tensor], pieces: Tensor, slots: Tensor) -> int:
        num_kv_heads, num_pages, page_size = pools[0].shape[:3]
        per_head = num_pages * (page_size // self._granule_size)
        index, copied = pieces % num_kv_heads * per_head + pieces // num_kv_heads, 0
        target = slots.to(self.device)
        for pool, buffer in zip(pools, self._buffers):
            sizes, on_gpu = (len(index), self._granule_size, pool.shape[3]), self.device.type == "cuda"
            rows = torch.empty(sizes, dtype=pool.dtype, pin_memory=on_gpu)
            torch.index_select(granules_of(pool, self._granule_size), 0, index, out=rows)
            buffer.index_copy_(0, target, rows.to(self.device, non_blocking=True))
            copied += rows.numel() * rows.element_size()
        return copied

    def take_counts(self) -> tuple[int, int]:
        """(requested, cached) pieces since the last call."""
        counts, self._requested, self._hits = (self._requested, self._hits), 0, 0
        return counts

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)
