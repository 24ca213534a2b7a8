"""The settings in a checkpoint's generation_config.json.

Those that change which token is the likeliest are applied to the logits by transformers' own processors, as by
``generate()``; stop strings join the stops of a request. What the engine cannot do is named when the model is
loaded. How tokens are drawn (``do_sample``, ``temperature``, ``top_p``, ``top_k`` ...), and how many, is for the caller
to say.
"""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

from kvsift.errors import InvalidValue

FILE = "generation_config.json"
# fields, and values besides None that ask for nothing
APPLIED: dict[str, tuple[object, ...]] = {
    "sequence_bias": (),
    "repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "remove_invalid_values": (False,),
    "exponential_decay_length_penalty": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
}
IGNORED: dict[str, tuple[object, ...]] = {
    "guidance_scale": (1,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "constraints": (),
    "force_words_ids": (),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "token_healing": (False,),
    "max_time": (),
    "watermarking_config": (),
}


class GenerationSettings:
    """What a model's generation configuration asks for.

    Args:
        config: ``generation_config`` of the model.
        ends: tokens that end an answer.

    Attributes:
        applied: the settings that change logits, in words; empty if there are none.
        ignored: those that the engine cannot apply, likewise.
        ends: tokens that end an answer, as given.
        stops: texts that end one.

    Raises:
        InputError: for a value that transformers refuses.
    """

    def __init__(self, config: Any, ends: Collection[int]) -> None:
        self._config, self.ends = config, frozenset(ends)
        self.applied, self.ignored = _named(config, APPLIED), _named(config, IGNORED)
        stops = [config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings or ()
        if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
            raise InvalidValue(f"{FILE} of the model has stop_strings={stops!r:.80}, and they are a list of texts.")
        self.stops = tuple(filter(None, stops))
        try:
            self.processors(1, 1, torch.device("cpu"))
        except (TypeError, ValueError) as error:
            raise InvalidValue(f"{FILE} of the model cannot be applied ({self.applied}): {error}") from error

    def processors(self, prompt_length: int, max_new_tokens: int, device: torch.device) -> LogitsProcessorList:
        """The processors of one answer, as ``generate()`` makes them."""
        asked = {name: getattr(self._config, name) for name in _asked(self._config, APPLIED)}
        if not self.ends:
            asked.pop("exponential_decay_length_penalty", None)  # which raises the probability of an end
        config = GenerationConfig(**asked, max_length=prompt_length + max_new_tokens)
        config._eos_token_tensor = torch.tensor(sorted(self.ends), device=device) if self.ends else None
        return _Decoder()._get_logits_processor(config, prompt_length, device=str(device))


class _Decoder(GenerationMixin):
    """What ``generate()`` asks of a model before it makes processors."""

    config = SimpleNamespace(is_encoder_decoder=False)


def _asked(config: Any, fields: dict[str, tuple[object, ...]]) -> list[str]:
    """The fields that ask for something."""
    values = {name: getattr(config, name, None) for name in fields}
    return [name for name, value in values.items() if value is not None and value not in fields[name]]


def _named(config: Any, fields: dict[str, tuple[object, ...]]) -> str:
    """Return the fields that are set, with their values, in words; empty if there are none."""
    return ", ".join(f"{name}={getattr(config, name)!s:.40}" for name in _asked(config, fields))
