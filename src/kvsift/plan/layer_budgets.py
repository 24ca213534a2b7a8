"""Budgets that differ from layer to layer: PyramidKV's (https://arxiv.org/abs/2406.02069).

Lower layers spread their attention widely, upper ones concentrate it. Of C tokens per layer, sinks and window not
counted, the uppermost of N layers gets C // 20, the lowest 2 C less that, and those between fall in equal steps that
are rounded down. So the mean is C, and up to N / 2 - 1 tokens more for the rounding.

Layers that are dense, or whose attention is not kvsift's, are no part of the pyramid. In a context of less than 2 C
tokens all layers get C. Where the lowest layer would get more than there is, it gets what there is and the uppermost
the rest.

Deviation from the paper: the context is that of each query, where the paper's is the prompt's; and no layer gets less
than one unit needs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from kvsift.errors import UnsupportedPlan
from kvsift.plan.budget import Budget
from kvsift.plan.plan import PHASES, Plan, Rule
from kvsift.types import LayerShape

BETA = 20  # the nominal capacity over the uppermost layer's


def pyramid(capacity: int, available: int, context: int, rank: int, num_layers: int, least: int = 1) -> int:
    """Tokens that the layer of this rank, counted from below, may select.

    Args:
        capacity: the same in the mean of the layers.
        available: tokens that there are to select from.
        context: tokens cached.
        rank, num_layers: among the layers that select.
        least: tokens that every layer gets, at most ``capacity``.
    """
    if num_layers == 1 or context < 2 * capacity or available <= capacity:
        return capacity
    largest = min(2 * capacity - max(capacity // BETA, least), available)
    step = (largest - (2 * capacity - largest)) // (num_layers - 1)
    return largest - rank * step


class PyramidRank(NamedTuple):
    """The rank of a layer in the pyramid."""

    rank: int  # among the layers that select, from below
    num_layers: int
    always: int = 0  # tokens that are always visible
    least: int = 1  # tokens that one selected unit takes beyond those


ALONE = PyramidRank(0, 1)


@dataclass(frozen=True)
class LayerBudget(Budget):
    """The budget of one layer of a pyramid."""

    pyramid_rank: PyramidRank = ALONE

    def limit(self, context: int) -> int:
        rank, num_layers, always, least = self.pyramid_rank
        capacity = super().limit(context) - always
        if capacity <= least:
            return always + capacity
        return always + pyramid(capacity, context - always, context, rank, num_layers, least)


def layer_plan(plan: Plan, shape: LayerShape) -> Plan:
    """Return the plan with the budgets of one layer.

    Raises:
        InputError: if they depend on the number of layers, which is not known.
    """
    rules = {phase: rule for phase in PHASES if (rule := plan.rule(phase)) is not None}
    if all(rule.budget.layer_budgets == "equal" for rule in rules.values()):
        return plan
    return Plan(**{phase: _layer_rule(rule, shape) for phase, rule in rules.items()})


def _layer_rule(rule: Rule, shape: LayerShape) -> Rule:
    method, budget = rule.method, rule.budget
    if budget.layer_budgets == "equal" or method.traits.unbounded or budget.is_dense(shape):
        return rule
    layers = [layer for number, layer in enumerate(shape.peers) if number not in budget.dense_layers]
    if shape.layer not in layers:
        raise UnsupportedPlan(
            f"layer_budgets='pyramid' needs to know all layers of the model, and this attention layer ({shape.layer}) "
            "runs alone. Give LayerShape.peers, or leave it out."
        )
    size = method.unit_size
    always = budget.sinks + (budget.window if method.traits.selects else 0)
    rounding = -budget.sinks % size + (size - 1 if budget.window else 0) if method.traits.selects else 0
    shared: dict[str, Any] = {field.name: getattr(budget, field.name) for field in fields(Budget)}
    rank = layers.index(shape.layer), len(layers), always, rounding + size
    return replace(rule, budget=LayerBudget(**shared, pyramid_rank=PyramidRank(*rank)))
