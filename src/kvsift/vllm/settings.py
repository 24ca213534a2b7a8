"""Settings of the plugin, from vLLM's ``--additional-config '{"kvsift": {"plan": "sketch:budget=1024"}}'``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from shlex import quote
from typing import Any

from kvsift.checkpoint import local_directory
from kvsift.errors import InputError, InvalidValue, MissingInput, UnsupportedPlan, unknown
from kvsift.layer.paged_decode import reason_against, rule_of
from kvsift.methods import checks
from kvsift.methods.common import anchors
from kvsift.methods.common.anchors import AnchoredMethod, AnchorMap, Reuse
from kvsift.plan.capabilities import check, reason
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import is_auto, parse_plan
from kvsift.plan.tuned_plan import ModelPlans
from kvsift.types import LayerShape, Objections

KEY = "kvsift"


@dataclass(frozen=True)
class Settings:
    """What a server was started with.

    Attributes:
        plan: plan of requests that name none.
        plans: further plans, whose page summaries are maintained too.
        dense_below: shorter contexts are decoded densely, in tokens; None: where that is as fast.
        log_every_s: seconds between two lines of counters; 0: no lines.
        probe_every: steps between two comparisons of one sequence in one layer with exact attention; 0: none.
    """

    plan: Plan = field(default_factory=Plan)
    plans: tuple[Plan, ...] = ()
    dense_below: int | None = None
    log_every_s: float = 10.0
    probe_every: int = 64

    @classmethod
    def read(cls, additional_config: object, plans: ModelPlans | None = None) -> Settings | None:
        """Return the settings under ``kvsift``; None if there are none. ``plans`` reads those of the model.

        Raises:
            InputError: for unknown keys, bad values, and plans that vLLM cannot carry out.
        """
        given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise InvalidValue(f'{KEY} is a table such as {{"plan": "sketch:budget=1024"}}; got {given!r}.')
        for key in given:
            if key not in (known := [each.name for each in fields(cls)]):
                raise unknown(f"key of {KEY}", key, known)
        if "plan" not in given:
            raise MissingInput(f'{KEY} has no plan; add "plan": "sketch:budget=1024", or "dense".')
        more = given.get("plans", ())
        if isinstance(more, str | Mapping) or not hasattr(more, "__iter__"):
            raise InvalidValue(f'plans={more!r} must be a list, such as ["quest:budget=1024"].')
        return cls(
            read_plan(given["plan"], plans),
            tuple(read_plan(plan, plans) for plan in more),
            checks.whole("dense_below", given["dense_below"], 0) if "dense_below" in given else None,
            _seconds("log_every_s", given.get("log_every_s", cls.log_every_s)),
            checks.whole("probe_every", given.get("probe_every", cls.probe_every), 0),
        )

    @property
    def summaries(self) -> tuple[tuple[str, int], ...]:
        """Kinds of page summary to maintain, each with its page size."""
        return tuple(dict.fromkeys(summary for plan in (self.plan, *self.plans) for summary in summaries_of(plan)))

    @cached_property
    def anchors(self) -> Mapping[str, AnchorMap]:
        """The anchor files of all plans as they were at the start, by name: they may be replaced while a server runs.

        Raises:
            InputError: if one has changed since its plan was read.
        """
        names = dict.fromkeys(name for plan in (self.plan, *self.plans) if (name := anchors_of(plan.decode)))
        return {name: anchors.read("anchors", name) for name in names}

    def reuse(self, rule: Rule | None, shape: LayerShape) -> Reuse | None:
        """Return which selection a layer reuses in decode by a rule of this server; None: it selects.

        Raises:
            InputError: if the anchor file was made for another model.
        """
        name = anchors_of(rule)
        return None if name is None else anchors.reuse_of(self.anchors[name], name, shape)

    def summaries_in(self, shape: LayerShape) -> tuple[tuple[str, int], ...]:
        """As ``summaries``, of a layer: without those of plans by which it only reuses a selection."""
        kept = (
            (kind, plan.page_size or 1)
            for plan in (self.plan, *self.plans)
            for rule in plan.rules
            if rule is not plan.decode or self.reuse(rule, shape) is None
            for kind in rule.method.summaries
        )
        return tuple(dict.fromkeys(kept))

    @property
    def anchor_layers(self) -> frozenset[int]:
        """True indices of layers whose selections others reuse."""
        return frozenset(reuse.anchor for found in self.anchors.values() for reuse in found.reuse.values())

    @property
    def summarised_share(self) -> float:
        """Share of the layers that keep page summaries, where all plans have the same anchors."""
        found = next(iter(self.anchors.values()), None)
        if found is None or any(rule.method.summaries for plan in (self.plan, *self.plans) if (rule := plan.prefill)):
            return 1.0
        return 1 - len(found.reuse) / len(found.layers)

    @property
    def decode_rules(self) -> tuple[Rule, ...]:
        """Rules of all plans that decode sparsely."""
        return tuple(rule for plan in (self.plan, *self.plans) if (rule := rule_of(plan)) is not None)

    @property
    def allows_dense(self) -> bool:
        """Whether a further plan is dense in decode, which on a GPU costs those that are not a little."""
        return any(rule_of(plan) is None for plan in self.plans)

    def plan_for(self, spec: Any, plans: ModelPlans | None = None) -> Plan:
        """Return the plan that a request names; ``plans`` reads those of the model.

        Raises:
            InputError: if it is no plan, or needs page summaries that the server does not maintain.
        """
        plan = read_plan(spec, plans)
        if missing := set(summaries_of(plan)) - set(self.summaries):
            kind, page_size = min(missing)
            raise UnsupportedPlan(
                f"{plan} needs page summaries of kind {kind} over pages of {page_size} tokens, and this server was "
                f"not started with them. Allowed are dense, and {self._allowed()}. Start it with plans=[{str(plan)!r}] "
                "beside its plan to allow this one."
            )
        name = anchors_of(plan.decode)
        read = set(summaries_of(plan))
        served = {anchors_of(own.decode) for own in (self.plan, *self.plans) if read & set(summaries_of(own))}
        if read and name not in served:
            raise UnsupportedPlan(
                f"{plan} selects in other layers than the plans that this server was started with. Start it with "
                f"plans=[{str(plan)!r}] beside its plan to allow this one."
            )
        return plan

    def _allowed(self) -> str:
        names = dict.fromkeys(
            f"{rule.name} with pages of {rule.method.summary_page_size}" for rule in self.decode_rules
        )
        return f"any budget of: {'; '.join(names)}" if names else "nothing else"


def plans_of(model: str, revision: str | None, device_type: str) -> ModelPlans:
    """Return what reads plans for a model that vLLM names by its directory or its name on huggingface.co."""
    no_guard = "under vLLM answers are not probed"
    return ModelPlans(local_directory(model, revision), device_type, model=quote(model), no_guard=no_guard)


def read_plan(spec: Any, plans: ModelPlans | None = None) -> Plan:
    """Return a plan that vLLM can carry out; ``plans`` reads those of the model.

    Raises:
        InputError: for any other, with the reason and the nearest legal choice.
    """
    plan = parse_plan(spec) if plans is None else plans.parse(spec)
    try:
        check(plan, PLANS)
    except InputError as error:
        if is_auto(spec):
            raise UnsupportedPlan(f"plan=auto is {plan}, as kvsift tune found it. {error}") from None
        raise
    return plan


_BATCHES: Objections = (
    (lambda rule: reason(rule, rule.method.not_in_batches), "{found}"),
    (lambda rule: rule.budget.mass is not None or {rule.budget.head_budgets, rule.budget.layer_budgets} != {"equal"},
     "its lists have one length there; give budget or ratio, and neither mass nor *_budgets"),
)  # fmt: skip
PLANS: Objections = (
    (lambda plan: reason(plan.prefill, _BATCHES), "Under vLLM prompts cannot be prefilled by {it.prefill}: {found}."),
    (lambda plan: plan.is_guarded,
     "{it} probes its own answers, which is not done under vLLM. Leave out min_recovery."),
    (reason_against, "{it} cannot run under vLLM: {found}. Take quest or sketch with a budget in tokens."),
)  # fmt: skip


def summaries_of(plan: Plan) -> tuple[tuple[str, int], ...]:
    """Return the kinds of page summary that a plan reads, each with its page size."""
    return tuple((kind, plan.page_size or 1) for kind in plan.summaries)


def anchors_of(rule: Rule | None) -> str | None:
    """Return the anchor file of a rule."""
    return rule.method.anchors if rule is not None and isinstance(rule.method, AnchoredMethod) else None


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise InvalidValue(f"{name}={value!r} must be a number, 0 or more.")
    return float(value)
