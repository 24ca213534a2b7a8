"""Models whose answers end at given tokens alone, or say a given text, whatever they would say."""

from collections.abc import Collection
from itertools import chain, repeat

import pytest
from torch import Tensor, device

from kvsift import LLM, Sampling
from kvsift.engine.sampling import Chooser
from kvsift.models.hf.generation_config import GenerationSettings


def set_ends(patch: pytest.MonkeyPatch, ends: Collection[int] = ()) -> None:
    """Let answers end at these tokens; by default they are as long as they may be."""
    kept = property(lambda settings: frozenset(ends), lambda settings, own: vars(settings).update(ends=own))
    patch.setattr(GenerationSettings, "ends", kept, raising=False)


class Dictated(Sampling):
    """Stands in for a Sampling: tokens that say a text, and then the token 5."""

    def __init__(self, llm: LLM, text: str) -> None:
        super().__init__()
        object.__setattr__(self, "ids", llm.tokenizer(text, add_special_tokens=False)["input_ids"])

    def chooser(self, device: device) -> Chooser:
        ids = chain(self.ids, repeat(5))  # type: ignore[attr-defined]

        class Dictating(Chooser):
            def __call__(self, logits: Tensor | int, given: int | None = None) -> int:
                return next(ids)

        return Dictating(self, device)
