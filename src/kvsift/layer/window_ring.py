"""Decode attention of a layer with a sliding window, without the host: every slot has a ring of the last tokens.

A ring has room for more tokens than the window, so that the last steps of a sequence can be forgotten: what they have
overwritten, no earlier step sees.
"""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from kvsift.kernels.append import append
from kvsift.kernels.page_attention import SplitSpace, page_attention, split_count
from kvsift.kernels.paged import PagedKV
from kvsift.layer.paged_decode import DecodeBatch
from kvsift.types import LayerShape

PAGE_SIZE = 16


class RingPlaces(NamedTuple):
    """Places of the tokens of a step, which all rings of the same size and window share."""

    newest: Tensor  # int32 [slots], the place behind that of the newest token
    filled: Tensor  # int32 [slots], tokens in the ring
    visible: Tensor  # int32 [slots, num_kv_heads, window], places of the visible tokens, the newest one last
    counts: Tensor  # int32 [slots, num_kv_heads], of these


class WindowRing:
    """Keys and values of one layer for sequences in slots.

    Args:
        window: tokens that a query sees, its own included.
        num_slots: sequences side by side.
        spare: most steps that are forgotten.
        like: keys of the layer, [any, num_kv_heads, any, head_dim].
        value_dim: channels of values in ``load`` and ``last``; the ring has head_dim for them, as stores have.
    """

    def __init__(self, window: int, num_slots: int, spare: int, like: Tensor, value_dim: int) -> None:
        self.window, num_pages = window, -(-(window + spare) // PAGE_SIZE)
        self.size = num_pages * PAGE_SIZE  # of a ring, in tokens
        self.num_kv_heads, self._value_dim = like.shape[1], value_dim
        sizes = self.num_kv_heads, num_slots * num_pages, PAGE_SIZE, like.shape[3]
        self._keys, self._values = (like.new_zeros(sizes) for _ in range(2))
        pages = torch.arange(num_slots * num_pages, dtype=torch.int32, device=like.device)
        self._table = pages.view(num_slots, num_pages)

    @property
    def head_dim(self) -> int:
        """Channels of keys, and of values where they are kept."""
        return self._keys.shape[3]

    def first(self, num_slots: int) -> WindowRing:
        """Return the rings of the first slots, in the same memory."""
        part = copy(self)
        part._table = self._table[:num_slots]
        return part

    def places(self, lengths: Tensor) -> RingPlaces:
        """Return the places of sequences of these lengths, int32 [slots], the new token included."""
        counts = lengths.clamp(max=self.window).unsqueeze(1)
        visible = (lengths.unsqueeze(1) - counts + torch.arange(self.window, device=lengths.device)) % self.size
        return RingPlaces(
            (lengths - 1) % self.size + 1,
            lengths.clamp(max=self.size),
            visible.to(torch.int32).unsqueeze(1).expand(-1, self.num_kv_heads, -1).contiguous(),
            counts.expand(-1, self.num_kv_heads).contiguous(),
        )

    def append(self, keys: Tensor, values: Tensor, places: RingPlaces) -> None:
        """Store a token of each sequence, [slots, num_kv_heads, head_dim] both."""
        append(self.newest(places), keys, values, {})

    def newest(self, places: RingPlaces) -> PagedKV:
        """Return the pools to which the tokens of a step are appended."""
        return PagedKV(self._keys, self._values, self._table, places.newest)

    def attend(
        self, shape: LayerShape, queries: Tensor, places: RingPlaces, batch: DecodeBatch,
        sink_logit: Tensor | None = None, early: bool = False,
    ) -> Tensor:  # fmt: skip
        """Attend the window of each sequence, the token that was stored last included.

        Args:
            shape: shape of the layer.
            queries: [slots, num_query_heads, head_dim].
            places: of this step.
            batch: keeps the workspace.
            sink_logit: [num_query_heads], a learned extra logit, if the model has one.
            early: see ``page_attention``.

        Returns:
            [slots, num_query_heads, head_dim].
        """
        kv, space = PagedKV(self._keys, self._values, self._table, places.filled), None
        if kv.keys.is_cuda:
            rows = kv.batch * self.num_kv_heads
            sizes = rows, split_count(kv, self.window, rows, 1), shape.group_size, shape.head_dim, kv.keys.device
            space = batch.space(SplitSpace.make, *sizes, key=sizes)
        return page_attention(
            queries, kv, places.visible, places.counts, scale=shape.scale, softcap=shape.softcap,
            sink_logit=sink_logit, space=space, unit_size=1, early=early,
        )  # fmt: skip

    def load(self, slot: int, keys: Tensor, values: Tensor, length: int) -> None:
        """Begin with the last tokens of a sequence of ``length`` tokens, [num_kv_heads, few tokens, head_dim or
        value_dim]."""
        at = self._at(slot, length, keys.shape[1])
        for ring, tokens in ((self._keys, keys), (self._values, values)):
            ring.flatten(1, 2)[:, at, : tokens.shape[2]] = tokens

    def last(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the tokens that the next query of a sequence of ``length`` tokens sees, beside its
        own: [num_kv_heads, fewer than window, head_dim or value_dim]."""
        at = self._at(slot, length, min(length, self.window - 1))
        return self._keys.flatten(1, 2)[:, at], self._values.flatten(1, 2)[:, at, : self._value_dim]

    def _at(self, slot: int, length: int, count: int) -> Tensor:
        """Places of the last tokens of a sequence among those of all slots, int64 [count]."""
        return torch.arange(length - count, length, device=self._table.device) % self.size + slot * self.size
