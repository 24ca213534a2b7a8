"""The settings in a checkpoint's generation_config.json.

Those that change which token is the likeliest are applied to the logits by transformers' own processors, in the order
of ``generate()``; stop strings join the stops of a request. What the engine cannot do is named when the model is
loaded. How tokens are drawn (``do_sample``, ``temperature``, ``top_p``, ``top_k`` ...), and how many, is for the caller
to say.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from transformers import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

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
        config, made = self._config, LogitsProcessorList()
        asked = _asked(config, APPLIED)
        ends = torch.tensor(sorted(self.ends), device=device) if self.ends else None
        if "sequence_bias" in asked:
            made.append(SequenceBiasLogitsProcessor(config.sequence_bias))
        if "repetition_penalty" in asked:
            made.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
        if "no_repeat_ngram_size" in asked:
            made.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
        if "bad_words_ids" in asked:
            made.append(NoBadWordsLogitsProcessor(config.bad_words_ids, ends))
        if "min_length" in asked and ends is not None:
            made.append(MinLengthLogitsProcessor(config.min_length, ends, device=str(device)))
        if "min_new_tokens" in asked and ends is not None:
            least = config.min_new_tokens
            made.append(MinNewTokensLengthLogitsProcessor(prompt_length, least, ends, device=str(device)))
        if "forced_bos_token_id" in asked:
            made.append(ForcedBOSTokenLogitsProcessor(config.forced_bos_token_id))
        if "forced_eos_token_id" in asked:
            longest = prompt_length + max_new_tokens
            made.append(ForcedEOSTokenLogitsProcessor(longest, config.forced_eos_token_id, device=str(device)))
        if "remove_invalid_values" in asked:
            made.append(InfNanRemoveLogitsProcessor())
        if "exponential_decay_length_penalty" in asked and ends is not None:
            decay = config.exponential_decay_length_penalty
            made.append(ExponentialDecayLengthPenalty(decay, ends, prompt_length))
        if "suppress_tokens" in asked:
            made.append(SuppressTokensLogitsProcessor(config.suppress_tokens, device=str(device)))
        if "begin_suppress_tokens" in asked:
            has_bos = prompt_length > 1 or "forced_bos_token_id" not in asked
            begin = prompt_length if has_bos else prompt_length + 1
            made.append(SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin, device=str(device)))
        return made


def _asked(config: Any, fields: dict[str, tuple[object, ...]]) -> list[str]:
    """The fields that ask for something."""
    values = {name: getattr(config, name, None) for name in fields}
    return [name for name, value in values.items() if value is not None and value not in fields[name]]


def _named(config: Any, fields: dict[str, tuple[object, ...]]) -> str:
    """Return the fields that are set, with their values, in words; empty if there are none."""
    return ", ".join(f"{name}={getattr(config, name)!s:.40}" for name in _asked(config, fields))
