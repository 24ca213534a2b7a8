"""What sequences that decode together keep in layers without pages: windows of tokens, states of linear attention.

A sequence's own cache has them in layers of transformers. While the sequence has a slot they are here, at addresses
that do not change, so that a CUDA graph can be captured over them: ``load`` brings them, ``save`` returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from kvsift.layer.paged_decode import DecodeBatch
from kvsift.layer.window_ring import RingPlaces, WindowRing
from kvsift.models.hf.attention import AttendingLayer
from kvsift.models.hf.layer import SparseLayer
from kvsift.models.hf.state_snapshot import DummyLayer
from kvsift.types import LayerShape

KEPT_STEPS = 3  # that may be forgotten: those that are launched ahead, and the last one read, which may be taken again
PLACES = KEPT_STEPS + 1  # of states: after the last step, and before each of these


class WindowLayer(AttendingLayer):
    """A layer that appends one token per sequence to its ring and attends the window."""

    is_sliding = True

    def __init__(self, layer: int, ring: WindowRing, places: RingPlaces, batch: DecodeBatch) -> None:
        super().__init__(layer)
        self._ring, self._places, self._batch = ring, places, batch

    def attend(self, shape: LayerShape, queries: Tensor, mask: Tensor | None, sink_logit: Tensor | None) -> Tensor:
        keys, values = (tokens[:, :, 0] for tokens in self.taken())
        self._ring.append(keys, values, self._places)
        self._shape = shape
        return self._attended(queries, sink_logit)

    def attend_again(self, queries: Tensor) -> Tensor:
        return self._attended(queries)

    def _attended(self, queries: Tensor, sink_logit: Tensor | None = None) -> Tensor:
        queries, shape = queries[:, :, 0].contiguous(), self._shape
        return self._ring.attend(shape, queries, self._places, self._batch, sink_logit).unsqueeze(2)


class LinearStates:
    """States of one linear-attention, Mamba or convolution layer for sequences in slots.

    Attributes:
        rings: the states at ``PLACES`` places, [places, slots, ...] each.
        layer: a layer of transformers whose rows are the slots, with the states at the first place.
    """

    def __init__(self, like: LinearAttentionLayer, num_slots: int) -> None:
        self.rings = [state.new_zeros(PLACES, num_slots, *state.shape[1:]) for state in _states(like)]
        rings = iter(self.rings)
        self.layer = _mapped(like, lambda state: next(rings)[0])

    def first(self, num_slots: int) -> LinearStates:
        """Return the first slots, in the same memory."""
        part = copy(self)
        part.layer = _mapped(self.layer, lambda state: state[:num_slots])
        part.rings = [ring[:, :num_slots] for ring in self.rings]
        return part

    def keep(self, place: Tensor) -> None:
        """Copy the states at the first place to another one, int64 [1], counted from the second on."""
        for ring in self.rings:
            ring[1:].index_copy_(0, place, ring[:1])

    def load(self, slot: int, layer: Any) -> None:
        for ring, own in zip(self.rings, _states(layer), strict=True):
            ring[0, slot] = own[0]

    def save(self, slot: int, layer: Any, place: int) -> None:
        """Return the states of a slot to a sequence, from a place."""
        for ring, own in zip(self.rings, _states(layer), strict=True):
            own[0] = ring[place, slot]


class SlotStates:
    """Windows and states of all layers without pages.

    Args:
        layers: layers of a cache that has attended a token, or was made by ``empty_states``.
        num_slots: sequences side by side.
        written: steps write the states of linear layers to the next place (``rings``). Otherwise states are changed
            where they are (``layers``), and copied before.

    Attributes:
        step: int64 [1], steps since sequences took their slots, this one included; on the device of linear layers.
    """

    step: Tensor

    def __init__(self, layers: Sequence[Any], num_slots: int, written: bool = False) -> None:
        self.num_slots, self._written = num_slots, written
        others = list(other_layers(layers).items())
        self._dummies = {index: layer for index, layer in others if type(layer) is DummyLayer}
        self._linear = {i: LinearStates(each, num_slots) for i, each in others if type(each) is LinearAttentionLayer}
        self._rings = {
            index: WindowRing(layer.sliding_window, num_slots, KEPT_STEPS, layer.keys, layer.values.shape[3])
            for index, layer in others
            if type(layer) is DynamicSlidingWindowLayer
        }
        assert len(self._dummies) + len(self._linear) + len(self._rings) == len(others), "no step takes other layers"
        self._lengths = [0] * num_slots  # of the sequences, when they took their slots
        self._steps = 0  # since then
        rings = [ring for each in self._linear.values() for ring in each.rings]
        self.step = torch.zeros(1, dtype=torch.int64, device=rings[0].device if rings else None)

    def first(self, num_slots: int) -> SlotStates:
        """Return the first slots, in the same memory: sequences are either in these or in those."""
        part = copy(self)
        part.num_slots = num_slots
        part._linear = {index: states.first(num_slots) for index, states in self._linear.items()}
        part._rings = {index: ring.first(num_slots) for index, ring in self._rings.items()}
        part._lengths = [0] * num_slots
        return part

    def begin(self) -> None:
        """Count steps from now on: sequences take their slots."""
        self._steps = 0
        self.step.zero_()

    def load(self, slot: int, layers: Sequence[Any], length: int) -> None:
        """Bring what the layers of a sequence's cache keep of its ``length`` tokens into a slot."""
        self._lengths[slot] = length
        for index, states in self._linear.items():
            states.load(slot, layers[index])
        for index, ring in self._rings.items():
            ring.load(slot, layers[index].keys[0], layers[index].values[0], length)

    def save(self, slot: int, layers: Sequence[Any], length: int) -> None:
        """Return what a slot keeps to the layers of its sequence's cache, which has ``length`` tokens now: as many as
        after the last step, or up to ``KEPT_STEPS`` fewer."""
        steps = length - self._lengths[slot]
        assert 0 <= self._steps - steps <= KEPT_STEPS, "steps that are longer ago are not kept"
        place = steps % PLACES
        if not self._written:
            place = 0 if steps == self._steps else 1 + steps % KEPT_STEPS
        for index, states in self._linear.items():
            states.save(slot, layers[index], place)
        for index, ring in self._rings.items():
            layer = layers[index]
            layer.keys, layer.values = (tokens.unsqueeze(0) for tokens in ring.last(slot, length))
            layer.cumulative_length = length

    def launch(self) -> None:
        """Note that a step is launched."""
        self._steps += 1

    def keep(self) -> None:
        """Keep the states before a step, and count it; on the device."""
        if not self._linear:
            return
        if not self._written:
            place = self.step % KEPT_STEPS
            for states in self._linear.values():
                states.keep(place)
        self.step += 1

    def rings(self, index: int) -> Sequence[Tensor]:
        """Return what a linear layer keeps at all places, [places, slots, ...] each. A step reads place
        ``(step - 1) % PLACES`` and writes ``step % PLACES``."""
        return self._linear[index].rings

    def layers(self, batch: DecodeBatch) -> dict[int, Any]:
        """Return the layers of transformers for a step of a batch, whose lengths count the new tokens."""
        windows = {index: WindowLayer(index, *window, batch) for index, window in self.windows(batch).items()}
        return self._dummies | {index: states.layer for index, states in self._linear.items()} | windows

    def windows(self, batch: DecodeBatch) -> dict[int, tuple[WindowRing, RingPlaces]]:
        """Return the ring of each layer with a window, and its places in a step of a batch, by index of the layer."""
        places: dict[tuple[int, ...], RingPlaces] = {}
        for ring in self._rings.values():
            key = ring.window, ring.num_kv_heads
            if key not in places:
                places[key] = ring.places(batch.lengths)
        return {index: (ring, places[ring.window, ring.num_kv_heads]) for index, ring in self._rings.items()}


def not_taken(layers: Sequence[Any]) -> str:
    """Return the names of the kinds of layers that have no place in slots, "" if there are none."""
    taken = SparseLayer, DummyLayer, LinearAttentionLayer, DynamicSlidingWindowLayer
    return ", ".join(sorted({type(layer).__name__ for layer in layers} - {kind.__name__ for kind in taken}))


def empty_states(layers: Sequence[Any]) -> dict[int, Any]:
    """Return layers of no sequence, like those without pages in a cache that has attended a token."""
    others = other_layers(layers)
    return {i: _mapped(layer, lambda tensor: tensor.new_empty(0, *tensor.shape[1:])) for i, layer in others.items()}


def other_layers(layers: Sequence[Any]) -> dict[int, Any]:
    """Return the layers that are not kvsift's, by index."""
    return {index: layer for index, layer in enumerate(layers) if not isinstance(layer, SparseLayer)}


def _mapped(layer: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a layer with other tensors."""
    changed = copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, Tensor) and value.ndim > 1:
            setattr(changed, name, change(value))
        elif isinstance(value, Mapping):
            setattr(changed, name, {k: change(each) if isinstance(each, Tensor) else each for k, each in value.items()})
    return changed


def _states(layer: Any) -> Iterator[Tensor]:
    """The tensors of a linear layer, in an order that is the same for all layers of a kind."""
    for value in vars(layer).values():
        several = value.values() if isinstance(value, Mapping) else [value]
        yield from (each for each in several if isinstance(each, Tensor))
