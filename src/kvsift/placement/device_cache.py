"""Pieces of pools in host memory that are on the device too: those that were wanted last.

A piece is a granule of one KV head, a page or a token. It is named by ``place * num_kv_heads + head``, where place
counts granules through the pages of the pool: names stay when pools grow, and rows that share a page share its pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsift.errors import InputError


class DeviceCache:
    """The least recently wanted pieces make room for new ones.

    Args:
        tokens: of a layer that there is room for; more if a single step wants more.
        device: where they are.
    """

    def __init__(self, tokens: int, device: torch.device) -> None:
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise InputError(f"device_cache={tokens!r} must be a number of tokens, 1 or more; 8192 is a good start.")
        self.tokens, self.device = tokens, device
        self._wanted = self._found = 0
        self._granule_size = self._num_kv_heads = self._clock = 0
        self._buffers: list[Tensor] = []  # [slots, granule_size, width] on the device, of keys and of values
        self._slot_of = torch.empty(0, dtype=torch.int64)  # by name; -1: not here
        self._name_in = self._slot_of.clone()  # by slot; -1: nothing
        self._last_wanted = self._slot_of.clone()  # by slot; 0: never

    @torch.inference_mode()  # what is here outlives the block it came in
    def fetch(self, pools: Sequence[Tensor], places: Tensor, granule_size: int) -> tuple[list[Tensor], int]:
        """Pieces of the pools [num_kv_heads, num_pages, page_size, width], brought here as far as they are not.

        Args:
            pools: of keys and values, on the host.
            places: int64 [num_heads, count] on the host; num_heads is a multiple of the KV heads.
            granule_size: tokens of a piece; divides the page size.

        Returns:
            One tensor [num_heads, count * granule_size, width] per pool, on the device; bytes that were copied.
        """
        num_kv_heads = len(pools[0])
        heads = torch.arange(len(places)) // (len(places) // num_kv_heads)
        names, which = (places * num_kv_heads + heads.unsqueeze(1)).unique(return_inverse=True)
        self._make_room(pools, len(names), granule_size)
        self._clock += 1
        slots = self._slot_of[names]
        missing = slots < 0
        count = int(missing.sum())
        self._wanted, self._found = self._wanted + len(names), self._found + len(names) - count
        self._last_wanted[slots[~missing]] = self._clock
        copied = 0
        if count:
            slots[missing] = self._replace(names[missing])
            copied = self._bring(pools, names[missing], slots[missing])
        index = slots[which].flatten().to(self.device)
        shape = len(places), places.shape[1] * granule_size
        return [buffer.index_select(0, index).view(*shape, buffer.shape[2]) for buffer in self._buffers], copied

    @torch.inference_mode()
    def forget(self, tokens: Tensor) -> None:
        """These tokens, int64 [count] counted through the pages of the pool, are written anew."""
        if not self._buffers:
            return
        places = (tokens // self._granule_size).unique()
        names = (places.unsqueeze(1) * self._num_kv_heads + torch.arange(self._num_kv_heads)).flatten()
        slots = self._slot_of[names[names < len(self._slot_of)]]
        self._empty(slots[slots >= 0])

    def _empty(self, slots: Tensor) -> None:
        names = self._name_in[slots]
        self._slot_of[names[names >= 0]] = -1
        self._name_in[slots] = -1
        self._last_wanted[slots] = 0

    def _make_room(self, pools: Sequence[Tensor], wanted: int, granule_size: int) -> None:
        num_kv_heads, num_pages, page_size = pools[0].shape[:3]
        num_slots = max(wanted, -(-self.tokens * num_kv_heads // granule_size))
        if granule_size != self._granule_size or wanted > len(self._name_in):
            self._granule_size, self._num_kv_heads = granule_size, num_kv_heads
            self._buffers = []  # before the new ones are there
            self._buffers = [
                pool.new_empty(num_slots, granule_size, pool.shape[3], device=self.device) for pool in pools
            ]
            self._name_in = torch.full((num_slots,), -1)
            self._last_wanted = torch.zeros(num_slots, dtype=torch.int64)
            self._slot_of = torch.empty(0, dtype=torch.int64)
        num_names = num_pages * (page_size // granule_size) * num_kv_heads
        if num_names > len(self._slot_of):
            more = torch.full((num_names - len(self._slot_of),), -1)
            self._slot_of = torch.cat([self._slot_of, more])

    def _replace(self, names: Tensor) -> Tensor:
        """Slots for new names: those that were wanted longest ago, none of this step."""
        slots = self._last_wanted.topk(len(names), largest=False).indices
        self._empty(slots)
        self._slot_of[names], self._name_in[slots], self._last_wanted[slots] = slots, names, self._clock
        return slots

    def _bring(self, pools: Sequence[Tensor], names: Tensor, slots: Tensor) -> int:
        num_kv_heads, num_pages, page_size = pools[0].shape[:3]
        per_head = num_pages * (page_size // self._granule_size)
        index, copied = names % num_kv_heads * per_head + names // num_kv_heads, 0
        into = slots.to(self.device)
        for pool, buffer in zip(pools, self._buffers):
            rows = torch.empty(
                len(index), self._granule_size * pool.shape[3], dtype=pool.dtype, pin_memory=self.device.type == "cuda"
            )
            torch.index_select(pool.view(-1, rows.shape[1]), 0, index, out=rows)
            buffer.view(len(buffer), -1).index_copy_(0, into, rows.to(self.device, non_blocking=True))
            copied += rows.numel() * rows.element_size()
        return copied

    def take_counts(self) -> tuple[int, int]:
        """Pieces that were wanted since this was last asked, and those of them that were here."""
        counts, self._wanted, self._found = (self._wanted, self._found), 0, 0
        return counts

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)
