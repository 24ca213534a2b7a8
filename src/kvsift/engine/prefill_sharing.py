"""The rule of which plans can share a prefilled context."""

from __future__ import annotations

from kvsift.plan.plan import Plan, Rule


def can_share_prefill(plan: Plan, other: Plan) -> bool:
    """Return whether a context prefilled under ``plan`` can be decoded under ``other`` without another prefill."""
    return plan.prefill == other.prefill and _prompt_learner(other) in (None, plan.decode)


def prefill_key(plan: Plan) -> str:
    """Return a key that plans have in common if they share a prefilled context."""
    return f"{plan.prefill}{_prompt_learner(plan) or ''}"


def learns_from_prompt(plan: Plan) -> bool:
    """Return whether a prefilled context is more than its keys and values: the queries are gone once it is saved."""
    return _prompt_learner(plan) is not None


def _prompt_learner(plan: Plan) -> Rule | None:
    """Return the decode rule if its method learns from the queries of the prompt."""
    return plan.decode if plan.decode is not None and plan.decode.method.traits.wants_queries else None
