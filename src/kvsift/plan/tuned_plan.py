"""Tuned plans: what ``kvsift tune`` found for a model, and what ``plan="auto"`` stands for.

A tuned plan is a JSON file that names its model by fingerprint: ``kvsift-plan.json`` in the model's directory, or one
in the user's cache. Anchors of its plan are inside, so that the file alone can be moved to another machine:

    {"format": "kvsift plan 1", "model": {"name": ..., "fingerprint": ...}, "device": "cpu",
     "plan": "sketch:budget=512:anchors=kvsift-plan.json", "anchors": {...} or null, ... what tune reports}
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

from kvsift.atomic_files import user_cache, write_atomically
from kvsift.checkpoint import fingerprint
from kvsift.errors import DamagedFile, InputError, UnsupportedPlan, WrongFile, one_line
from kvsift.methods.common import anchors
from kvsift.methods.common.anchors import AnchoredMethod
from kvsift.plan.plan import PHASES, Plan
from kvsift.plan.syntax import PlanSpec, is_auto, parse_plan

DEFAULT_PLAN = "sketch:budget=1024"
DRAFTS = f"{DEFAULT_PLAN}:dense_layers=none"  # of exact answers: dense layers take longer than what drafts gain by them
GUARD = "min_recovery=0.5"  # the README's table: with 0.7 sketch answers as dense attention does
FORMAT = "kvsift plan 1"
FILE = "kvsift-plan.json"
DEVICES = ("cpu", "cuda")
log = logging.getLogger("kvsift")


@dataclass(frozen=True)
class TunedPlan:
    """A plan that was found for a model.

    Attributes:
        plan: the plan; the anchors of its method, if any, are those of the file that it names.
        name, fingerprint: those of the model (``checkpoint.fingerprint``).
        device: "cpu" or "cuda", where candidates were timed.
        report: what else the file holds, ready for JSON.
        path: path of the file that it was read from; None: it was not.
    """

    plan: Plan
    name: str
    fingerprint: str
    device: str
    report: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None


def default_path(fingerprint: str, device_type: str) -> Path:
    """Return the file of a model in the user's cache, whose folder may not exist yet."""
    return user_cache() / "plans" / f"{fingerprint}-{device_type}.json"


def write(path: Path, tuned: TunedPlan) -> None:
    """Write a tuned plan atomically, with the contents of its anchor file; folders are made.

    Raises:
        InputError: for rules with different anchors.
        OSError: if it cannot be written.
    """
    sources = {rule.method.anchors for rule in tuned.plan.rules if isinstance(rule.method, AnchoredMethod)} or {None}
    if len(sources) > 1:
        raise UnsupportedPlan(
            f"the rules of {tuned.plan} differ in their anchors, and the file of a tuned plan holds one."
        )
    [source] = sources
    document = {
        "format": FORMAT,
        "model": {"name": tuned.name, "fingerprint": tuned.fingerprint},
        "device": tuned.device,
        "plan": str(tuned.plan).replace(f":anchors={source}", f":anchors={path.name}"),
        "anchors": None if source is None else anchors.contents(source),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({**document, **tuned.report, **document}, indent=1) + "\n")


def read(path: Path) -> TunedPlan:
    """Read a tuned plan. Its anchors are read from the file itself, wherever it has been moved.

    Raises:
        InputError: if the file is none, or damaged.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        found = document["format"]
        if found != FORMAT:
            raise WrongFile(f"its format is {found!r}, and this kvsift reads {FORMAT!r}")
        own = {"format", "model", "device", "plan", "anchors"}
        name, made_for, device = document["model"]["name"], document["model"]["fingerprint"], document["device"]
        if device not in DEVICES:
            raise WrongFile(f"its device is {device!r}, and one of {', '.join(DEVICES)} is expected")
        if document["anchors"] is None:
            plan = parse_plan(document["plan"])
        else:
            plan = _with_anchors(parse_plan(re.sub(r":anchors=[^:,]*", "", document["plan"])), path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(
            f"{path} cannot be used as a tuned plan: {one_line(error)}. Remove it, or write it again with kvsift tune."
        ) from error
    report = {key: value for key, value in document.items() if key not in own}
    return TunedPlan(plan, str(name), str(made_for), device, report, path)


def _with_anchors(plan: Plan, path: Path) -> Plan:
    anchored = {
        phase: replace(rule, method=replace(rule.method, anchors=str(path)))
        for phase in PHASES
        if (rule := plan.rule(phase)) is not None and isinstance(rule.method, AnchoredMethod)
    }
    if not anchored:
        raise DamagedFile(f"it has anchors, and the plan {plan} uses none")
    return replace(plan, **anchored)


def find(directory: Path, device_type: str) -> TunedPlan | None:
    """Return the tuned plan of a model: that in its directory, else that in the user's cache; one that was tuned on
    devices of this type before one that was not. What is not taken, and why, is logged.

    Raises:
        InputError: if the directory has no whole checkpoint.
    """
    made_for = fingerprint(directory)
    types = [device_type, *(device for device in DEVICES if device != device_type)]
    paths = [directory / FILE, *(default_path(made_for, device) for device in types)]
    found = [tuned for path in paths if path.is_file() and (tuned := _of_model(path, made_for)) is not None]
    found.sort(key=lambda tuned: tuned.device != device_type)  # stable
    if not found:
        return None
    if found[0].device != device_type:
        log.warning(
            "%s was tuned on another device, %s: its times are not those of this one, %s.",
            found[0].path, found[0].device, device_type,
        )  # fmt: skip
    return found[0]


def _of_model(path: Path, made_for: str) -> TunedPlan | None:
    """Return the tuned plan of a file, or None and say why not."""
    try:
        tuned = read(path)
    except InputError as error:
        log.warning("%s", error)
        return None
    if tuned.fingerprint == made_for:
        return tuned
    log.warning("%s is ignored: it was tuned for another model, %s, or for other weights.", path, tuned.name)
    return None


class ModelPlans:
    """Plans of all spellings for one model: ``auto`` is its tuned plan, else the default plan with a guard, which is
    logged. It is looked for once.

    Args:
        directory: directory of the model; None: it is not on this machine's disk.
        device_type: type of the device that the model runs on, "cpu" or "cuda".
        model: how a command names the model; by default by its directory.
        no_guard: why there can be no guard; empty: there can be one.
    """

    def __init__(self, directory: Path | None, device_type: str, *, model: str = "", no_guard: str = "") -> None:
        self._directory, self._device_type, self._no_guard = directory, device_type, no_guard
        self._model = model or ("MODEL" if directory is None else quote(str(directory)))

    def parse(self, spec: PlanSpec) -> Plan:
        """Return the plan of a spelling.

        Raises:
            InputError: as ``parse_plan``.
        """
        return self.auto if is_auto(spec) else parse_plan(spec)

    @cached_property
    def auto(self) -> Plan:
        """The plan that ``auto`` stands for."""
        tuned, why = None, "is found"
        try:
            tuned = None if self._directory is None else find(self._directory, self._device_type)
        except InputError as error:
            why = f"can be looked for ({one_line(error)})"
        if tuned is not None:
            log.info("plan=auto is %s, from %s.", tuned.plan, tuned.path)
            return tuned.plan
        plan = parse_plan(DEFAULT_PLAN if self._no_guard else f"{DEFAULT_PLAN}:{GUARD}")
        log.warning(
            "plan=auto: no tuned plan of this model %s. The default plan is taken %s: %s. kvsift tune %s finds a plan.",
            why, f"without a guard ({self._no_guard})" if self._no_guard else "with a guard", plan, self._model,
        )  # fmt: skip
        return plan

    def verified(self, plan: Plan) -> Plan:
        """Return the plan under which exact answers are drafted: that of ``auto`` needs no guard there, and the default
        plan no dense layers."""
        if plan.decode is not None and plan.is_guarded and self.__dict__.get("auto") == plan:
            plan = replace(plan, decode=replace(plan.decode, budget=replace(plan.decode.budget, min_recovery=None)))
        return parse_plan(DRAFTS) if plan == parse_plan(DEFAULT_PLAN) else plan
