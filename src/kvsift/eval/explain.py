"""Why a token of an answer came out: the passages that each layer and head read for it, and what methods would read.

explanation = explain(llm, text, "What is the access code?", methods=["quest", "streaming_llm"])
explanation.most_read(3)                      # passages, by the attention they got
explanation.choices[1].recall                 # of quest, at the same budget and for the same queries
explain_tokens(llm, text, question)           # every token of the answer, from one run
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvsift.engine.generation import Progress, decode_composed
from kvsift.engine.llm import LLM
from kvsift.engine.prompt import STOP
from kvsift.engine.transcript import Transcript
from kvsift.errors import InputError
from kvsift.eval.explain_measure import attention_of, choices_of, reading_of
from kvsift.eval.explain_panel import ORACLE, Panel
from kvsift.eval.explain_text import passages_of, pieces_of, words_of
from kvsift.eval.explanation import Explanation
from kvsift.models.transformers import PlanSpec
from kvsift.runtime.budget import Budget
from kvsift.runtime.plan import Plan, Rule
from kvsift.runtime.spec import BUDGET_KEYS, parse_plan

DENSE_BUDGET = 256  # of methods beside a run that has no budget


class Foreseeing(Plan):
    """A plan beside which somebody else wants to know the queries that are foreseen."""

    @property
    def wants_hidden(self) -> bool:
        return True


def explain(
    llm: LLM,
    context: str,
    question: str,
    *,
    plan: PlanSpec = None,
    methods: Sequence[str] = (),
    budget: int | None = None,
    token: int = 0,
    max_new_tokens: int = 32,
    passage_tokens: int = 64,
    progress: Progress | None = None,
) -> Explanation:
    """Answer a question and explain one token of the answer; arguments as in ``explain_tokens``."""
    return explain_tokens(
        llm, context, question, plan=plan, methods=methods, budget=budget, tokens=[token],
        max_new_tokens=max_new_tokens, passage_tokens=passage_tokens, progress=progress,
    )[0]  # fmt: skip


def explain_tokens(
    llm: LLM,
    context: str,
    question: str,
    *,
    plan: PlanSpec = None,
    methods: Sequence[str] = (),
    budget: int | None = None,
    tokens: Sequence[int] | None = None,
    max_new_tokens: int = 32,
    passage_tokens: int = 64,
    progress: Progress | None = None,
) -> list[Explanation]:
    """Answer a question once and explain tokens of the answer.

    The last token of the prompt and all that follow run under the decode rule.

    Args:
        llm: the model.
        context: the document.
        question: about it.
        plan: of the run; the model's default.
        methods: rules to compare, such as "quest" or "quest:page_size=32"; all get the same budget.
        budget: visible tokens of those; the plan's by default, or 256 if it has none.
        tokens: which of the answer's tokens, from 0; all of them by default.
        max_new_tokens: at most so many are generated.
        passage_tokens: tokens per passage at most; a passage ends between words.
        progress: called while the prompt is read.

    Returns:
        One per token. What each head saw is kept until the end, so memory grows with the tokens.

    Raises:
        InputError: before the weights are loaded, unless the answer turns out to have fewer tokens.
    """
    plan = llm.plan if plan is None else parse_plan(plan)
    wanted = range(max_new_tokens) if tokens is None else list(dict.fromkeys(tokens))
    _check_sizes(wanted, max_new_tokens, passage_tokens)
    rules = _rules(equal_budget(plan, budget), methods)
    document = llm.read(context)
    ids = document.check(question, max_new_tokens)
    _check_chooses(rules[ORACLE], len(ids))
    panel = Panel(rules, [len(ids) - 1 + token for token in wanted])
    foresees = any(rule.method.wants_hidden for rule in rules.values())
    run = Foreseeing(plan.prefill, plan.decode) if foresees else plan
    transcript = _answered(llm, run, ids, max_new_tokens, panel, progress)
    answer = pieces_of(llm.tokenizer.decode, transcript.new_ids)
    found = wanted if tokens is not None else wanted[: len(answer)]
    if missing := [token for token in found if token >= len(answer)] or (not answer and [0]):
        raise _no_token(missing[0], answer)
    pieces = pieces_of(llm.tokenizer.decode, [*ids, *transcript.new_ids])
    explanations = []
    for token in found:
        position = len(ids) - 1 + token
        layers = panel.layers(position)
        fed = pieces[: position + 1]
        passages = passages_of(fed, rules[ORACLE].budget.always(position, 1), passage_tokens)
        explanations.append(
            Explanation(
                model=llm.directory.name,
                plan=str(plan),
                question=question,
                answer=transcript.text.strip(),
                tokens=answer,
                token=token,
                position=position,
                passages=passages,
                words=words_of(fed, attention_of(layers), passages),
                readings=[reading_of(layer, passages) for layer in layers],
                choices=choices_of(layers, rules, passages),
            )
        )
    return explanations


def equal_budget(plan: Plan, tokens: int | None) -> Budget:
    """The budget that every method beside the run gets.

    Raises:
        InputError: if the run's says nothing about tokens.
    """
    if plan.decode is None or plan.decode.method.unbounded:
        return Budget(tokens=tokens or DENSE_BUDGET, dense_layers=())
    own = replace(plan.decode.budget, min_context=0, layer_budgets="equal", head_budgets="equal")
    if tokens is not None:
        return replace(own, tokens=tokens, ratio=None, mass=None)
    if own.mass is not None:
        raise InputError(f"{plan} shows each query as much as it needs; say with budget how much the methods may show.")
    return own


def _check_sizes(tokens: Sequence[int], max_new_tokens: int, passage_tokens: int) -> None:
    if passage_tokens < 1:
        raise InputError(f"passage_tokens={passage_tokens} must be 1 or more.")
    if not tokens:
        raise InputError("tokens is empty: name at least one token of the answer, or leave it out to explain all.")
    for token in tokens:
        if not 0 <= token < max_new_tokens:
            raise InputError(
                f"token={token} is not among the tokens that may be generated: 0 to {max_new_tokens - 1}. Raise "
                "max_new_tokens for a later one."
            )


def _no_token(token: int, answer: Sequence[str]) -> InputError:
    pieces = ", ".join(f"{index} {piece!r}" for index, piece in enumerate(answer)) or "none"
    return InputError(f"the answer has no token {token}; its tokens are: {pieces}.")


def _rules(budget: Budget, methods: Sequence[str]) -> dict[str, Rule]:
    rules = {}
    for spec in [ORACLE, *methods]:
        taken = [key for pair in spec.split(":")[1:] if (key := pair.partition("=")[0].strip()) in BUDGET_KEYS]
        if taken:
            raise InputError(f"{spec}: all methods get the same budget; leave out {', '.join(taken)}.")
        rule = parse_plan(spec).decode
        if rule is None:
            raise InputError(f"{spec} does not choose in decode, which is what is explained; leave it out.")
        own = budget if rule.method.selects else replace(budget, window=Budget().window)
        rules[spec] = Rule(rule.method, own)
    return rules


def _check_chooses(rule: Rule, length: int) -> None:
    budget = rule.budget
    if budget.units(length - 1, 1) >= budget.candidates(length - 1, 1).count:
        raise InputError(
            f"the prompt has {length} tokens and the budget shows them all, so there is nothing to choose. Give a "
            "longer context or a smaller budget."
        )


def _answered(
    llm: LLM, plan: Plan, ids: list[int], max_new_tokens: int, panel: Panel, progress: Progress | None
) -> Transcript:
    llm.load()
    stop = None if llm.tokenizer.chat_template else STOP
    transcript = Transcript(llm.request(ids, max_new_tokens, None, stop, False), llm.tokenizer)
    cache = llm.new_cache(plan, len(ids) + max_new_tokens, length=transcript.request.length)
    cache.stats.watch = panel
    llm.prefill(cache, ids[:-1], progress)
    cache.prepare()
    for _ in decode_composed(llm, cache, transcript, "decode"):
        pass
    return transcript
