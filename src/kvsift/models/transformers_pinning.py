"""RoPE whose frequencies depend on the length of the sequence (longrope, dynamic NTK): one rotation per cache.

transformers chooses the frequencies anew in every forward pass, by its largest position. A cache filled by several
passes can then hold keys of two rotations, whose products with a query mean nothing. Here the first pass over a cache
decides, by the length that the sequence will reach as far as that is known, and every later pass rotates alike.

Rotations are told apart by the least length that has them: 0 for the frequencies of short sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from kvsift.errors import InputError
from kvsift.models.transformers_layer import SparseLayer

MOST_ROTATIONS = 64  # of one module; dynamic NTK has one for every length


@dataclass(frozen=True)
class RopeLimits:
    """Original maximum lengths, beyond which a model rotates otherwise.

    Attributes:
        longrope: two sets of frequencies, up to such a length and beyond.
        dynamic: frequencies of their own for every length beyond such a one.
    """

    longrope: tuple[int, ...] = ()
    dynamic: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> RopeLimits | None:
        """Those of a model; None if its frequencies never change."""
        limits = {limit for module in model.modules() for limit in _limits(module)}
        if not limits:
            return None
        of_kind = (tuple(sorted(limit for kind, limit in limits if kind == name)) for name in ("longrope", "dynamic"))
        return cls(*of_kind)

    def least(self, length: int) -> int:
        """The least length that is rotated as this one; a cache made for a longer one has the greater number."""
        dynamic = length if any(length > limit for limit in self.dynamic) else 0
        return max([dynamic, *(limit + 1 for limit in self.longrope if length > limit)])

    def most(self, least: int) -> int:
        """The greatest length that is rotated as ``least``, or will do with its frequencies."""
        if any(least > limit for limit in self.dynamic):
            return least
        return min((limit for limit in self.longrope + self.dynamic if limit >= least), default=least)

    def stepped(self, length: int) -> int:
        """For dynamic NTK, the next multiple of the original maximum: lengths that differ by a question share it."""
        step = next((limit for limit in self.dynamic if length > limit), 1)
        return -(-length // step) * step

    def __str__(self) -> str:
        kinds = [f"longrope, original maximum {limit}" for limit in self.longrope]
        return "; ".join(kinds + [f"dynamic NTK, original maximum {limit}" for limit in self.dynamic])


def _limits(module: nn.Module) -> Iterator[tuple[str, int]]:
    types = getattr(module, "rope_type", None)
    for layer_type, kind in (types if isinstance(types, dict) else {None: types}).items():
        if kind == "longrope":
            parameters: Any = module.config.rope_parameters  # type: ignore[union-attr]
            own = parameters if layer_type is None else parameters[layer_type]
            yield "longrope", int(own["original_max_position_embeddings"])
        elif isinstance(kind, str) and "dynamic" in kind:
            yield "dynamic", int(module.original_max_seq_len)  # type: ignore[arg-type]


class CurrentPass(local):
    """The rotation of the forward pass that this thread is in; None leaves the choice to transformers."""

    rotation: int | None = None

    def __reduce__(self) -> tuple[type[CurrentPass], tuple[()]]:
        return type(self), ()  # a copied or unpickled model is in no pass


class PinnedRotary:
    """The forward function of a rotary embedding, with the frequencies of the current pass.

    The module itself changes with every pass that it serves, so each rotation is computed by a copy of it.
    """

    def __init__(self, module: nn.Module, current: CurrentPass) -> None:
        self._module, self._current = module, current
        self._replaced = module.__dict__.get("forward")  # put there by another library
        self._copies: dict[tuple[Any, ...], nn.Module] = {}
        module.__dict__["forward"] = self

    def detach(self) -> None:
        """Leave the module as it was."""
        del self._module.__dict__["forward"]
        if self._replaced is not None:
            self._module.__dict__["forward"] = self._replaced

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        rotation, forward = self._current.rotation, type(self._module).forward
        if rotation is None:
            stock = self._replaced or forward.__get__(self._module)
            return stock(x, position_ids, *args, **kwargs)
        key = rotation, *args, *kwargs.values()  # a layer type, where a module serves several
        module = self._copies.get(key)
        if module is None:
            module = self._copy(x, position_ids, rotation, *args, **kwargs)
            self._keep(key, module)
        # PhiMoE chooses a factor by the largest position inside its forward, so that has to be there each time
        reaching = torch.cat([position_ids, _last_position(position_ids, rotation)], -1)
        rotated = forward(module, x, reaching, *args, **kwargs)
        if isinstance(rotated, Tensor):
            return rotated[..., :-1, :]
        return tuple(part[..., :-1, :] for part in rotated)

    @torch.inference_mode(False)  # or the copy's frequencies would be of no use outside inference mode
    @torch.no_grad()
    def _copy(self, x: Tensor, position_ids: Tensor, rotation: int, *args: Any, **kwargs: Any) -> nn.Module:
        """The module with the frequencies of a rotation, which it keeps."""
        module, forward = copy(self._module), type(self._module).forward
        del module.__dict__["forward"]
        module.__dict__["_buffers"] = {
            name: None if buffer is None else buffer.clone() for name, buffer in self._module._buffers.items()
        }
        for length in (0, rotation):  # the first takes back what longer sequences have left
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
    """What keeps a model from changing the rotation of a cache: see the head of this file.

    Args:
        model: one that has ``limits``.
        limits: beyond which it rotates otherwise.
        sifts: whether kvsift holds, or would hold, what a cache is given.
    """

    def __init__(self, model: Any, limits: RopeLimits, sifts: Callable[[Any], bool]) -> None:
        self.limits, self._model, self._sifts = limits, model, sifts
        self._current = CurrentPass()
        self._rotaries = [PinnedRotary(module, self._current) for module in model.modules() if any(_limits(module))]
        self._replaced: dict[str, Any] = {}
        self._watch("_prepare_cache_for_generation", self._announce)
        self._watch("prepare_inputs_for_generation", self._prepare_inputs)
        self._handle = model.register_forward_hook(self._end, always_call=True)

    @classmethod
    def attach(cls, model: Any, sifts: Callable[[Any], bool]) -> RopePinning | None:
        """Pin the rotations of a model; None if there is only one."""
        limits = RopeLimits.of(model)
        return None if limits is None else cls(model, limits, sifts)

    def detach(self) -> None:
        """Leave the model as it was."""
        self._handle.remove()
        for rotary in self._rotaries:
            rotary.detach()
        for name, replaced in self._replaced.items():
            self._model.__dict__.pop(name)
            if replaced is not None:
                self._model.__dict__[name] = replaced

    def begin(self, cache: Any, layers: Sequence[SparseLayer], kwargs: dict[str, Any]) -> None:
        """A forward pass begins, over a cache with these layers of ours.

        Raises:
            InputError: if its tokens would need another rotation than the cache has.
        """
        if layers:
            self._current.rotation = self._rotation(cache, layers, kwargs)
        else:  # a captured step, or a cache that is not ours
            self._current.rotation = getattr(cache, "rotation", None)

    def _end(self, *args: Any) -> None:
        self._current.rotation = None

    def _rotation(self, cache: Any, layers: Sequence[SparseLayer], kwargs: dict[str, Any]) -> int:
        tokens = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
        first, positions, announced = layers[0], kwargs.get("position_ids"), getattr(cache, "announced_length", 0)
        columns = first.columns + tokens.shape[1]
        length = columns if positions is None else int(positions.max()) + 1
        if first.rotation is None:
            length_to_be = length + max(announced - columns, 0)
            first.rotation = self.limits.least(max(length_to_be, first.run.reserve, *first.run.rows))
        kept = kwargs.get("logits_to_keep")
        drafts = kept - 1 if announced and isinstance(kept, int) and kept > 1 else 0
        # drafts of assisted decoding beyond the end that generate() announced are dropped again
        self._check(first.rotation, first.columns, length - min(drafts, max(columns - announced, 0)))
        return first.rotation

    def _check(self, rotation: int, cached: int, length: int) -> None:
        if self.limits.least(length) > rotation:
            raise InputError(
                f"this cache holds {cached} tokens whose keys are rotated for at most {self.limits.most(rotation)}, "
                f"and a sequence of {length} is rotated otherwise ({self.limits}). One cache cannot hold both. Start "
                f"again with an empty cache and say how long the conversation will be, with reserve={length} or more "
                "for kvsift.sparse or kvsift.make_cache, or generate fewer tokens."
            )

    def _announce(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int,
        max_cache_length: int, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """generate() says how many tokens its cache will hold in the end."""
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
        """The Phi models drop a cache that is shorter than their original maximum when the sequence is longer: keys of
        short sequences are of no use then. In a pinned cache they are."""
        prepare, cache = self._stock("prepare_inputs_for_generation"), kwargs.get("past_key_values")
        inputs = prepare(input_ids, *args, **kwargs)
        if cache is None or inputs.get("past_key_values") is not None or not self._sifts(cache):
            return inputs
        return {**prepare(input_ids, *args, **{**kwargs, "past_key_values": None}), "past_key_values": cache}

    def _watch(self, name: str, method: Callable[..., Any]) -> None:
        if hasattr(self._model, name):  # a bare decoder cannot generate
            self._replaced[name] = self._model.__dict__.get(name)
            self._model.__dict__[name] = method

    def _stock(self, name: str) -> Callable[..., Any]:
        stock: Callable[..., Any] = self._replaced[name] or getattr(type(self._model), name).__get__(self._model)
        return stock
