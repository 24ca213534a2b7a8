"""A request: a prompt and everything that was asked for with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from kvsift.engine.sampling import Chooser, ConstrainedChooser, Sampling
from kvsift.models.hf.generation_config import GenerationSettings
from kvsift.plan.plan import Plan
from kvsift.tokenization.grammar import GrammarState
from kvsift.tokenization.text_offsets import TextOffsets

DENSE = Plan()


@dataclass(frozen=True)
class Request:
    """A prompt with its resolved options. It is made once, where the prompt comes from, and is never changed.

    Attributes:
        ids: tokens of the prompt.
        max_new_tokens: maximum number of tokens to generate, for which room is reserved.
        plan: what each query reads, as it runs on this machine.
        sampling: how to choose the tokens of the answer.
        ends: tokens of the model that end the text and are not part of it.
        stop_ids: tokens that the client has named, which end it likewise.
        stops: texts that end it likewise.
        skip_special_tokens: see ``TokenDecoder.left_out``.
        streamed: whether pieces of text are returned as they are generated.
        logprobs: number of likeliest tokens whose log-probabilities are kept besides the chosen one's; None: none are.
        deadline: time of ``perf_counter`` at which the answer ends as it is, finished or not.
        exact: the answer is to be that of dense decoding.
        offsets: where the tokens of the prompt stand in its text, if passages are wanted.
        settings: those of the model's generation_config.json that change its logits; None: nothing does.
        client: who asks: clients get equal shares.
        salt: requests of other salts share nothing with it.
        asked: the plan that was asked for, if ``plan`` is dense in contexts in which that one would not be.
        grammar: the beginning of the answer's grammar; None: any text is an answer.
    """

    ids: Sequence[int]
    max_new_tokens: int
    plan: Plan = DENSE
    sampling: Sampling = field(default_factory=Sampling)
    ends: Collection[int] = ()
    stop_ids: Collection[int] = ()
    stops: tuple[str, ...] = ()
    streamed: bool = False
    logprobs: int | None = None
    deadline: float | None = None
    exact: bool = False
    offsets: TextOffsets | None = None
    skip_special_tokens: bool | None = None
    settings: GenerationSettings | None = None
    client: str = ""
    salt: str = ""
    asked: Plan | None = None
    grammar: GrammarState | None = None

    def chooser(self, device: torch.device) -> Chooser | ConstrainedChooser:
        """Return what chooses the tokens of the answer from logits on a device."""
        settings = self.settings if self.settings is not None and self.settings.applied else None
        if settings is None and self.grammar is None and not self.sampling.changes_logits:
            return self.sampling.chooser(device)
        grammar = None if self.grammar is None else self.grammar.copy()
        return ConstrainedChooser(self.sampling, self.ids, self.max_new_tokens, device, settings, grammar)

    @cached_property
    def ending_tokens(self) -> frozenset[int]:
        """Tokens that end the text, whoever has named them."""
        return frozenset((*self.ends, *self.stop_ids))

    @property
    def length(self) -> int:
        """Final number of cached tokens; the last generated token is not fed."""
        return len(self.ids) + self.max_new_tokens - 1
