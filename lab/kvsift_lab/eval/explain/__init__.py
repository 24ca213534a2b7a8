"""Explanations of the tokens of an answer: the passages that layers and heads attend to, and what methods would read.

explanation = explain(llm, text, "What is the access code?", methods=["quest", "streaming_llm"])
explanation.most_read(3)                      # passages, by attention
explanation.choices[1].recall                 # of quest, at the same budget and for the same queries
explain_tokens(llm, text, question)           # every token of the answer, from one run
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvsift.api.llm import LLM
from kvsift.engine.follow import follow
from kvsift.engine.options import GenerateOptions, ProgressCallback
from kvsift.engine.sequence import EngineSequence
from kvsift.engine.transcript import TextOutput, Transcript
from kvsift.errors import InvalidValue, MissingInput, TooShort, UnsupportedPlan, UnusedOption
from kvsift.models.hf.sparse import PlanSpec
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import BUDGET_KEYS, parse_plan
from kvsift.tokenization.prompt import STOP
from kvsift.tokenization.token_text import TokenDecoder
from kvsift_lab.eval.explain.explanation import (
    Explanation,
    layer_reading,
    mean_attention,
    method_readings,
    passages_of,
    words_of,
)
from kvsift_lab.eval.explain.observer import ORACLE, MethodObserver

DENSE_BUDGET = 256  # of the compared methods if the run has no budget


@dataclass(frozen=True)
class ExplainOptions:
    """What is explained.

    Attributes:
        plan: of the run; the model's default.
        methods: rules to compare, such as "quest" or "quest:page_size=32"; all get the same budget.
        budget: visible tokens of the compared methods; the plan's by default, or 256 if it has none.
        tokens: indices of the explained tokens in the answer; all tokens by default.
        max_new_tokens: the most tokens to generate.
        passage_tokens: the most tokens of a passage; a passage ends between words.
    """

    plan: PlanSpec = None
    methods: Sequence[str] = ()
    budget: int | None = None
    tokens: Sequence[int] | None = None
    max_new_tokens: int = 32
    passage_tokens: int = 64

    def __post_init__(self) -> None:
        if self.passage_tokens < 1:
            raise InvalidValue(f"passage_tokens={self.passage_tokens} must be 1 or more.")
        if not self.candidates:
            raise InvalidValue(
                "tokens is empty: name at least one token of the answer, or leave it out to explain all."
            )
        for token in self.candidates:
            if not 0 <= token < self.max_new_tokens:
                raise InvalidValue(
                    f"token={token} is not among the tokens that may be generated: 0 to {self.max_new_tokens - 1}. "
                    "Raise max_new_tokens (--max-new-tokens) for a later one."
                )

    @property
    def candidates(self) -> Sequence[int]:
        """Indices of the tokens to explain, before the length of the answer is known."""
        return range(self.max_new_tokens) if self.tokens is None else list(dict.fromkeys(self.tokens))

    def tokens_of(self, answer: Sequence[str]) -> Sequence[int]:
        """Return the indices of the tokens to explain.

        Raises:
            InputError: if the answer has no such token.
        """
        tokens = self.candidates if self.tokens is not None else self.candidates[: len(answer)]
        if missing := [token for token in tokens if token >= len(answer)] or (not answer and [0]):
            pieces = ", ".join(f"{index} {piece!r}" for index, piece in enumerate(answer)) or "none"
            raise InvalidValue(f"the answer has no token {missing[0]}; its tokens are: {pieces}.")
        return tokens


class HiddenStatePlan(Plan):
    """A plan that passes hidden states to its layers because a compared method needs them."""

    @property
    def wants_hidden(self) -> bool:
        return True


def explain(llm: LLM, context: str, question: str, *, token: int = 0, **options: Any) -> Explanation:
    """Answer a question and explain one token of the answer; other arguments as in ``explain_tokens``."""
    return explain_tokens(llm, context, question, tokens=[token], **options)[0]


def explain_tokens(
    llm: LLM, context: str, question: str, *, progress: ProgressCallback | None = None, **options: Any
) -> list[Explanation]:
    """Answer a question once and explain tokens of the answer.

    The last token of the prompt and all that follow run under the decode rule. What each head sees is kept until the
    end, so memory grows with the number of explained tokens.

    Args:
        llm: the model.
        context: the document.
        question: about the document.
        progress: called during prefill.
        options: the fields of ``ExplainOptions``.

    Raises:
        InputError: before the weights are loaded, unless the answer has fewer tokens than expected.
    """
    settings = ExplainOptions(**options)
    plan = llm.plan_of(settings.plan, llm.plan)
    rules = _rules(equal_budget(plan, settings.budget), settings.methods)
    ids = llm.read(context).check(question, settings.max_new_tokens)
    _check_budget(rules[ORACLE].budget, len(ids))
    observer = MethodObserver(rules, [len(ids) - 1 + token for token in settings.candidates])
    transcript = _answer(llm, plan, ids, settings.max_new_tokens, observer, progress)
    pieces = TokenDecoder.of(llm.tokenizer).pieces([*ids, *transcript.new_ids])
    answer = pieces[len(ids) :]
    tokens = settings.tokens_of(answer)
    run: dict[str, Any] = {
        "model": llm.directory.name,
        "plan": str(plan),
        "question": question,
        "answer": transcript.text.strip(),
    }
    findings = {token: _findings(observer, rules, pieces[: len(ids) + token], context, settings) for token in tokens}
    return [Explanation(**run, tokens=answer, token=token, **fields) for token, fields in findings.items()]


def _findings(
    observer: MethodObserver, rules: dict[str, Rule], pieces: Sequence[str], context: str, options: ExplainOptions
) -> dict[str, Any]:
    """Return the fields of an explanation that depend on the tokens before the explained one."""
    position = len(pieces) - 1
    layers = observer.layers(position)
    passages = passages_of(pieces, rules[ORACLE].budget.always(position, 1), options.passage_tokens, context)
    return {
        "position": position,
        "passages": passages,
        "words": words_of(pieces, mean_attention(layers), passages),
        "readings": [layer_reading(layer, passages) for layer in layers],
        "choices": method_readings(layers, rules, passages),
    }


def equal_budget(plan: Plan, tokens: int | None) -> Budget:
    """Return the budget that every compared method gets.

    Raises:
        InputError: if the budget of the run is not a number of tokens.
    """
    if plan.decode is None or plan.decode.method.traits.unbounded:
        return Budget(tokens=tokens or DENSE_BUDGET, dense_layers=())
    own = replace(plan.decode.budget, min_context=0, layer_budgets="equal", head_budgets="equal", min_recovery=None)
    if tokens is not None:
        return replace(own, tokens=tokens, ratio=None, mass=None)
    if own.mass is not None:
        raise MissingInput(f"{plan} has a budget of attention mass, not of tokens; say with budget how many tokens the "
                         "methods may select.")  # fmt: skip
    return own


def _rules(budget: Budget, methods: Sequence[str]) -> dict[str, Rule]:
    rules = {}
    for spec in [ORACLE, *methods]:
        keys = [key for pair in spec.split(":")[1:] if (key := pair.partition("=")[0].strip()) in BUDGET_KEYS]
        if keys:
            raise UnusedOption(f"{spec}: all methods get the same budget; leave out {', '.join(keys)}.")
        rule = parse_plan(spec).decode
        if rule is None:
            raise UnsupportedPlan(
                f"{spec} does not select in decode, which is the phase that is explained; leave it out."
            )
        own = budget if rule.method.traits.selects else replace(budget, window=Budget().window)
        rules[spec] = Rule(rule.method, own)
    return rules


def _check_budget(budget: Budget, length: int) -> None:
    if budget.units(length - 1, 1) >= budget.candidates(length - 1, 1).count:
        raise TooShort(
            f"the prompt has {length} tokens and all of them fit the budget, so there is nothing to select. Give a "
            "longer context or a smaller budget."
        )


def _answer(
    llm: LLM,
    plan: Plan,
    ids: list[int],
    max_new_tokens: int,
    observer: MethodObserver,
    progress: ProgressCallback | None,
) -> Transcript:
    """Generate the answer while the observer records."""
    llm.load()
    plan = HiddenStatePlan(plan.prefill, plan.decode) if observer.wants_hidden else plan
    stop = None if llm.tokenizer.chat_template else STOP
    request = llm.request(ids, plan, GenerateOptions(max_new_tokens=max_new_tokens, stop=stop))
    output = TextOutput(request, llm.tokenizer, llm.device)
    seq = EngineSequence(request, output, observer=observer, decode_from=len(ids) - 1)
    for _ in follow(llm.loop, [seq], [output]):
        if progress is not None:
            progress(min(output.num_prefilled, len(ids) - 1), len(ids) - 1)
    if seq.error is not None:
        raise seq.error
    return output.transcript
