"""Rows of a result: every plan at every budget, with reference plans as floor and ceiling."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvsift.errors import MissingInput
from kvsift.methods import catalogue, method_class
from kvsift.methods.base import Phase
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import parse_plan

CEILINGS = "dense", "oracle_tokens", "oracle_pages"
FLOORS = "streaming_llm", "random"
REFERENCES = "dense", "oracle_tokens", "streaming_llm", "random"  # rows of every result
BUDGET = "{budget}"


@dataclass(frozen=True)
class PlanRow:
    """One plan at one budget.

    Attributes:
        plan: in the syntax of plans, with its budget.
        budget: the column; None for a plan without a budget, which belongs to every column.
        name: of the row in tables, the same at every budget.
        role: "plan", or "ceiling" or "floor" for a reference.
        phase: the phase that the budget limits; None if it limits none.
    """

    plan: str
    budget: int | None
    name: str
    role: str
    phase: Phase | None


def plan_rows(
    plans: Sequence[str], budgets: Sequence[int], settings: str, references: bool, about: Phase = "decode"
) -> tuple[PlanRow, ...]:
    """Return the rows of a recipe: its plans, then the missing references, at every budget. ``about`` is the phase of
    plans with one rule for both phases. Without ``budgets`` each plan is at its own.

    Raises:
        InputError: if a plan is invalid, or without ``budgets`` has none.
    """
    templates = {plan: tuple(budgets) for plan in plans} if budgets else _own_budgets(plans)
    named = zip(templates.items(), row_names(list(templates)))
    rows = [row for (plan, own), name in named for row in _at_budgets(plan, name, own, settings, about)]
    return (*rows, *(_missing(rows, budgets or budgets_of(plans)) if references else ()))


def budgets_of(plans: Iterable[str]) -> tuple[int, ...]:
    """Return the budgets of plans that have one each, ascending."""
    return tuple(sorted({budget for budgets in _own_budgets(plans).values() for budget in budgets}))


def _own_budgets(plans: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return plans with their budgets replaced by ``BUDGET``, and these budgets; dense plans have none."""
    templates: dict[str, tuple[int, ...]] = {}
    for plan in plans:
        own = {int(budget) for budget in re.findall(r":budget=(\d+)", plan)}
        if len(own) != 1 and _methods(parse_plan(plan.replace(BUDGET, "256"))):
            raise MissingInput(
                f"the recipe has no budgets, and the plan {plan} has not one of its own. Write budgets = [256], or "
                "budget=256 into every plan."
            )
        template = re.sub(r":budget=\d+", f":budget={BUDGET}", plan)
        templates[template] = tuple(sorted({*templates.get(template, ()), *own}))
    if not any(templates.values()):
        raise MissingInput("the recipe has no budgets, and none of its plans has one. Write budgets = [256].")
    return templates


def row_names(plans: Sequence[str]) -> list[str]:
    """Return plans without their budgets, and without sinks and window unless these distinguish them."""
    bare = [_strip(plan, "budget", "sinks", "window") for plan in plans]
    if len(set(bare)) == len(bare):
        return bare
    named = [_strip(plan, "budget") for plan in plans]
    return named if len(set(named)) == len(named) else list(plans)


def _strip(plan: str, *keys: str) -> str:
    return ":".join(piece for piece in plan.split(":") if piece.partition("=")[0] not in keys)


def _at_budgets(plan: str, name: str, budgets: Sequence[int], settings: str, about: Phase) -> Iterator[PlanRow]:
    if BUDGET not in plan:
        yield _row(plan, None, name, about)
        return
    rest = _settings_for(plan, settings)
    for budget in budgets:
        yield _row(plan.replace(BUDGET, str(budget)) + rest, budget, name, about)


def _settings_for(plan: str, settings: str) -> str:
    """Return the common settings that a plan does not set; no window for methods that select nothing."""
    own = {piece.partition("=")[0] for piece in plan.rpartition(",")[2].split(":")[1:]}
    method = plan.rpartition(",")[2].split(":")[0].rpartition("=")[2]
    if method in catalogue() and not method_class(method)().traits.selects:
        own.add("window")
    pieces = (piece for piece in settings.split(":") if piece and piece.partition("=")[0] not in own)
    return "".join(f":{piece}" for piece in pieces)


def _row(plan: str, budget: int | None, name: str, about: Phase = "decode") -> PlanRow:
    parsed = parse_plan(plan)
    methods = _methods(parsed)
    role = "ceiling" if not methods or methods & {*CEILINGS} else "floor" if methods & {*FLOORS} else "plan"
    return PlanRow(plan, budget, name, role, _limited(parsed, budget, about) if methods else None)


def _limited(plan: Plan, budget: int | None, about: Phase) -> Phase:
    """Return the phase that a budget limits."""
    prefill, decode = plan.prefill, plan.decode
    if prefill is not None and prefill == decode:
        return about
    return "prefill" if prefill is not None and (decode is None or prefill.budget.tokens == budget) else "decode"


def _methods(plan: Plan) -> set[str]:
    """Return the names of the methods of a plan that are not dense."""
    return {str(rule).partition(":")[0] for rule in plan.rules if not rule.method.traits.unbounded}


def _missing(rows: Sequence[PlanRow], budgets: Sequence[int]) -> Iterator[PlanRow]:
    """Yield the rows of missing references, with sinks, window and dense layers of the first plan with a budget."""
    present = {name for row in rows for name in _methods(parse_plan(row.plan)) or {"dense"}}
    limited = [row for row in rows if row.budget is not None and row.phase is not None]
    model = next((row for row in limited if _rule(row).method.traits.selects), next(iter(limited), None))
    for name in REFERENCES:
        if name in present:
            continue
        if name == "dense":
            yield _row("dense", None, "dense")
        elif model is not None:
            for budget in budgets:
                yield _row(f"{model.phase}={name}:budget={budget}{_limits(name, _rule(model))}", budget, name)


def _rule(row: PlanRow) -> Rule:
    rule = parse_plan(row.plan).rule(row.phase or "decode")
    assert rule is not None
    return rule


def _limits(name: str, rule: Rule) -> str:
    """Return the always-visible tokens of a rule as settings of a reference, with its page size for random pages."""
    limits, method = rule.budget, rule.method
    settings = f":sinks={limits.sinks}:dense_layers={'+'.join(map(str, limits.dense_layers)) or 'none'}"
    settings += f":window={limits.window}" if method.traits.selects and name != "streaming_llm" else ""
    return settings + (f":page_size={method.unit_size}" if name == "random" else "")
