"""What kvsift puts on a transformers model, and takes off again."""

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

from kvsift.errors import InputError
from kvsift.models.transformers_cache import SparseBlock, SparseCache, SparseRun, take_layers
from kvsift.models.transformers_calls import WATCHED, Calls, Watched
from kvsift.models.transformers_foresight import Foresight
from kvsift.models.transformers_layer import NAME, SparseLayer, UnsupportedModel, attention_forward, mask_forward
from kvsift.models.transformers_origin import origin_of
from kvsift.models.transformers_pinning import RopePinning
from kvsift.models.transformers_rope import FAR, find_rope, turns
from kvsift.models.transformers_run import Run
from kvsift.models.transformers_unwrap import device_of_inputs, refuse_unsupported, unwrapped
from kvsift.runtime.plan import Plan
from kvsift.runtime.stats import RunStats
from kvsift.threads import yield_to_others
from kvsift.types import Rope

ATTACHING = RLock()  # one thread at a time changes a model


def register() -> None:
    """Make ``attn_implementation="kvsift"`` known to transformers; safe to repeat."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_forward)


class Adapter:
    """What kvsift has put on a model: attention and mask functions, a hook before forward, watched methods.

    It holds nothing of a conversation, so that threads may run several at once. A copy of the model has a copy of it,
    without the block.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.calls = Calls()
        self.stays = False  # a cache of ``make_cache`` needs it beyond the block it was made in
        self.rope: Rope | None = None  # by which every layer of ours is seen to rotate its keys
        self.no_rope = ""  # why that is not known
        self._block: SparseBlock | None = None
        self._foresight: Foresight | None = None
        self._pinning: RopePinning | None = None  # of a RoPE that depends on the length
        self._own = {name: model.__dict__[name] for name in WATCHED if name in model.__dict__}
        self._forward_names = list(signature(model.forward).parameters)
        self._handle: Any = None
        self._take_attention()

    @classmethod
    def attach(cls, model: Any) -> Adapter:
        """The adapter of a model, or of the model inside a wrapper, put there if need be.

        Raises:
            UnsupportedModel: naming the architecture and the reason.
        """
        model = unwrapped(model)
        with ATTACHING:
            existing: Adapter | None = model.__dict__.get("_kvsift")
            if existing is not None:
                if model.config._attn_implementation != NAME:  # set_attn_implementation was called since
                    existing._take_attention()
                return existing
            refuse_unsupported(model)
            register()
            adapter = cls(model)
            adapter._handle = model.register_forward_pre_hook(adapter._before_forward, with_kwargs=True)
            for name in WATCHED:
                if hasattr(model, name):
                    model.__dict__[name] = Watched(adapter, name)
            adapter._pinning = RopePinning.attach(model, adapter.sifts)
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
        if self._pinning is not None:
            self._pinning.detach()
        if self._foresight is not None:
            self._foresight.detach()
        for name in (*WATCHED, "_kvsift"):
            self.model.__dict__.pop(name, None)
        self.model.__dict__.update(self._own)
        self.model.set_attn_implementation(self._previous)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_block": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        register()  # in the process that the model was sent to

    @classmethod
    @contextmanager
    def block_of(cls, model: Any, run: SparseRun) -> Iterator[SparseBlock]:
        """Fresh caches of the model are kvsift's in this block, with the run's settings.

        Raises:
            UnsupportedModel: see ``attach``.
            InputError: if the model is in such a block, or the plan cannot run on it.
        """
        with ATTACHING:  # else the block of another thread could end in between
            adapter = cls.attach(model)
            if adapter._block is not None:
                raise InputError(
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
        """A cache of this run, for which an adapter stays on the model.

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
        """A cache of this run, which is told what it wants to know of the model.

        Raises:
            InputError: for a plan that needs to know more, or names layers that the model lacks.
        """
        run.origin = origin_of(self.model)
        model = ref(self.model)
        run.attention_in_use = lambda: "" if (found := model()) is None else str(found.config._attn_implementation)
        try:
            run.know_rope(self.rope, self.no_rope)
            return SparseCache(self.model.config, run)
        except BaseException:
            self._detach_if_unused()
            raise

    def _detach_if_unused(self) -> None:
        if self._block is None and not self.stays:
            self.detach()

    def own_method(self, name: str) -> Callable[..., Any]:
        """A method of the model as it is without the adapter."""
        method: Callable[..., Any] = self._own.get(name) or getattr(type(self.model), name).__get__(self.model)
        return method

    def sifts(self, cache: Cache) -> bool:
        """Whether the layers of a cache are ours, or would become so in a forward pass."""
        return self._block is not None or any(isinstance(layer, SparseLayer) for layer in cache.layers)

    def check_generate(self, kwargs: dict[str, Any]) -> None:
        """Refuse options of generate() that do not go with a block.

        Raises:
            InputError: saying what to leave out.
        """
        if self._block is not None and kwargs.get("cache_implementation") not in (None, "dynamic"):
            raise InputError(
                f"cache_implementation={kwargs['cache_implementation']!r} cannot hold kvsift's pages; leave it out."
            )

    def _take_attention(self) -> None:
        model = self.model
        self._previous = {"": model.config._attn_implementation} | {
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
                self._refuse_uncached(kwargs)
            cache = kwargs["past_key_values"] = self._with_layers(cache, self._block)
        layers = [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, SparseLayer)]
        if layers:
            self._check_call(kwargs)
            tokens = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
            if not tokens.is_cuda:
                yield_to_others(tokens.shape[1])
            layers[0].check_rows(len(tokens))
            if isinstance(mask := kwargs.get("attention_mask"), Tensor):
                layers[0].check_mask(mask)
            run = layers[0].run
            run.decode_tokens, run.hidden_below = self._decode_tokens(run, cache, tokens.shape[1], kwargs), None
            if run.foresees and self._foresight is None:
                with ATTACHING:
                    self._foresight = self._foresight or Foresight(self.model)
        if self._pinning is not None:
            self._pinning.begin(cache, layers, kwargs)
        return (), kwargs

    def _check_call(self, kwargs: dict[str, Any]) -> None:
        in_use = self.model.config._attn_implementation
        if in_use != NAME:
            raise InputError(
                f"the attention implementation of the model is now {in_use!r}; a cache of kvsift needs {NAME!r}. Call "
                "set_attn_implementation outside kvsift.sparse, or make the cache after it."
            )
        wanted = kwargs.get("output_attentions")
        if wanted or (wanted is None and getattr(self.model.config, "output_attentions", False)):
            raise InputError(
                "output_attentions=True asks for all attention weights, which kvsift never computes. Leave it out; "
                "kvsift.LLM and kvsift explain show what was attended."
            )
        if kwargs.get("cu_seq_lens_q") is not None:
            raise _packed("cu_seq_lens_q packs")

    def _refuse_uncached(self, kwargs: dict[str, Any]) -> None:
        if kwargs.get("use_cache") is False and self.calls.generate:
            raise InputError(
                "generate() runs without a cache here (use_cache=False), so every step would be a dense prefill of the "
                "whole sequence. Leave use_cache out."
            )
        positions = kwargs.get("position_ids")
        if positions is None or kwargs.get("attention_mask") is not None:
            return
        if positions.ndim == 3:  # of several axes: those of the text come first where there are four, else time does
            of_text, positions = len(positions) == 4, positions[0]
            starts_anew = (positions.diff(dim=1) != 1) if of_text else (positions.diff(dim=1) < 0)
        else:
            starts_anew = positions.diff(dim=-1) != 1
        if bool(starts_anew.any()):
            raise _packed("position_ids that start anew pack")

    def _with_layers(self, cache: Cache | None, block: SparseBlock) -> Cache:
        if cache is None:
            return SparseCache(self.model.config, block.open())
        if any(isinstance(layer, SparseLayer) for layer in cache.layers):
            return cache
        if type(cache) is not DynamicCache or cache.offloading:
            kind = f"{type(cache).__name__}{' with offloading' if cache.offloading else ''}"
            raise InputError(f"a {kind} cannot hold kvsift's pages; pass a plain DynamicCache, or no cache.")
        if cache.get_seq_length() > 0:
            raise InputError(
                "this cache was filled without kvsift. Start with an empty one, or with kvsift.make_cache(model, plan)."
            )
        run = block.open()
        if not cache.layers:  # made without a config: all layers alike, created on the go
            cache.layers, cache.layer_class_to_replicate = SparseCache(self.model.config, run).layers, None
        take_layers(cache, run, self.model.config)
        return cache

    def _decode_tokens(self, run: Run, cache: Any, num_new: int, kwargs: dict[str, Any]) -> int:
        """How many tokens at the end of this forward pass are generated ones (drafts to verify included)."""
        past, kept = cache.get_seq_length(), kwargs.get("logits_to_keep")
        # assisted decoding wants one logit more than there are drafts
        drafts = kept - 1 if isinstance(kept, int) and kept > 0 else None
        calls = self.calls
        if run.feeding is not None:
            return num_new if run.feeding == "decode" else 0
        if calls.prefill and (past == 0 or num_new > 1 or calls.chunked):
            return 0  # generate() going on from a filled cache with one new token is a step like any other
        if past == 0:
            return drafts or 0 if calls.generate else 0
        if num_new == 1:
            return 1
        if not calls.generate:
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
        ids = torch.zeros(1, 2, dtype=torch.long, device=device_of_inputs(self.model))
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with torch.no_grad():
                self.model(input_ids=ids, past_key_values=cache, use_cache=True)
                self._try_rope(ids[:, :1], cache)
        except InputError as error:
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


def _packed(what: str) -> InputError:
    return InputError(
        f"{what} several sequences into one row; kvsift would let them see each other. Pass one sequence per row."
    )
