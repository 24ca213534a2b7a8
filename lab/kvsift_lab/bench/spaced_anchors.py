"""Anchor files for measuring time: layers that select at equal distances, without a calibration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvsift.errors import UnsupportedPlan
from kvsift.methods.common.anchors import AnchoredMethod, AnchorMap, Reuse, write
from kvsift.plan.plan import Plan
from kvsift.types import Origin


def with_spaced_anchors(
    plan: Plan, origin: Origin, num_layers: int, num_kv_heads: int, count: int, path: Path
) -> Plan:  # fmt: skip
    """Let so many sparse layers, evenly spaced, select for those above, by a file that is written. Each KV head takes
    the list of another one.

    Args:
        plan: a plan that ``require_anchored`` lets pass.
        origin: the model that the file is for.
        num_layers, num_kv_heads: those of the model.
        count: layers that select, at most.
        path: path of the file.
    """
    assert plan.decode is not None
    assert isinstance(plan.decode.method, AnchoredMethod)
    dense = plan.decode.budget.dense_layers
    layers = [layer for layer in range(num_layers) if layer not in dense]
    count = min(count, len(layers))
    anchors = [layers[number * len(layers) // count] for number in range(count)]
    heads = tuple(reversed(range(num_kv_heads)))
    reuse = {
        layer: Reuse(max(anchor for anchor in anchors if anchor < layer), heads, 1.0)
        for layer in layers
        if layer not in anchors
    }
    write(path, AnchorMap.of(origin, anchors, reuse, dense, {}))
    return replace(plan, decode=replace(plan.decode, method=replace(plan.decode.method, anchors=str(path))))


def require_anchored(count: int | None, plan: Plan, spec: str) -> None:
    """Refuse ``--anchors`` for a plan without layers that could reuse a selection (``InputError``)."""
    if count and not (plan.decode and isinstance(plan.decode.method, AnchoredMethod)):
        raise UnsupportedPlan(f"--anchors {count}: no layer reuses selections under {spec!r}; sketch can.")
