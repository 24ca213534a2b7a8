"""What a plan can do where it is to run: the one place that asks all classes for their objections.

A class that has a limit declares it, as a condition and a sentence. Both are about one thing, ``it``: a ``PlanCase``,
or the plan, rule or model in it. A sentence may name attributes of it, ``{it.decode}``, and what the condition has
returned, ``{found}``; it says what was given and the nearest legal choices.

    Rule.objections, Plan.objections         budgets, and pairs of rules, that make no sense anywhere
    Store.objections                         plans that a placement cannot carry out
    FastPath.objections, GenerationSettings.objections, DecodeBatch.objections, DecodeLayer.objections,
    Method.not_captured, Store.not_captured  decode steps that are composed, not captured
    Step.objections, DecoderStep.objections, TransformersStep.objections  models whose steps are composed, or not fused
    Plan.not_shared, ModelRunner.not_pooled  prompts whose pages are not shared, and not in the pool of all
    EXACT_PLANS, EXACT_PLACES                exact answers (``engine.exactness``)
    Method.not_in_batches, vllm.settings, vllm.refusals  what cannot be done under vLLM
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from kvsift.errors import InputError
from kvsift.plan.placement import Placement, PlacementSpec
from kvsift.types import Objections, Rope

DEVICE = Placement()
UNKNOWN_ROPE = "it must do so in all layers alike, whatever the length of the context"


@dataclass(frozen=True)
class PlanCase:
    """A plan, and what it is to run on, as far as it matters to a question.

    Attributes:
        plan: a ``Plan``; it declares objections of its own, so its module imports this one.
        place: where KV is.
        on_gpu: the model is on a GPU.
        probe_every: steps between two probes; 0: none.
        rope: how the model rotates queries and keys, or why that is not known.
        model: of transformers.
        settings: of its generation_config.json (``models.transformers_generation``).
        runner: of the model (``engine.model_runner``), or its fast path.
    """

    plan: Any
    place: Placement = DEVICE
    on_gpu: bool = False
    probe_every: int = 0
    rope: Rope | str = UNKNOWN_ROPE
    model: Any = None
    settings: Any = None
    runner: Any = None


def reasons(it: Any, *tables: Objections) -> Iterator[str]:
    """Yield the sentences whose conditions hold, in their order; none where ``it`` is None, as a rule may be."""
    for holds, sentence in chain(*tables):
        if it is not None and (found := holds(it)):
            yield sentence.format(it=it, found=found)


def reason(it: Any, *tables: Objections) -> str | None:
    """Return the first sentence whose condition holds; None if there is no objection."""
    return next(reasons(it, *tables), None)


def verdict(it: Any, paths: Mapping[str, Objections]) -> tuple[str, list[str]]:
    """Return the first path to which there is no objection, and the first objection to each path before it; ``paths``
    begins with the best, and "" is returned if all of them have objections."""
    against = list[str]()
    for path, table in paths.items():
        if (why := reason(it, table)) is None:
            return path, against
        against.append(why)
    return "", against


def refuse(found: Iterable[str]) -> None:
    """Raise an ``InputError`` of these sentences, if there are any."""
    if text := " ".join(found):
        raise InputError(text)


def check(it: Any, *tables: Objections) -> None:
    """Refuse something with the first objection to it (``InputError``)."""
    refuse(islice(reasons(it, *tables), 1))


def check_placement(plan: Any, placement: PlacementSpec, on_gpu: bool = False) -> None:
    """Refuse a plan that cannot run under a placement, with every reason.

    Raises:
        InputError: also if there is no such placement.
    """
    case = PlanCase(plan, Placement.of(placement), on_gpu)
    refuse(reasons(case, case.place.store.objections))


NO_PROBES: Objections = (
    (lambda case: case.plan.is_guarded and not case.probe_every,
     "min_recovery={it.plan.decode.budget.min_recovery} is checked by probes, and probe_every=0 takes none. Give "
     "probe_every=16, for instance, or leave out min_recovery."),
)  # fmt: skip
NO_ROPE: Objections = (
    (lambda case: isinstance(case.rope, str)
     and next((rule for rule in case.plan.rules if rule.method.traits.repositions), None),
     "{found} sees tokens from other positions, and how this model rotates queries and keys is not known: {it.rope}. "
     "Give positions=absolute."),
)  # fmt: skip
ONLY_DRAFTS: Objections = (
    (lambda plan: plan.decode is not None and plan.decode.method.traits.drafts_only,  # of a plan, not a case
     "{it.decode} selects what a verification has found, and only exact decoding verifies. Give exact=True (--exact), "
     "or name a method such as sketch."),
)  # fmt: skip
