"""Options of generation: the same for one prompt, several prompts, and a question about a document."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, fields, replace
from math import inf
from sys import float_info
from typing import TypedDict

from kvsift.engine.sampling import Sampling
from kvsift.errors import Conflict, InvalidValue, UnknownName, unknown
from kvsift.methods import checks
from kvsift.models.hf.sparse import PlanSpec
from kvsift.tokenization.grammar import Grammar

MOST_LOGPROBS = 20  # as OpenAI's API has them

Stop = str | Sequence[str] | Set[str] | None
ProgressCallback = Callable[[int, int], None]  # tokens prefilled so far, tokens to prefill


class Options(TypedDict, total=False):
    """Keywords of ``LLM.generate``, ``LLM.stream``, ``Document.ask`` and ``Chat.ask``, for type checkers."""

    plan: PlanSpec
    max_new_tokens: int
    sampling: Sampling | Sequence[Sampling] | None
    stop: Stop
    stop_token_ids: Sequence[int] | None
    skip_special_tokens: bool | None
    logprobs: int | None
    timeout_s: float | None
    grammar: Grammar | None
    exact: bool
    passages: bool


@dataclass(frozen=True)
class GenerateOptions:
    """How to generate after a prompt.

    Attributes:
        plan: what each query reads; None: the default plan of the model or the document.
        max_new_tokens: maximum number of tokens to generate for each prompt.
        sampling: how to choose tokens, for all prompts or one for each; None: greedy.
        stop: text, or several texts, that end the answer and are not part of it; a special token that has one as its
            name, such as "<|im_end|>", ends it too.
        stop_token_ids: further tokens that end the answer and are not part of it.
        skip_special_tokens: True leaves all special tokens out of the text, False none; None those with a role of their
            own, which begin, end, separate or pad texts, so that others, such as "<|channel|>", are text.
        logprobs: keep the log-probability of every token, and those of so many likeliest ones; None: none.
        timeout_s: end the answer after so many seconds, as it is then; None: never.
        grammar: what the text of the answer must be, such as ``Grammar.json(schema)``.
        exact: answer as dense attention does, token by token; the plan drafts, and dense attention verifies.
        passages: keep which characters of the document, or of a prompt without one, were selected.

    Raises:
        InputError: for numbers that are not possible.
    """

    plan: PlanSpec = None
    max_new_tokens: int = 64
    sampling: Sampling | Sequence[Sampling] | None = None
    stop: Stop = None
    stop_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool | None = None
    logprobs: int | None = None
    timeout_s: float | None = None
    grammar: Grammar | None = None
    exact: bool = False
    passages: bool = False

    @classmethod
    def of(cls, options: Options, others: Sequence[str] = ()) -> GenerateOptions:
        """The options that keywords give; ``others`` are known beside them.

        Raises:
            InputError: for keywords that there are not.
        """
        known = [field.name for field in fields(cls)]
        for name in options:
            if name in (field.name for field in fields(Sampling)):
                raise UnknownName(f"unknown option {name!r}; give sampling=kvsift.Sampling({name}=...).")
            if name not in known:
                raise unknown("option", name, [*known, *others])
        return cls(**options)

    def __post_init__(self) -> None:
        checks.use_python_numbers(self)
        checks.whole("max_new_tokens", self.max_new_tokens, 1)
        if self.logprobs is not None:
            checks.whole("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        seconds = self.timeout_s
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and (0 < seconds <= float_info.max or seconds == inf)):
            raise InvalidValue(f"timeout_s={seconds!r} must be a number of seconds above 0, or None.")
        for each in self.sampling if isinstance(self.sampling, list | tuple) else [self.sampling]:
            if each is not None and not isinstance(each, Sampling):
                raise InvalidValue(
                    f"sampling is {type(each).__name__}. Give a kvsift.Sampling, as Sampling(temperature=0.8)."
                )
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidValue(
                f"grammar is {type(self.grammar).__name__}. Give a kvsift.Grammar, as Grammar.json(schema)."
            )
        stops_of(self.stop)
        tokens = self.stop_token_ids or ()
        if not isinstance(tokens, list | tuple | Set):
            raise InvalidValue(f"stop_token_ids={tokens!r} must be a list of tokens, as whole numbers.")
        for token in tokens:
            checks.whole("a token of stop_token_ids", token, 0)
        if self.skip_special_tokens is not None:
            checks.flag("skip_special_tokens", self.skip_special_tokens)
        for name in ("exact", "passages"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidValue(f"{name}={getattr(self, name)!r} must be True or False.")
        if self.exact and self.passages:
            raise Conflict(
                "exact=True answers by dense attention, which reads everything; passages are what a plan has selected. "
                "Leave one of them out."
            )

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
            raise InvalidValue(
                f"there are {len(self.sampling)} samplings for {num_prompts} prompts; give one for each, or one for "
                "all."
            )
        return [replace(self, sampling=sampling) for sampling in self.sampling]


def stops_of(stop: Stop) -> str | list[str] | None:
    """A text, or several in order, that end an answer.

    Raises:
        InputError: for anything else.
    """
    if stop is None or isinstance(stop, str):
        return stop
    if not isinstance(stop, list | tuple | set | frozenset) or not all(isinstance(each, str) for each in stop):
        raise InvalidValue(f"stop={stop!r} must be a text, or several texts, that end the answer.")
    return sorted(stop) if isinstance(stop, Set) else list(stop)
