"""Estimate of the host memory that a point of ``bench split`` takes."""

from __future__ import annotations

from typing import Any

import torch

from kvsift.engine.memory import GIB, RUNTIME_BYTES, SUMMARY_SHARE, available_bytes
from kvsift.errors import InputError
from kvsift.models.transformers_random import SHAPES
from kvsift.plan.placement import Placement

DTYPE = torch.bfloat16
FAISS_COPIES = 2  # of one layer's keys in float32, while an IVF index is built


def layer_bytes(sizes: dict[str, Any], context: int, place: Placement, kinds: tuple[str, ...]) -> float:
    """Return the bytes of one layer in host memory: keys, values, and the largest index of a kind."""
    head_dim, num_tokens = _head_dim(sizes), context * sizes["num_key_value_heads"]
    keys = num_tokens * head_dim * DTYPE.itemsize
    index = {"flat_int8": 0.5 * keys, "quest": 2 * SUMMARY_SHARE * keys}  # codes of a byte; summaries
    kv: float = 2 * keys
    if place.in_host_memory:
        kv = num_tokens * place.store.bytes_per_token(head_dim, DTYPE, **dict(place.knobs))
    return kv + max((index.get(kind, 0.0) for kind in kinds), default=0.0)


def shared_bytes(sizes: dict[str, Any], context: int, kinds: tuple[str, ...], degree: int) -> float:
    """Return the bytes of an index shared by all layers."""
    keys = context * sizes["num_key_value_heads"]
    graph, ivf = 4 * degree * keys, 4 * FAISS_COPIES * keys * _head_dim(sizes)
    return max(graph if "graph" in kinds else 0, ivf if "ivf" in kinds else 0)


def require_host_memory(
    shape: str, layers: int | None, context: int, place: Placement, kinds: tuple[str, ...], degree: int,
    available: int | None = None,
) -> None:  # fmt: skip
    """Refuse a context whose KV does not fit host memory.

    Raises:
        InputError: with the need, the available memory, and how many layers would fit.
    """
    sizes = SHAPES[shape]
    room = available_bytes(torch.device("cpu")) if available is None else available
    num_layers = sizes["num_hidden_layers"] if layers is None else layers
    of_layer, shared = layer_bytes(sizes, context, place, kinds), shared_bytes(sizes, context, kinds, degree)
    need = RUNTIME_BYTES + shared + num_layers * of_layer
    if room is None or need <= room:
        return
    fitting = int((room - RUNTIME_BYTES - shared) // of_layer)
    packed = "" if place.knob("host_values") == "int8" else "--host-values int8, "
    fewer = f"--layers {fitting}, " if fitting > 0 else ""
    raise InputError(
        f"{context:,} tokens of {shape} with {num_layers} layers take about {need / GIB:.1f} GiB of host memory, and "
        f"{room / GIB:.1f} GiB are available. Take {fewer}{packed}or a shorter context."
    )


def _head_dim(sizes: dict[str, Any]) -> int:
    return int(sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"])
