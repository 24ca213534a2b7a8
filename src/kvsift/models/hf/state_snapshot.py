"""A snapshot of the layers of a cache that keep no pages: windows of sliding layers, states of linear ones.

Keys of a position stay as they are, so that pages can be shared at any length. A window or a recurrent state is that of
one length alone: whoever begins with the pages of so many tokens begins with the snapshot of that length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import LinearAttentionLayer

from kvsift.models.hf.layer import SparseLayer

DummyLayer: Any = getattr(cache_utils, "DummyLayer", type(None))  # keeps nothing; older versions have none
HOST = torch.device("cpu")
LINEAR = {*vars(LinearAttentionLayer())} - {"device", "dtype", "record_past"}  # attributes that are its state


@dataclass(frozen=True, eq=False)
class StateSnapshot:
    """What the layers without pages keep of the first tokens of a sequence.

    Attributes:
        length: number of these tokens.
        layers: attributes of each such layer, by its index; tensors are copies in host memory.
        device: device of the layers.
    """

    length: int
    layers: Mapping[int, Mapping[str, Any]]
    device: torch.device

    @classmethod
    def of(cls, layers: Sequence[Any], length: int, device: torch.device) -> StateSnapshot:
        """The snapshot of the layers of a cache, which have stored so many tokens."""
        states = {
            index: _copied({name: getattr(layer, name) for name in names}, HOST)
            for index, layer in enumerate(layers)
            if (names := state_names(layer))
        }
        return cls(length, states, device)

    def restore(self, layers: Sequence[Any]) -> None:
        """Let the layers of a cache of the same model continue from the snapshot."""
        for index, state in self.layers.items():
            vars(layers[index]).update(_copied(state, self.device))

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(tensor.nbytes for state in self.layers.values() for tensor in _tensors(state))


NO_TOKENS = StateSnapshot(0, {}, HOST)


def state_names(layer: Any) -> set[str]:
    """Return the attributes of a layer of a cache that belong to one length of the sequence; none of a layer that keeps
    nothing, or everything in pages."""
    if isinstance(layer, SparseLayer):
        return LINEAR if isinstance(layer, LinearAttentionLayer) else set()
    return set() if type(layer) is DummyLayer else {*vars(layer)}


def linear_states(layers: Sequence[Any]) -> list[Tensor]:
    """Return the states of a cache's linear layers."""
    linear = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
    return [*chain(*(_tensors({name: getattr(layer, name) for name in LINEAR}) for layer in linear))]


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, copy=True, memory_format=torch.contiguous_format)
    return {key: _copied(each, device) for key, each in value.items()} if isinstance(value, dict) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for each in value.values() if isinstance(value, dict) else ():
        yield from _tensors(each)
