"""Options of generation: the same for one prompt, several prompts, and a question about a document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from kvsift.engine.sampling import Sampling
from kvsift.errors import InputError
from kvsift.models.transformers import PlanSpec

ProgressCallback = Callable[[int, int], None]  # tokens prefilled so far, tokens to prefill


class Options(TypedDict, total=False):
    """Keywords of ``LLM.generate``, ``LLM.stream`` and ``Document.ask``, for type checkers."""

    plan: PlanSpec
    max_new_tokens: int
    sampling: Sampling | Sequence[Sampling] | None
    stop: str | Sequence[str] | None


@dataclass(frozen=True)
class GenerateOptions:
    """How to generate after a prompt.

    Attributes:
        plan: how to sift; None: the default plan of the model or the document.
        max_new_tokens: maximum number of tokens to generate for each prompt.
        sampling: how to choose tokens, for all prompts or one for each; None: greedy.
        stop: text, or several texts, that end the answer and are not part of it.
    """

    plan: PlanSpec = None
    max_new_tokens: int = 64
    sampling: Sampling | Sequence[Sampling] | None = None
    stop: str | Sequence[str] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """All texts that end the answer."""
        return tuple(filter(None, (self.stop,) if isinstance(self.stop, str) else self.stop or ()))

    def split(self, num_prompts: int) -> list[GenerateOptions]:
        """The options of each prompt.

        Raises:
            InputError: if there are several samplings, but not one for each prompt.
        """
        if not isinstance(self.sampling, list | tuple):
            return [self] * num_prompts
        if len(self.sampling) != num_prompts:
            raise InputError(
                f"there are {len(self.sampling)} samplings for {num_prompts} prompts; give one for each, or one for "
                "all."
            )
        return [replace(self, sampling=sampling) for sampling in self.sampling]
