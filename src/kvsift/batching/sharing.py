"""Which plans can begin with pages that another row has read."""

from __future__ import annotations

from kvsift.plan.plan import Plan, Rule


def reason_against(plan: Plan) -> str | None:
    """Return why rows of a plan share no pages; None if they do."""
    return next(filter(None, map(_reason_of_rule, plan.rules)), None)


def can_undo(plan: Plan) -> bool:
    """Return whether a row can forget its newest tokens, as it must after a step that failed."""
    return all(rule.method.traits.keeps_all and not rule.evicts for rule in plan.rules)


def _reason_of_rule(rule: Rule) -> str | None:
    traits, name = rule.method.traits, str(rule).partition(":")[0]
    if not traits.keeps_all or traits.follows:
        return f"what {name} remembers depends on how earlier tokens were answered"
    if traits.wants_queries and not traits.seals:
        learns = f"{name} learns from the queries of the whole prompt"
        return f"{learns}; with {traits.to_share} from those of a block, and rows share" if traits.to_share else learns
    return None
