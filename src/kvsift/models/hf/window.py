"""Layers that see the last tokens only: their attention, and the memory of native steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvsift import native
from kvsift.models.hf.attention import attend_tensors
from kvsift.native.product import MAX_ROWS
from kvsift.native.shapes import supports

LEAST_BLOCK = 256  # queries that are attended at once
LEAST_ROOM = 64  # tokens, behind those of a window


def attend_window(
    layer: Any, queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Store new tokens of one sequence in a ``DynamicSlidingWindowLayer``, and attend them to the tokens before them
    that are in its window.

    Few tokens on a CPU are attended one by one, with the bits that each gets alone.

    Args:
        layer: holds the last tokens of the sequence, fewer than its window by one.
        queries: [num_query_heads, num_new, head_dim].
        keys, values: [num_kv_heads, num_new, head_dim].
        scale, softcap: of ``LayerShape``.

    Returns:
        [num_query_heads, num_new, head_dim].
    """
    all_keys, all_values = (each[0] for each in layer.update(keys.unsqueeze(0), values.unsqueeze(0)))
    num_new, window = queries.shape[1], layer.sliding_window
    first = all_keys.shape[1] - num_new  # place of the first new token
    if num_new <= MAX_ROWS and supports(queries, all_keys):
        outputs = []
        for stop in range(first + 1, first + num_new + 1):
            seen = slice(max(0, stop - window), stop)
            query = queries[:, stop - 1 - first]
            outputs.append(native.attend_dense(query, all_keys[:, seen], all_values[:, seen], scale, softcap)[0])
        return torch.stack(outputs, 1)
    outputs, size = [], max(window, LEAST_BLOCK)
    for start in range(first, first + num_new, size):
        stop = min(start + size, first + num_new)
        places, least = torch.arange(start, stop, device=keys.device), max(0, start - window + 1)
        distance = places.unsqueeze(1) - torch.arange(least, stop, device=keys.device)
        tensors = queries[:, start - first : stop - first], all_keys[:, least:stop], all_values[:, least:stop]
        own, seen_keys, seen_values = (each.unsqueeze(0) for each in tensors)
        mask = ((distance >= 0) & (distance < window))[None, None]
        outputs.append(attend_tensors(own, seen_keys, seen_values, mask, scale, softcap, None, causal=False)[0])
    return torch.cat(outputs, 1)


def is_window(layer: Any) -> bool:
    """Whether a layer of a cache holds the last tokens of one sequence, which it has seen some of."""
    is_sliding = isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized and not layer.record_past
    return is_sliding and len(layer.keys) == 1


class Window:
    """The keys and values of the layers of a sequence that see the last tokens only, with room for more behind them.

    The layers of transformers' cache get views of it, so that composed steps and copies go on from them: what they were
    given does not change any more. Where they hold other tokens than those of the last step, these are copied.

    Attributes:
        rooms: keys and values of each layer, [num_kv_heads, room, head_dim].
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self.rooms: list[tuple[Tensor, Tensor]] = []
        self._given: list[Tensor] = []  # keys that each layer has been given
        self._stop = 0  # place behind the last token

    def make_room(self) -> bool:
        """Have room for a token behind those of the layers; whether the rooms are other ones."""
        is_same = bool(self.rooms) and all(layer.keys is given for layer, given in zip(self._layers, self._given))
        if is_same and self._stop < self.rooms[0][0].shape[1]:
            return False
        kept, window = self._layers[0].keys.shape[2], self._layers[0].sliding_window
        room = kept + min(window, max(LEAST_ROOM, kept))
        self.rooms = []
        for layer in self._layers:
            assert layer.keys.shape[2] == kept
            self.rooms.append((_with_room(layer.keys, room), _with_room(layer.values, room)))
        self._stop = kept
        return True

    def seen(self) -> tuple[int, int]:
        """Place of the first token that the next one sees, and how many these are, itself among them."""
        count = min(self._stop + 1, self._layers[0].sliding_window)
        return self._stop + 1 - count, count

    def finish(self) -> None:
        """Give the layers the next token, which the core has stored."""
        self._stop += 1
        first = max(0, self._stop - self._layers[0].sliding_window + 1)
        for layer, (keys, values) in zip(self._layers, self.rooms):
            layer.keys, layer.values = keys[None, :, first : self._stop], values[None, :, first : self._stop]
            layer.cumulative_length += 1
        self._given = [layer.keys for layer in self._layers]


def _with_room(stored: Tensor, room: int) -> Tensor:
    """A copy of keys or values [1, num_kv_heads, n, head_dim], [num_kv_heads, room, head_dim]."""
    copy = stored.new_empty(stored.shape[1], room, stored.shape[3])
    copy[:, : stored.shape[2]] = stored[0]
    return copy
