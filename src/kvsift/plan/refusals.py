"""The one place that refuses combinations: reasons against a plan, given what it is to run on."""

from __future__ import annotations

from collections.abc import Iterator

from kvsift.errors import InputError
from kvsift.plan.placement import Placement, PlacementSpec
from kvsift.plan.plan import Plan
from kvsift.types import Rope

UNKNOWN_ROPE = "it must do so in all layers alike, whatever the length of the context"


def reasons_against(plan: Plan, placement: PlacementSpec = "device", on_gpu: bool = False) -> list[str]:
    """Why a plan cannot run under a placement, the model on a GPU or not; empty if it can.

    Each reason says what was given and the nearest legal choices.

    Raises:
        InputError: if there is no such placement.
    """
    return list(_reasons(plan, Placement.of(placement), on_gpu))


def _reasons(plan: Plan, placement: Placement, on_gpu: bool) -> Iterator[str]:
    prefill, decode = plan.prefill, plan.decode
    if on_gpu and not placement.in_host_memory and decode is not None and decode.method.traits.on_host:
        yield (
            f"decode={decode} searches host memory, and with placement={placement.name} keys and values are on the "
            "GPU. Take placement=split, or device=cpu."
        )
    if not placement.in_host_memory:
        return
    if plan.evicts_prompt:
        yield (
            f"{plan} frees what it drops while it reads; placement={placement.name} keeps everything in host memory. "
            "Leave out the placement, or take a rule of decode without evict."
        )
        return
    if prefill is not None and not prefill.method.traits.unbounded:
        yield (
            f"prefill={prefill} needs its KV on the device: with placement={placement.name} prefill is dense. "
            "Leave the prefill rule out, or the placement."
        )
    if decode is not None and decode.evicts:
        yield (
            f"decode={decode} frees what it drops, and placement={placement.name} keeps everything in host memory. "
            "Leave out evict, or the placement."
        )


def check_placement(plan: Plan, placement: PlacementSpec, on_gpu: bool = False) -> None:
    """Refuse a plan that cannot run under a placement (``InputError``, with every reason)."""
    if reasons := reasons_against(plan, placement, on_gpu):
        raise InputError(" ".join(reasons))


def check_drafts(plan: Plan) -> None:
    """Refuse a plan that only drafts (``InputError``)."""
    if plan.decode is not None and plan.decode.method.traits.drafts_only:
        raise InputError(
            f"{plan.decode} selects what a verification has found, and only exact decoding verifies. Give exact=True "
            "(--exact), or name a method such as sketch."
        )


def check_probes(plan: Plan, probe_every: int) -> None:
    """Refuse a plan with min_recovery where no step is probed (``InputError``)."""
    if plan.is_guarded and not probe_every:
        raise InputError(
            f"min_recovery={plan.rules[-1].budget.min_recovery} is checked by probes, and probe_every=0 takes none. "
            "Give probe_every=16, for instance, or leave out min_recovery."
        )


def check_rope(plan: Plan, rope: Rope | None, why: str = "") -> None:
    """Refuse a plan that repositions queries where the model's rotation is not known (``InputError``)."""
    rule = next((rule for rule in plan.rules if rule.method.traits.repositions), None)
    if rule is not None and rope is None:
        raise InputError(
            f"{rule} sees tokens from other positions, and how this model rotates queries and keys is not known: "
            f"{why or UNKNOWN_ROPE}. Give positions=absolute."
        )
