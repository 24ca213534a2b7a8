"""The contents of a cache of one sequence as tensors and numbers, and an empty cache filled with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from kvsift.errors import UnsupportedModel
from kvsift.models.hf.cache import SparseCache
from kvsift.models.hf.layer import SparseLayer
from kvsift.models.hf.state_snapshot import DummyLayer
from kvsift.types import LayerShape

NUMBERS = ("num_query_heads", "num_kv_heads", "head_dim", "scale", "softcap")  # of a layer's shape
LINEAR = "conv_kernel_size"  # number of a layer with states, one for each of them
STATES = "conv_states", "recurrent_states"  # of a linear layer, each several by their index
SUMMARY = "summary."  # then the kind and the page size: names of page summaries


def numbers_of(cache: SparseCache) -> list[dict[str, Any]]:
    """Return the numbers of every layer, ready for JSON.

    Raises:
        InputError: for a layer whose state is not known.
    """
    return [_numbers(index, layer) for index, layer in enumerate(cache.layers)]


def _numbers(index: int, layer: Any) -> dict[str, Any]:
    if isinstance(layer, SparseLayer) and layer.attention is not None:
        return {name: getattr(layer.attention.shape, name) for name in NUMBERS} | _kernel_sizes(layer)
    if type(layer) is DynamicSlidingWindowLayer and layer.is_initialized:
        return {"cumulative_length": layer.cumulative_length}
    if type(layer) is LinearAttentionLayer:
        return _kernel_sizes(layer)
    if type(layer) is DummyLayer:
        return {}
    raise UnsupportedModel(
        f"layer {index} of this model is a {type(layer).__name__}, whose state cannot be saved. Documents of models "
        "whose layers have full, sliding-window or linear attention can be."
    )


def _kernel_sizes(layer: Any) -> dict[str, Any]:
    """Return what ``LINEAR`` calls so of a layer with recurrent states."""
    return {LINEAR: list(layer.conv_kernel_size.values())} if isinstance(layer, LinearAttentionLayer) else {}


def tensors_of(cache: SparseCache) -> dict[str, Callable[[], Tensor]]:
    """Return functions that give the tensors of a cache, by name. Pages that are not consecutive are copied each time.

    Raises:
        InputError: if a layer has evicted tokens.
    """
    tensors: dict[str, Callable[[], Tensor]] = {}
    for index, layer in enumerate(cache.layers):
        for name, tensor in _tensors_of_layer(layer).items():
            tensors[f"layers.{index}.{name}"] = tensor
    return tensors


def _tensors_of_layer(layer: Any) -> dict[str, Callable[[], Tensor]]:
    tensors: dict[str, Callable[[], Tensor]] = {}
    if isinstance(layer, LinearAttentionLayer):
        states = ((name, index, state) for name in STATES for index, state in getattr(layer, name).items())
        tensors |= {f"{name}.{index}": state.detach for name, index, state in states if state is not None}
    if isinstance(layer, DynamicSlidingWindowLayer):
        tensors |= {"keys": lambda: layer.keys, "values": lambda: layer.values}
    if not isinstance(layer, SparseLayer):
        return tensors
    attention = layer.attention
    assert attention is not None
    tensors |= {"keys": lambda: attention.rows(0)[0], "values": lambda: attention.rows(0)[1]}
    for kind in attention.store.kinds:
        name = f"{SUMMARY}{kind}.{attention.store.page_size}"
        tensors[name] = partial(lambda kind: attention.summaries(0)[kind], kind)
    return tensors


def fill(
    cache: SparseCache, numbers: Sequence[Mapping[str, Any]], read: Callable[[int], Mapping[str, Tensor]],
    device: torch.device, dtype: torch.dtype, chunk_size: int,
) -> None:  # fmt: skip
    """Fill an empty cache.

    Args:
        cache: a cache of the model, under any plan with the same rule of prefill.
        numbers: numbers of every layer.
        read: returns the tensors of a layer, which are copied.
        device, dtype: those of the model.
        chunk_size: tokens that methods observe at once.
    """
    for index, layer in enumerate(cache.layers):
        tensors = read(index)
        if isinstance(layer, LinearAttentionLayer):
            _fill_linear(layer, numbers[index][LINEAR], tensors, device)
        if isinstance(layer, SparseLayer):
            shape = LayerShape(index, **{name: numbers[index][name] for name in NUMBERS})
            keys, values = tensors["keys"], tensors["values"]
            layer.restore(shape, keys, values, _summaries(tensors), device, dtype, chunk_size)
        if isinstance(layer, DynamicSlidingWindowLayer):
            keys, values = (tensors[name].to(device, copy=True) for name in ("keys", "values"))
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            layer.cumulative_length = numbers[index]["cumulative_length"]


def _fill_linear(
    layer: LinearAttentionLayer, kernel_sizes: Sequence[int | None], tensors: Mapping[str, Tensor],
    device: torch.device,
) -> None:  # fmt: skip
    for index, size in enumerate(kernel_sizes):
        conv, recurrent = (tensors.get(f"{name}.{index}") for name in STATES)
        if conv is not None:
            layer.lazy_initialization(conv_states=conv.to(device), state_idx=index, conv_kernel_size=size)
            layer.conv_states[index].copy_(conv)
        if recurrent is not None:
            layer.lazy_initialization(recurrent_states=recurrent.to(device), state_idx=index)
            layer.recurrent_states[index].copy_(recurrent)
        layer.has_previous_state[index] = conv is not None


def _summaries(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Return page summaries by page size and kind."""
    summaries: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, rows in tensors.items():
        if name.startswith(SUMMARY):
            kind, _, page_size = name.removeprefix(SUMMARY).rpartition(".")
            summaries[int(page_size)][kind] = rows
    return summaries
