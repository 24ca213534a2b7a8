"""The adapter of a transformers model: kvsift's attention, hooks and methods on it, which ``detach`` removes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from threading import RLock
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel

from kvsift.errors import Unavailable, UnsupportedCall, UnsupportedModel
from kvsift.models.hf.attention import NAME, attention_forward, mask_forward
from kvsift.models.hf.cache import SparseBlock, SparseCache, take_layers
from kvsift.models.hf.calls import WATCHED, Calls, Watched
from kvsift.models.hf.foresight import Foresight
from kvsift.models.hf.inputs import check_call, check_intact, check_uncached, count_decode_tokens, no_weights
from kvsift.models.hf.layer import SparseLayer
from kvsift.models.hf.pinning import RopePinning
from kvsift.models.hf.run import SparseRun
from kvsift.models.hf.trial import try_model
from kvsift.models.hf.unwrap import refuse_unsupported, unwrapped
from kvsift.models.packed_linear import PackedEmbedding
from kvsift.threads import yield_to_others
from kvsift.types import Origin, Rope

ATTACHING = RLock()  # of the thread that changes a model


def register() -> None:
    """Make ``attn_implementation="kvsift"`` known to transformers; safe to repeat."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_forward)


class Adapter:
    """Additions to a model: attention and mask functions, a hook before forward, and wrappers of methods.

    It has no state of a conversation, so threads may run several at once. A copy of the model has a copy of the
    adapter, without its block.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.calls = Calls()
        self.stays = False  # a cache of ``make_cache`` needs the adapter after the current block
        self.rope: Rope | None = None  # by which all of kvsift's layers rotate their keys, if known
        self.no_rope = ""  # why it is not known
        self._block: SparseBlock | None = None
        self._foresight: Foresight | None = None
        self._pinning: RopePinning | None = None  # for a RoPE that depends on the length
        self._own = {name: model.__dict__[name] for name in WATCHED if name in model.__dict__}
        self._forward_names = list(signature(model.forward).parameters)
        self._handle: Any = None
        self._take_attention()

    @classmethod
    def attach(cls, model: Any) -> Adapter:
        """Return the adapter of a model, or of the model inside a wrapper; attach one if there is none.

        Raises:
            UnsupportedModel: naming the architecture and the reason.
        """
        model = unwrapped(model)
        with ATTACHING:
            existing: Adapter | None = model.__dict__.get("_kvsift")
            if existing is not None:
                if model.config._attn_implementation != NAME:  # set_attn_implementation was called after attach
                    existing._take_attention()
                return existing
            refuse_unsupported(model)
            register()
            adapter = cls(model)
            adapter._handle = model.register_forward_pre_hook(adapter._before_forward, with_kwargs=True)
            for name in WATCHED:
                if hasattr(model, name):
                    model.__dict__[name] = Watched(adapter, name)
            adapter._pinning = RopePinning.attach(model, adapter.is_sparse)
            model.__dict__["_kvsift"] = adapter
            try:
                rope = try_model(model, takes_positions="position_ids" in adapter._forward_names)
            except BaseException:
                adapter.detach()
                raise
            adapter.rope, adapter.no_rope = (None, rope) if isinstance(rope, str) else (rope, "")
            return adapter

    def detach(self) -> None:
        """Restore the model."""
        self._handle.remove()
        if self._pinning is not None:
            self._pinning.detach()
        if self._foresight is not None:
            self._foresight.detach()
        for name in (*WATCHED, "_kvsift"):
            self.model.__dict__.pop(name, None)
        self.model.__dict__.update(self._own)
        stock = self._stock_attention  # parts without a model of their own have none, and None cannot be set
        self.model.set_attn_implementation({key: name for key, name in stock.items() if name is not None})
        for key in (key for key, name in stock.items() if name is None):
            getattr(self.model.config, key)._attn_implementation = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_block": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        register()  # in the process that received the model

    @classmethod
    @contextmanager
    def block_of(cls, model: Any, run: SparseRun) -> Iterator[SparseBlock]:
        """Give every fresh cache of the model kvsift's layers in this block, with the run's settings.

        Raises:
            UnsupportedModel: see ``attach``.
            InputError: if the model is in such a block, or the plan cannot run on it.
        """
        with ATTACHING:  # or the block of another thread could end in between
            adapter = cls.attach(model)
            if adapter._block is not None:
                raise Unavailable(
                    "this model already runs under kvsift.sparse, here or in another thread. Leave that block before "
                    "entering another; threads that share a model share one block around all of them."
                )
            adapter._new_cache(run)  # refuses layers that the model lacks
            adapter._block = block = SparseBlock(run)
        try:
            yield block
        finally:
            with ATTACHING:
                adapter._block = None
                adapter._detach_if_unused()

    @classmethod
    def explicit(cls, model: Any, run: SparseRun) -> SparseCache:
        """Return a cache of this run; the adapter stays on the model.

        Raises:
            UnsupportedModel: see ``attach``.
            InputError: if the plan cannot run on the model.
        """
        with ATTACHING:
            adapter = cls.attach(model)
            cache = adapter._new_cache(run)
            adapter.stays = True
        return cache

    def _new_cache(self, run: SparseRun) -> SparseCache:
        """Return a cache of this run, with what the run needs of the model.

        Raises:
            InputError: for a plan that needs an unknown RoPE, or names layers that the model lacks.
        """
        run.origin = origin_of(self.model)
        model = ref(self.model)
        run.attention_in_use = lambda: "" if (alive := model()) is None else str(alive.config._attn_implementation)
        try:
            run.set_rope(self.rope, self.no_rope)
            return SparseCache(self.model.config, run)
        except BaseException:
            self._detach_if_unused()
            raise

    def _detach_if_unused(self) -> None:
        if self._block is None and not self.stays:
            self.detach()

    def own_method(self, name: str) -> Callable[..., Any]:
        """Return a method of the model without the adapter's wrapper."""
        method: Callable[..., Any] = self._own.get(name) or getattr(type(self.model), name).__get__(self.model)
        return method

    def is_sparse(self, cache: Cache) -> bool:
        """Whether the layers of a cache are kvsift's, or a forward pass would replace them by kvsift's."""
        return self._block is not None or any(isinstance(layer, SparseLayer) for layer in cache.layers)

    def check_generate(self, kwargs: dict[str, Any]) -> None:
        """Refuse options of generate() that kvsift's layers do not support, whether its caller gives them or the files
        of the model do.

        Raises:
            InputError: naming the option to leave out, or the setting of the model to change.
        """
        cache = kwargs.get("past_key_values")
        if self._block is None and (cache is None or not self.is_sparse(cache)):
            return
        implementation, where = self._option("cache_implementation", kwargs)
        if implementation not in (None, "dynamic", "hybrid"):  # generate() itself makes a dynamic one of a hybrid one
            raise UnsupportedCall(f"cache_implementation={implementation!r} cannot hold kvsift's pages; {where}.")
        use_cache, where = self._option("use_cache", kwargs)
        if use_cache is False:
            raise UnsupportedCall(
                "generate() runs without a cache here (use_cache=False), so every step would be a dense prefill of the "
                f"whole sequence; {where}."
            )
        attentions, where = self._option("output_attentions", kwargs)
        if attentions:
            raise no_weights(where)

    def _option(self, name: str, kwargs: dict[str, Any]) -> tuple[Any, str]:
        """The value of an option of generate(), and what its caller should do to be rid of it."""
        given = kwargs.get("generation_config")
        for value in (kwargs.get(name), getattr(given, name, None)):
            if value is not None:
                return value, "leave it out"
        value, default = getattr(self.model.generation_config, name, None), True if name == "use_cache" else None
        return value, (
            "the files of the model ask for it (generation_config.json, or config.json if there is none), so set "
            f"model.generation_config.{name} = {default}"
        )

    def _take_attention(self) -> None:
        model = self.model
        self._stock_attention = {"": model.config._attn_implementation} | {
            key: config._attn_implementation
            for key in model.config.sub_configs
            if (config := getattr(model.config, key, None)) is not None
        }
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise UnsupportedModel(
                f"{type(model).__name__} does not use transformers' attention interface, so its attention cannot be "
                "replaced."
            )

    @torch.compiler.disable
    def _before_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kwargs |= dict(zip(self._forward_names, args))
        cache = kwargs.get("past_key_values")
        if self._block is not None:
            if cache is None:
                check_uncached(kwargs, self.calls)
            cache = kwargs["past_key_values"] = self._with_layers(cache, self._block)
        layers = [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, SparseLayer)]
        if layers:
            check_call(self.model.config, kwargs)
            check_intact(layers)
            tokens = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
            if not tokens.is_cuda:
                yield_to_others(tokens.shape[1])
            layers[0].check_rows(len(tokens))
            if isinstance(mask := kwargs.get("attention_mask"), Tensor):
                layers[0].check_mask(mask)
            run = layers[0].run
            run.decode_tokens = count_decode_tokens(run, cache, tokens.shape[1], kwargs, self.calls)
            run.hidden_below = None
            if run.foresees and self._foresight is None:
                with ATTACHING:
                    self._foresight = self._foresight or Foresight(self.model)
        if self._pinning is not None:
            self._pinning.begin(cache, layers, kwargs)
        return (), kwargs

    def _with_layers(self, cache: Cache | None, block: SparseBlock) -> Cache:
        if cache is None:
            return SparseCache(self.model.config, block.open())
        if any(isinstance(layer, SparseLayer) for layer in cache.layers):
            return cache
        if type(cache) is not DynamicCache or cache.offloading:
            kind = f"{type(cache).__name__}{' with offloading' if cache.offloading else ''}"
            raise UnsupportedCall(f"a {kind} cannot hold kvsift's pages; pass a plain DynamicCache, or no cache.")
        if cache.get_seq_length() > 0:
            raise UnsupportedCall(
                "this cache was filled without kvsift. Start with an empty one, or with kvsift.make_cache(model, plan)."
            )
        run = block.open()
        if not cache.layers:  # made without a config: its layers are alike and created on demand
            cache.layers, cache.layer_class_to_replicate = SparseCache(self.model.config, run).layers, None
        take_layers(cache, run, self.model.config)
        return cache


def origin_of(model: Any) -> Origin | None:
    """Return the identity of a model, as files made for it store it; None without a token embedding."""
    embedding = model.get_input_embeddings()
    shape: tuple[int, ...]
    if isinstance(embedding, PackedEmbedding):
        weights, shape = embedding.sample(), embedding.matrix.shape
    elif isinstance(whole := getattr(embedding, "weight", None), Tensor):
        weights, shape = whole, tuple(whole.shape)
    else:
        return None
    config = model.config.get_text_config(decoder=True)
    every = {str(getattr(own, "num_attention_heads", "?")) for own in config.per_layer_config}  # one, as a rule
    heads, layers = " or ".join(sorted(every)), getattr(config, "num_hidden_layers", "?")
    return Origin(f"{type(model).__name__}, {layers} layers, {heads} heads, {shape} embeddings", weights)
