"""What a plan can do where it is to run: the one place that asks all classes for their objections.

A class that has a limit declares it: a condition and a sentence, both about one thing, ``it``, a ``PlanCase`` or the
plan, rule or model in it. A sentence may name attributes of that, ``{it.decode}``, and what the condition has returned,
``{found}``; it names what was given and the nearest legal choices. Most tables are called ``objections``; those of a
method or store are called after what it cannot do, such as ``not_captured``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from kvsift.errors import UnsupportedPlan
from kvsift.plan.placement import Placement, PlacementSpec
from kvsift.types import Objections, Rope

DEVICE = Placement()
UNKNOWN_ROPE = "it must do so in all layers alike, whatever the length of the context"


@dataclass(frozen=True)
class PlanCase:
    """A plan, and what it is to run on, as far as it matters to a question.

    Attributes:
        plan: a ``Plan``, whose module imports this one.
        rope: how the model rotates queries and keys, or why that is not known.
        model, settings: a model of transformers, and the settings of its generation_config.json.
        runner, fast_path: the model's (``engine.model_runner``, ``engine.graphs.fast_path``).
    """

    plan: Any
    place: Placement = DEVICE
    on_gpu: bool = False
    probe_every: int = 0
    rope: Rope | str = UNKNOWN_ROPE
    model: Any = None
    settings: Any = None
    runner: Any = None
    fast_path: Any = None


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


def check(it: Any, *tables: Objections, name_all: bool = False) -> None:
    """Refuse something with the first objection to it, or with all of them (``InputError``)."""
    if why := " ".join(islice(reasons(it, *tables), None if name_all else 1)):
        raise UnsupportedPlan(why)


def check_placement(plan: Any, placement: PlacementSpec, on_gpu: bool = False) -> None:
    """Refuse a plan that cannot run under a placement, or a placement that does not exist (``InputError``)."""
    case = PlanCase(plan, Placement.of(placement), on_gpu)
    check(case, case.place.store.objections, name_all=True)


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
ONLY_DRAFTS: Objections = (  # of a plan, not a case
    (lambda plan: plan.decode is not None and plan.decode.method.traits.drafts_only,
     "{it.decode} selects what a verification has found, and only exact decoding verifies. Give exact=True (--exact), "
     "or name a method such as sketch."),
)  # fmt: skip
