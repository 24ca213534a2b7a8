"""Rules and plans: which method selects in which phase, within which budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

from kvsift.errors import InvalidValue, UnsupportedPlan, unknown
from kvsift.kernels.page_summary import SUMMARIES
from kvsift.kernels.sketch import SKETCHES
from kvsift.methods import catalogue
from kvsift.methods.base import Method, Phase
from kvsift.methods.traits import Traits
from kvsift.plan.budget import Budget
from kvsift.plan.capabilities import check, reasons
from kvsift.types import LayerShape, Objections

PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True)
class Rule:
    """A method and its budget.

    Raises:
        InputError: if the budget can never select anything, or the method cannot honour it.
    """

    objections: ClassVar[Objections] = (
        (lambda rule: not rule.method.traits.selects and rule.budget.window != Budget().window,
         "{it.name} takes no window: its window is what sinks leave of the budget."),
        (lambda rule: rule.budget.mass is not None and not rule.method.traits.estimates_mass,
         "{it.name} {it.method.traits.no_mass}; give budget or ratio, not mass."),
        (lambda rule: rule.budget.head_budgets == "adaptive" and not rule.method.traits.compares_heads,
         "{it.name} does not score candidates for each head, so head_budgets='adaptive' does not apply; leave it out."),
        (lambda rule: next(rule._dense_anchors(), None),
         "layer {found[0]} reuses the selection of layer {found[1]} by the anchors of {it.name}, and "
         "dense_layers={found[2]} leaves that one nothing to select. Leave {found[1]} out of dense_layers, or "
         "calibrate with --dense-layers {found[2]}."),
        (lambda rule: rule.budget.head_budgets == "adaptive" and rule.evicts,
         "evict=true stores equally many tokens for every KV head, so it frees nothing of what heads with fewer save "
         "under head_budgets='adaptive'. Leave one of them out."),
    )  # fmt: skip
    not_guarded: ClassVar[Objections] = (
        (lambda rule: rule.method.traits.unbounded,
         "{it.name} sees everything, so min_recovery has nothing to widen; leave it out."),
        (lambda rule: rule.evicts,
         "min_recovery compares with exact attention, and of what evict=true has freed there is none. Leave out "
         "evict=true, and give a method that keeps all tokens, or leave out min_recovery."),
        (lambda rule: rule.method.traits.selects and not rule.method.traits.keeps_all,
         "{it.name} never sees a token again that it has dropped, so a larger budget brings nothing back. Leave out "
         "min_recovery, or take a method that keeps all tokens, such as quest."),
    )  # fmt: skip
    not_shared: ClassVar[Objections] = (
        (lambda rule: not rule.method.traits.keeps_all or rule.method.traits.follows,
         "what {it.name} remembers depends on how earlier tokens were answered"),
        (lambda rule: (traits := rule.method.traits).wants_queries and not traits.seals and traits.to_share,
         "{it.name} learns from the queries of the whole prompt; with {found} from those of a block, and sequences "
         "share"),
        (lambda rule: (traits := rule.method.traits).wants_queries and not traits.seals,
         "{it.name} learns from the queries of the whole prompt"),
    )  # fmt: skip

    method: Method
    budget: Budget = field(default_factory=Budget)

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method):
            raise InvalidValue(
                f"method={self.method!r} must be a Method, such as kvsift.methods.quest.Quest(); "
                "parse_plan reads text such as 'quest:budget=1024'."
            )
        if not isinstance(self.budget, Budget):
            raise InvalidValue(f"budget={self.budget!r} must be a Budget, such as Budget(tokens=1024).")
        for kind in self.method.summaries:
            if kind not in SUMMARIES and kind not in SKETCHES:
                raise unknown(f"kind of summary in {self.name}.summaries", kind, SUMMARIES)
        if self.budget.min_recovery is not None:
            check(self, self.not_guarded)
        if not self.method.traits.unbounded:
            self.budget.check(self.method.unit_size, self.method.traits.selects)
            check(self, self.objections)

    def _dense_anchors(self) -> Iterator[tuple[int, int, str]]:
        """Layers with the dense layers whose selection they would reuse, and all dense layers as a plan spells them."""
        dense = self.budget.dense_layers
        for layer, anchor in self.method.reused.items():
            if anchor in dense and layer not in dense:
                yield layer, anchor, _spell(dense)

    @property
    def name(self) -> str:
        """Name of the method in plans."""
        path = f"{type(self.method).__module__}:{type(self.method).__qualname__}"
        return next((name for name, entry in catalogue().items() if entry.path == path), type(self.method).__name__)

    @cached_property
    def traits(self) -> Traits:
        """The traits of the method, which its hyper-parameters determine."""
        return self.method.traits

    @cached_property
    def unit_size(self) -> int:
        """Tokens per unit of the method."""
        return self.method.unit_size

    @cached_property
    def evicts(self) -> bool:
        """Whether the store frees what the method drops."""
        return self.method.evict

    @property
    def bare_phase(self) -> Phase:
        """The phase of this rule in a plan that names none."""
        return "decode" if "decode" in self.method.phases else "prefill"

    def is_dense(self, layer: int, start: int, stop: int) -> bool:
        """Whether queries at positions start to stop attend everything before them in the full-attention layer of this
        number; -1: in one that is not in ``dense_layers``."""
        budget, traits = self.budget, self.traits
        if traits.unbounded or layer in budget.dense_layers or stop < budget.min_context:
            return True
        if not traits.selects:
            return stop <= budget.limit(stop)
        room = budget.room(start, self.unit_size)
        if budget.mass is not None and budget.mass < 1:
            return room.candidates.count == 0  # how many are needed is known only once they are scored
        return room.units >= room.candidates.count

    def __str__(self) -> str:
        name = self.name
        if self.method.traits.unbounded:
            return name
        knobs = ((f.name, getattr(self.method, f.name), f.default) for f in fields(self.method))
        changed = {name: value for name, value, default in knobs if value != default}
        budget = self.budget
        sizes = {"budget": budget.tokens, "ratio": budget.ratio, "mass": budget.mass}
        plain = Budget(**self.method.budget_defaults)
        others = "sinks", "window", "dense_layers", "min_context", "layer_budgets", "head_budgets", "min_recovery"
        rest = {key: getattr(budget, key) for key in others}
        rest = {key: value for key, value in rest.items() if value != getattr(plain, key)}
        settings = {**{k: v for k, v in sizes.items() if v is not None}, **changed, **rest}
        return ":".join([name, *(f"{key}={_spell(value)}" for key, value in settings.items())])


@dataclass(frozen=True)
class Plan:
    """A rule per phase; None is dense.

    Raises:
        InputError: if a method does not select in its phase, or the two rules cannot share pages.
    """

    objections: ClassVar[Objections] = (
        (lambda plan: plan.prefill is not None and plan.prefill.budget.window == 0,
         "window=0 works in decode only: in prefill a query must see itself. Give window=1 or more."),
        (lambda plan: plan.prefill is not None and plan.prefill.budget.min_recovery is not None,
         "min_recovery guards decode, and the rule of prefill has it. Give it to a rule of decode alone: "
         "prefill=METHOD:...,decode=METHOD:...:min_recovery=0.9."),
        (lambda plan: plan.evicts_prompt and plan.decode != plan.prefill,
         "evict=true in prefill frees tokens of the prompt, and decode can only go on with what is left of "
         "them. Give both phases the rule, both={it.prefill}, or decode alone."),
        (lambda plan: plan.evicts_prompt and plan.prefill.budget.layer_budgets == "pyramid",
         "layer_budgets='pyramid' gives lower layers more once the context is long enough, and what evict=true has "
         "freed in prefill by then cannot come back. Leave out one of them, or the rule of prefill."),
        (lambda plan: len(sizes := sorted({r.method.summary_page_size for r in plan.rules if r.method.summaries})) > 1
         and sizes,
         "prefill and decode use pages of {found[0]} and {found[1]} tokens; summaries are kept for one page "
         "size. Give both the same page_size."),
    )  # fmt: skip

    prefill: Rule | None = None
    decode: Rule | None = None

    def __post_init__(self) -> None:
        for phase in PHASES:
            rule = self.rule(phase)
            if rule is not None and not isinstance(rule, Rule):
                raise InvalidValue(
                    f"{phase}={rule!r} must be a Rule, or None. A method goes into one: Rule(method, "
                    "Budget(tokens=1024)); parse_plan reads text such as 'quest'."
                )
            if rule is not None and phase not in rule.method.phases:
                able = " and ".join(rule.method.phases)
                raise UnsupportedPlan(
                    f"{rule.name} selects in {able}, not in {phase}. Leave {phase} out to stay dense there."
                )
        check(self, self.objections)

    def rule(self, phase: Phase) -> Rule | None:
        """The rule of a phase; None is dense."""
        return self.prefill if phase == "prefill" else self.decode

    @property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in (self.prefill, self.decode) if rule is not None)

    @property
    def evicts_prompt(self) -> bool:
        """Whether tokens are freed during prefill; decode, by the same rule, goes on with what is left."""
        return self.prefill is not None and self.prefill.evicts

    @property
    def not_shared(self) -> str | None:
        """Why sequences of the plan share no pages; None if they do."""
        return next((text for rule in self.rules for text in reasons(rule, rule.not_shared)), None)

    @cached_property
    def can_undo(self) -> bool:
        """Whether a sequence can forget its newest tokens, as it must after a step that failed."""
        return all(rule.traits.keeps_all and not rule.evicts for rule in self.rules)

    def evicts_in(self, layer: LayerShape) -> bool:
        """Whether a layer evicts tokens for good."""
        rule = self.decode
        return rule is not None and rule.evicts and not rule.budget.is_dense(layer)

    @property
    def page_size(self) -> int | None:
        """Tokens per page that the plan needs of the store; None if any will do."""
        paged = [rule.method.unit_size for rule in self.rules if rule.method.unit_size > 1]
        summarised = [rule.method.summary_page_size for rule in self.rules if rule.method.summaries]
        return next(iter(summarised or paged), None)

    @property
    def summaries(self) -> tuple[str, ...]:
        """Kinds of page summary to maintain."""
        return tuple(dict.fromkeys(kind for rule in self.rules for kind in rule.method.summaries))

    def check_layers(self, layers: Sequence[int]) -> None:
        """Refuse a model of these attention layers, true indices, if a method cannot run on it, or it has none of the
        layers that are to be dense (``InputError``)."""
        for rule in self.rules:
            rule.method.check_layers(layers)
            dense = rule.budget.dense_layers
            if layers and dense and min(dense) >= len(layers):
                raise InvalidValue(
                    f"dense_layers={_spell(dense)} names no layer of the model: it has {len(layers)}, counted from 0. "
                    f"Give {len(layers) - 1} or less, or none."
                )

    @property
    def is_guarded(self) -> bool:
        """Whether the budget of decode doubles where it recovers too little (``plan.guard``)."""
        return self.decode is not None and self.decode.budget.min_recovery is not None

    @cached_property
    def wants_hidden(self) -> bool:
        """Whether decode selects by queries foreseen from the layer below."""
        return self.decode is not None and self.decode.traits.wants_hidden

    def skipped_nothing(self, phase: Phase) -> str:
        """The warning for a phase that should have been sparse and read everything."""
        rule = self.rule(phase)
        segment = ""
        if phase == "prefill" and rule is not None:
            segment = f"it lies within a segment of {rule.method.segment_size:,} queries, which share a selection, "
        return (
            f"the plan {self} skipped nothing in {phase}: every query saw its whole context. The context is shorter "
            f"than the budget, {segment}or every layer is in dense_layers."
        )

    def __str__(self) -> str:
        if self.prefill is not None and self.prefill == self.decode:
            return f"both={self.decode}"
        if len(self.rules) == 1 and self.rule(self.rules[0].bare_phase) and not self.rules[0].method.traits.unbounded:
            return str(self.rules[0])
        sparse = [f"{phase}={self.rule(phase)}" for phase in PHASES if self.rule(phase) is not None]
        return ",".join(sparse) or "dense"


def _spell(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
