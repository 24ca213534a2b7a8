"""Pinned rotation: one set of frequencies per cache for a RoPE that depends on the length (longrope, dynamic NTK).

transformers chooses the frequencies in every forward pass, by its largest position. A cache filled by several passes
can then hold keys of two rotations, whose products with a query are meaningless. Here the first pass over a cache
chooses the rotation by the final length of the sequence, as far as it is known, and every later pass uses it.

A rotation is identified by the least length that has it: 0 for the frequencies of short sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from kvsift.errors import UnsupportedCall
from kvsift.models.hf.layer import SparseLayer
from kvsift.models.hf.rope import RopeLimits, limits_of

MOST_ROTATIONS = 64  # of one module; dynamic NTK has one for every length


class CurrentPass(local):
    """Rotation of the current forward pass of this thread; None: chosen by transformers."""

    rotation: int | None = None

    def __reduce__(self) -> tuple[type[CurrentPass], tuple[()]]:
        return type(self), ()  # a copied or unpickled model is not in a pass


class PinnedRotary:
    """The forward function of a rotary embedding, with the frequencies of the current pass.

    The module changes its frequencies in every pass, so each rotation has a copy of the module.
    """

    def __init__(self, module: nn.Module, current: CurrentPass) -> None:
        self._module, self._current = module, current
        self._replaced = module.__dict__.get("forward")  # set by another library
        self._copies: dict[tuple[Any, ...], nn.Module] = {}
        module.__dict__["forward"] = self

    def detach(self) -> None:
        """Restore the module."""
        del self._module.__dict__["forward"]
        if self._replaced is not None:
            self._module.__dict__["forward"] = self._replaced

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        rotation, forward = self._current.rotation, type(self._module).forward
        if rotation is None:
            stock = self._replaced or forward.__get__(self._module)
            return stock(x, position_ids, *args, **kwargs)
        key = rotation, *args, *kwargs.values()  # a layer type, if the module has several
        module = self._copies.get(key)
        if module is None:
            module = self._copy(x, position_ids, rotation, *args, **kwargs)
            self._keep(key, module)
        # PhiMoE chooses a factor by the largest position inside its forward, so every call includes that position
        positions = torch.cat([position_ids, _last_position(position_ids, rotation)], -1)
        rotated = forward(module, x, positions, *args, **kwargs)
        if isinstance(rotated, Tensor):
            return rotated[..., :-1, :]
        return tuple(part[..., :-1, :] for part in rotated)

    @torch.inference_mode(False)  # or the copy's frequencies could not be used outside inference mode
    @torch.no_grad()
    def _copy(self, x: Tensor, position_ids: Tensor, rotation: int, *args: Any, **kwargs: Any) -> nn.Module:
        """Return a copy of the module with the fixed frequencies of a rotation."""
        module, forward = copy(self._module), type(self._module).forward
        del module.__dict__["forward"]
        module.__dict__["_buffers"] = {
            name: None if buffer is None else buffer.clone() for name, buffer in self._module._buffers.items()
        }
        for length in (0, rotation):  # length 0 resets the frequencies of longer sequences
            forward(module, x, _last_position(position_ids, length), *args, **kwargs)
        types = module.rope_type
        module.rope_type = dict.fromkeys(types, "default") if isinstance(types, dict) else "default"  # type: ignore
        return module

    def _keep(self, key: tuple[Any, ...], module: nn.Module) -> None:
        for oldest in list(self._copies)[: -MOST_ROTATIONS + 1]:
            self._copies.pop(oldest, None)
        self._copies[key] = module


def _last_position(position_ids: Tensor, length: int) -> Tensor:
    return position_ids.new_full((*position_ids.shape[:-1], 1), max(length - 1, 0))


class RopePinning:
    """Hooks and wrappers that keep the rotation of every cache of a model.

    Args:
        model: a model with ``limits``.
        limits: lengths beyond which its rotation changes.
        is_sparse: whether the layers of a cache are kvsift's, or will be.
    """

    def __init__(self, model: Any, limits: RopeLimits, is_sparse: Callable[[Any], bool]) -> None:
        self.limits, self._model, self._is_sparse = limits, model, is_sparse
        self._current = CurrentPass()
        self._rotaries = [PinnedRotary(module, self._current) for module in model.modules() if any(limits_of(module))]
        self._replaced: dict[str, Any] = {}
        self._watch("_prepare_cache_for_generation", self._announce)
        self._watch("prepare_inputs_for_generation", self._prepare_inputs)
        self._handle = model.register_forward_hook(self._end, always_call=True)

    @classmethod
    def attach(cls, model: Any, is_sparse: Callable[[Any], bool]) -> RopePinning | None:
        """Pin the rotations of a model; None if there is only one."""
        limits = RopeLimits.of(model)
        return None if limits is None else cls(model, limits, is_sparse)

    def detach(self) -> None:
        """Restore the model."""
        self._handle.remove()
        for rotary in self._rotaries:
            rotary.detach()
        for name, replaced in self._replaced.items():
            self._model.__dict__.pop(name)
            if replaced is not None:
                self._model.__dict__[name] = replaced

    def begin(self, cache: Any, layers: Sequence[SparseLayer], kwargs: dict[str, Any]) -> None:
        """Set the rotation of a forward pass over a cache with these layers of kvsift.

        Raises:
            InputError: if its tokens need another rotation than the cached ones.
        """
        if layers:
            self._current.rotation = self._rotation(cache, layers, kwargs)
        else:  # a captured step, or a cache without such layers
            self._current.rotation = getattr(cache, "rotation", None)

    def _end(self, *args: Any) -> None:
        self._current.rotation = None

    def _rotation(self, cache: Any, layers: Sequence[SparseLayer], kwargs: dict[str, Any]) -> int:
        tokens = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
        first, positions, announced = layers[0], kwargs.get("position_ids"), getattr(cache, "announced_length", 0)
        columns = first.columns + tokens.shape[1]
        length = columns if positions is None else int(positions.max()) + 1
        if first.rotation is None:
            final_length = length + max(announced - columns, 0)
            first.rotation = self.limits.least(max(final_length, first.run.reserve, *first.run.rows))
        kept = kwargs.get("logits_to_keep")
        drafts = kept - 1 if announced and isinstance(kept, int) and kept > 1 else 0
        # drafts of assisted decoding beyond the announced length are removed again
        self._check(first.rotation, first.columns, length - min(drafts, max(columns - announced, 0)))
        return first.rotation

    def _check(self, rotation: int, cached: int, length: int) -> None:
        if self.limits.least(length) > rotation:
            raise UnsupportedCall(
                f"this cache holds {cached} tokens whose keys are rotated for at most {self.limits.most(rotation)}, "
                f"and a sequence of {length} is rotated otherwise ({self.limits}). One cache cannot hold both. Start "
                f"again with an empty cache for the length of the conversation, with reserve={length} or more for "
                "kvsift.sparse or kvsift.make_cache, or generate fewer tokens."
            )

    def _announce(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int,
        max_cache_length: int, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Record the final length of the cache, which generate() announces."""
        result = self._stock("_prepare_cache_for_generation")(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, **kwargs
        )
        cache = model_kwargs.get("past_key_values")
        if isinstance(cache, Cache):
            cache.announced_length = max_cache_length
            layer = next((layer for layer in cache.layers if isinstance(layer, SparseLayer)), None)
            if layer is not None and layer.rotation is not None:
                self._check(layer.rotation, layer.columns, max_cache_length - layer.num_padding)
        return result

    def _prepare_inputs(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Keep the cache where the Phi models drop it: when a sequence grows beyond their original maximum, where keys
        of a short sequence are rotated differently. In a pinned cache they are not."""
        prepare, cache = self._stock("prepare_inputs_for_generation"), kwargs.get("past_key_values")
        inputs = prepare(input_ids, *args, **kwargs)
        if cache is None or inputs.get("past_key_values") is not None or not self._is_sparse(cache):
            return inputs
        return {**prepare(input_ids, *args, **{**kwargs, "past_key_values": None}), "past_key_values": cache}

    def _watch(self, name: str, method: Callable[..., Any]) -> None:
        if hasattr(self._model, name):  # a bare decoder cannot generate
            self._replaced[name] = self._model.__dict__.get(name)
            self._model.__dict__[name] = method

    def _stock(self, name: str) -> Callable[..., Any]:
        stock: Callable[..., Any] = self._replaced[name] or getattr(type(self._model), name).__get__(self._model)
        return stock
