"""What kvsift puts on a transformers model, and takes off again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel

from kvsift.errors import InputError
from kvsift.methods.base import Phase
from kvsift.models.transformers_cache import SparseCache, SparseRun, take_layers
from kvsift.models.transformers_foresight import Foresight
from kvsift.models.transformers_layer import SparseLayer, UnsupportedModel, attention_forward, mask_forward
from kvsift.models.transformers_rope import FAR, find_rope, turns
from kvsift.runtime.plan import Plan
from kvsift.runtime.stats import RunStats
from kvsift.threads import yield_to_others
from kvsift.types import Rope

NAME = "kvsift"
CHUNK_BUG_FIXED = (5, 21)  # until then, prefill_chunk_size on a filled cache prefills everything again


def register() -> None:
    """Make ``attn_implementation="kvsift"`` known to transformers; safe to repeat."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_forward)


class Adapter:
    """What kvsift has put on a model: attention and mask functions, a hook before forward, a watch on generate."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.run: SparseRun | None = None
        self.stays = False  # a cache of ``make_cache`` needs it beyond the block it was made in
        self.generating = self.prefilling = self.chunked = False
        self.feeding: Phase | None = None
        self.foresight: Foresight | None = None
        self._previous = {"": model.config._attn_implementation} | {
            key: config._attn_implementation
            for key in model.config.sub_configs
            if (config := getattr(model.config, key, None)) is not None
        }
        self._own = {name: model.__dict__[name] for name in ("generate", "_prefill") if name in model.__dict__}
        self._forward_names = list(signature(model.forward).parameters)
        self._handle: Any = None
        self.rope: Rope | None = None  # by which every layer of ours is seen to rotate its keys
        self.no_rope = ""  # why that is not known

    @classmethod
    def attach(cls, model: PreTrainedModel) -> Adapter:
        """The adapter of a model, put there if need be.

        Raises:
            UnsupportedModel: naming the architecture and the reason.
        """
        existing: Adapter | None = model.__dict__.get("_kvsift")
        if existing is not None:
            return existing
        _refuse_unsupported(model)
        adapter = cls(model)
        register()
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise UnsupportedModel(
                f"{type(model).__name__} does not use transformers' attention interface, so its attention cannot be "
                "replaced."
            )
        adapter._handle = model.register_forward_pre_hook(adapter._before_forward, with_kwargs=True)
        adapter._watch("generate", "generating")
        adapter._watch("_prefill", "prefilling")
        model.__dict__["_kvsift"] = adapter
        try:
            adapter._try_out()
        except BaseException:
            adapter.detach()
            raise
        return adapter

    def detach(self) -> None:
        """Leave the model as it was."""
        self._handle.remove()
        if self.foresight is not None:
            self.foresight.detach()
        for name in ("generate", "_prefill", "_kvsift"):
            self.model.__dict__.pop(name, None)
        self.model.__dict__.update(self._own)
        self.model.set_attn_implementation(self._previous)

    def _watch(self, method: str, flag: str) -> None:
        """Know when the model is inside one of its own methods: that tells prompt tokens from generated ones."""
        original: Callable[..., Any] | None = getattr(self.model, method, None)
        if original is None:
            return

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if method == "generate":
                self._refuse_generate(kwargs)
            else:
                self.chunked = _is_chunked(*args, **kwargs)
            outer = getattr(self, flag)  # a model that drafts for itself generates while it generates
            setattr(self, flag, True)
            try:
                return original(*args, **kwargs)
            finally:
                setattr(self, flag, outer)

        self.model.__dict__[method] = watched

    def _refuse_generate(self, kwargs: dict[str, Any]) -> None:
        if self.run is not None and kwargs.get("cache_implementation") not in (None, "dynamic"):
            raise InputError(
                f"cache_implementation={kwargs['cache_implementation']!r} cannot hold kvsift's pages; leave it out."
            )

    def _before_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        yield_to_others()
        kwargs |= dict(zip(self._forward_names, args))
        cache = kwargs.get("past_key_values")
        if self.run is not None:
            if cache is None:
                self._refuse_uncached(kwargs)
            cache = kwargs["past_key_values"] = self._with_layers(cache)
        layers = [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, SparseLayer)]
        if layers and isinstance(mask := kwargs.get("attention_mask"), Tensor):
            layers[0].check_mask(mask)
        for run in {layer.run for layer in layers}:
            run.decode_tokens = self._decode_tokens(cache, kwargs)
        self._foresee(any(layer.run.plan.wants_hidden and layer.run.decode_tokens for layer in layers))
        return (), kwargs

    def _foresee(self, wanted: bool) -> None:
        """Tell the layers of the coming forward pass what they would ask, if they want to know."""
        if wanted and self.foresight is None:
            self.foresight = Foresight(self.model)
        if self.foresight is not None:
            self.foresight.begin(wanted)

    def _refuse_uncached(self, kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids")
        if self.generating:
            raise InputError(
                "generate() runs without a cache here (use_cache=False), so every step would be a dense prefill of the "
                "whole sequence. Leave use_cache out."
            )
        if positions is None or kwargs.get("attention_mask") is not None or positions.ndim != 2:
            return
        if bool((positions.diff(dim=1) != 1).any()):
            raise InputError(
                "position_ids that start anew pack several sequences into one row; kvsift would let them see each "
                "other. Pass one sequence per row."
            )

    def _with_layers(self, cache: Cache | None) -> Cache:
        assert self.run is not None
        if cache is None:
            return SparseCache(self.model.config, self.run)
        if any(isinstance(layer, SparseLayer) for layer in cache.layers):
            return cache
        if type(cache) is not DynamicCache or cache.offloading:
            kind = f"{type(cache).__name__}{' with offloading' if cache.offloading else ''}"
            raise InputError(f"a {kind} cannot hold kvsift's pages; pass a plain DynamicCache, or no cache.")
        if cache.get_seq_length() > 0:
            raise InputError(
                "this cache was filled without kvsift. Start with an empty one, or with kvsift.make_cache(model, plan)."
            )
        if not cache.layers:  # made without a config: all layers alike, created on the go
            cache.layers, cache.layer_class_to_replicate = SparseCache(self.model.config, self.run).layers, None
        take_layers(cache, self.run)
        return cache

    def _decode_tokens(self, cache: Any, kwargs: dict[str, Any]) -> int:
        """How many tokens at the end of this forward pass are generated ones (drafts to verify included)."""
        tokens = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
        num_new, past, kept = tokens.shape[1], cache.get_seq_length(), kwargs.get("logits_to_keep")
        # assisted decoding wants one logit more than there are drafts
        drafts = kept - 1 if isinstance(kept, int) and kept > 0 else None
        if self.feeding is not None:
            return num_new if self.feeding == "decode" else 0
        if self.prefilling and (past == 0 or num_new > 1 or self.chunked):
            return 0  # generate() going on from a filled cache with one new token is a step like any other
        if past == 0:
            return drafts or 0 if self.generating else 0
        if num_new == 1:
            return 1
        if not self.generating:
            return 0
        if drafts is not None and drafts != num_new - 1:
            raise InputError(
                "transformers feeds the whole sequence again when assisted decoding or prompt lookup starts on a "
                "filled cache, and answers wrongly. Leave the drafts out for this turn, or start with an empty cache."
            )
        return num_new

    def _try_out(self) -> None:
        """One forward pass over two tokens, on a cache of its own: does every layer reach our attention?"""
        run = SparseRun(Plan(), RunStats())
        cache = SparseCache(self.model.config, run)
        name = type(self.model).__name__
        ours = [index for index, layer in enumerate(cache.layers) if isinstance(layer, SparseLayer)]
        if not ours:
            raise UnsupportedModel(f"{name} has no full-attention layer; there is nothing for kvsift to make sparse.")
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.model.get_input_embeddings().weight.device)
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with torch.no_grad():
                self.model(input_ids=ids, past_key_values=cache, use_cache=True)
                self._try_rope(ids[:, :1], cache)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{name} cannot run under kvsift: {error}") from None
        except Exception as error:
            raise UnsupportedModel(
                f"{name} cannot run under kvsift: a forward pass with its cache failed with {type(error).__name__}: "
                f"{error}"
            ) from error
        finally:
            for module in training:
                module.training = True
        # a layer that reads another layer's cache updates none of its own
        unused = [index for index in ours if cache.layers[index].attention is None and cache.layers[index].columns]
        if unused:
            raise UnsupportedModel(
                f"{name} cannot run under kvsift: layers {unused} did not use the attention interface."
            )

    def _try_rope(self, ids: Tensor, near: SparseCache) -> None:
        """Find out how keys are rotated: those of one token in two places, which sees itself alone in both.

        ``near`` holds it at position 0.
        """
        found = find_rope(self.model)
        if isinstance(found, str) or "position_ids" not in self._forward_names:
            self.no_rope = found if isinstance(found, str) else "its forward takes no position_ids"
            return
        far = SparseCache(self.model.config, SparseRun(Plan(), RunStats()))
        self.model(input_ids=ids, past_key_values=far, use_cache=True, position_ids=torch.full_like(ids, FAR))
        for index, (one, other) in enumerate(zip(near.layers, far.layers)):
            attentions = [getattr(layer, "attention", None) for layer in (one, other)]
            if None in attentions:
                continue
            here, there = (attention.store.row(0).keys(0, 1) for attention in attentions)  # type: ignore[union-attr]
            if not turns(found, here, there):
                self.no_rope = f"its layer {index} rotates otherwise than its rotary embedding says, or not at all"
                return
        self.rope = found


def _is_chunked(
    input_ids: Tensor, generation_config: Any, model_kwargs: Mapping[str, Any], *args: Any, **kwargs: Any
) -> bool:
    """Whether generate() will prefill in chunks.

    Raises:
        InputError: if the version at hand gets that wrong.
    """
    cache = model_kwargs.get("past_key_values")
    version = tuple(int(number) for number in transformers.__version__.split(".")[:2])
    is_chunked = bool(generation_config.prefill_chunk_size)
    if is_chunked and cache is not None and cache.get_seq_length() > 0 and version < CHUNK_BUG_FIXED:
        raise InputError(
            f"transformers {transformers.__version__} prefills a filled cache again when prefill_chunk_size is "
            "set (fixed in 5.21). Leave prefill_chunk_size out for this turn, or upgrade."
        )
    return is_chunked


def _refuse_unsupported(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; kvsift runs decoders with causal self-attention.")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModel(
            f"{name} caches a latent instead of keys (multi-head latent attention); kvsift needs keys and values."
        )
