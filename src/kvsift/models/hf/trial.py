"""Trial forward passes over a model with a cache of kvsift's layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsift.errors import InputError, UnsupportedModel
from kvsift.layer.accounting import RunStats
from kvsift.models.hf.cache import SparseCache
from kvsift.models.hf.layer import SparseLayer
from kvsift.models.hf.rope import FAR, find_rope, rotates
from kvsift.models.hf.run import SparseRun
from kvsift.models.hf.unwrap import device_of_inputs
from kvsift.plan.plan import Plan
from kvsift.types import Rope


def try_model(model: PreTrainedModel, takes_positions: bool) -> Rope | str:
    """Feed two tokens and check that every layer reaches kvsift's attention.

    Args:
        model: a model with kvsift's attention.
        takes_positions: whether its forward takes position_ids.

    Returns:
        How all of kvsift's layers rotate their keys, or why that is not known.

    Raises:
        UnsupportedModel: if the model cannot run with kvsift's layers.
    """
    cache = _new_cache(model)
    name = type(model).__name__
    ours = [index for index, layer in enumerate(cache.layers) if isinstance(layer, SparseLayer)]
    if not ours:
        raise UnsupportedModel(f"{name} {_reason_without_layers(cache)}.")
    ids = torch.zeros(1, 2, dtype=torch.long, device=device_of_inputs(model))
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
            rope = _try_rope(model, ids[:, :1], cache) if takes_positions else "its forward takes no position_ids"
    except InputError as error:
        raise UnsupportedModel(f"{name} cannot run under kvsift: {error}") from None
    except Exception as error:
        raise UnsupportedModel(
            f"{name} cannot run under kvsift: a forward pass with its cache failed with {type(error).__name__}: {error}"
        ) from error
    finally:
        for module in training:
            module.training = True
    # a layer that attends another layer's cache updates none of its own
    unused = [index for index in ours if cache.layers[index].attention is None and cache.layers[index].columns]
    if unused:
        raise UnsupportedModel(f"{name} cannot run under kvsift: layers {unused} did not use the attention interface.")
    return rope


def _reason_without_layers(cache: SparseCache) -> str:
    """Why no layer of a cache is kvsift's."""
    windows = " (it attends through sliding windows)" if any(cache.is_sliding) else ""
    return f"has no full-attention layer{windows}; there is nothing for kvsift to make sparse"


def _try_rope(model: Any, ids: Tensor, at_zero: SparseCache) -> Rope | str:
    """Compare the keys of one token at two positions, which attends itself alone at both; ``at_zero`` has the first."""
    rope = find_rope(model)
    if isinstance(rope, str):
        return rope
    at_far = _new_cache(model)
    model(input_ids=ids, past_key_values=at_far, use_cache=True, position_ids=torch.full_like(ids, FAR))
    for index, layers in enumerate(zip(at_zero.layers, at_far.layers)):
        attentions = [getattr(layer, "attention", None) for layer in layers]
        if None in attentions:
            continue
        zero, far = (attention.store.reader(0).keys(0, 1) for attention in attentions)  # type: ignore[union-attr]
        if not rotates(rope, zero, far):
            return f"its layer {index} rotates otherwise than its rotary embedding says, or not at all"
    return rope


def _new_cache(model: Any) -> SparseCache:
    return SparseCache(model.config, SparseRun(Plan(), RunStats()))
