"""Methods of a model that each thread is running, which distinguish prompt tokens from generated ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import local
from typing import Any

import transformers
from torch import Tensor

from kvsift.errors import UnsupportedCall

WATCHED = "generate", "_prefill"
CHUNK_BUG_FIXED = (5, 21)  # until then, prefill_chunk_size on a filled cache prefills everything again


class Calls(local):
    """Methods of the model that this thread is running."""

    generate = prefill = False
    chunked = False  # the prompt comes in chunks

    def __reduce__(self) -> tuple[type[Calls], tuple[()]]:
        return Calls, ()  # a copy of the model runs none


class Watched:
    """A wrapper of a model's method that marks it as running in the ``Calls`` of the adapter."""

    def __init__(self, adapter: Any, name: str) -> None:
        self._adapter, self._name = adapter, name

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        own: Callable[..., Any] = self._adapter.own_method(self._name)
        return own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls, flag = self._adapter.calls, self._name.removeprefix("_")
        if flag == "generate":
            self._adapter.check_generate(kwargs)
        else:
            calls.chunked = _is_chunked(*args, **kwargs)
            _check_prompt(self._adapter, *args, **kwargs)
        outer = getattr(calls, flag)  # a model that drafts for itself calls generate() inside generate()
        setattr(calls, flag, True)
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            setattr(calls, flag, outer)


def _check_prompt(
    adapter: Any, input_ids: Tensor, generation_config: Any, model_kwargs: Mapping[str, Any],
    is_first_iteration: bool = True, **kwargs: Any,
) -> None:  # fmt: skip
    """Refuse a whole sequence that is no longer than a cache of ours: transformers would feed its end again.

    Raises:
        InputError: with both lengths.
    """
    cache, embeds = model_kwargs.get("past_key_values"), model_kwargs.get("inputs_embeds")
    past = 0 if cache is None else cache.get_seq_length()
    if past == 0 or not adapter.is_sparse(cache):
        return
    length = input_ids.shape[1]
    if embeds is not None and is_first_iteration:
        length = embeds.shape[1]
    else:
        mask = model_kwargs.get("attention_mask")
        if (getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]) != length:
            return  # new tokens alone
    if length <= past:
        raise UnsupportedCall(
            f"the cache holds {past} tokens and the prompt has {length}. Give the whole conversation, which begins "
            "with what is cached, or an empty cache: cache.reset()."
        )


def _is_chunked(
    input_ids: Tensor, generation_config: Any, model_kwargs: Mapping[str, Any], *args: Any, **kwargs: Any
) -> bool:
    """Whether generate() will prefill in chunks.

    Raises:
        InputError: if the installed version does that wrongly.
    """
    cache = model_kwargs.get("past_key_values")
    version = tuple(int(number) for number in transformers.__version__.split(".")[:2])
    is_chunked = bool(generation_config.prefill_chunk_size)
    if is_chunked and cache is not None and cache.get_seq_length() > 0 and version < CHUNK_BUG_FIXED:
        raise UnsupportedCall(
            f"transformers {transformers.__version__} prefills a filled cache again when prefill_chunk_size is "
            "set (fixed in 5.21). Leave prefill_chunk_size out for this turn, or upgrade."
        )
    return is_chunked
