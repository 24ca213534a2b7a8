"""The passages of a text that the decode steps of an answer selected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvsift.layer.selection_log import LayerSelections, SelectionLog
from kvsift.plan.plan import Plan
from kvsift.tokenization.text_offsets import Span, TextOffsets

MOST_SPANS = 1000  # of a layer, and of all layers together


@dataclass(frozen=True)
class Passages:
    """Characters of a text that were selected while an answer was decoded, without sinks and local window, which every
    step reads anyway.

    Attributes:
        characters: number of characters of the text.
        all: (start, stop, share) in order: the share of steps, heads and layers that selected these characters.
        layers: the same of each layer that selects.
        note: what the spans do not show; empty if they show everything.
    """

    characters: int
    all: list[Span]
    layers: dict[int, list[Span]]
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return them ready for JSON."""
        layers = {str(layer): spans for layer, spans in self.layers.items()}
        return {"characters": self.characters, "all": self.all, "layers": layers, "note": self.note or None}


def passages_of(log: SelectionLog, offsets: TextOffsets, plan: Plan) -> Passages:
    """Return what the steps of an answer under a plan selected of a text."""
    every = log.layers()
    sparse = {layer: counted for layer, counted in every.items() if counted.selecting_steps}
    total, steps, layers = torch.zeros(log.prompt_length), 0, {}
    for layer, counted in sparse.items():
        selected = counted.by_token(log.prompt_length)
        layers[layer] = offsets.spans(selected / counted.selecting_steps)
        total, steps = total + selected, steps + counted.selecting_steps
    spans = offsets.spans(total / max(steps, 1))
    notes = _notes(plan, every)
    if any(len(each) > MOST_SPANS for each in (spans, *layers.values())):
        notes.append(f"Of each list, up to {MOST_SPANS:,} spans are given, those with the largest shares.")
    kept = {layer: _largest(each) for layer, each in layers.items()}
    return Passages(offsets.characters, _largest(spans), kept, " ".join(notes))


def _largest(spans: list[Span]) -> list[Span]:
    """As many spans as are given. Those with the share of one that is left out are left out too, wherever they are,
    unless all have the same."""
    if len(spans) <= MOST_SPANS:
        return spans
    shares = sorted((share for _, _, share in spans), reverse=True)
    least = shares[MOST_SPANS] if shares[0] > shares[MOST_SPANS] else 0.0
    return [span for span in spans if span[2] > least][:MOST_SPANS]


def _notes(plan: Plan, layers: dict[int, LayerSelections]) -> list[str]:
    """What cannot be told by selections."""
    rule = plan.decode
    if rule is None or rule.method.traits.unbounded:
        return ["Dense attention reads everything."]
    if not layers:
        return ["The answer has no second token: the first one is chosen by the prompt itself, and only later ones "
                "select."]  # fmt: skip
    if not any(counted.selecting_steps for counted in layers.values()):
        return ["Every step read everything: the context fits the budget."]
    notes = []
    if not rule.method.traits.selects:
        notes.append(f"{str(rule).partition(':')[0]} selects nothing: it reads sinks and the local window alone.")
    if dense := [str(layer) for layer, counted in layers.items() if not counted.selecting_steps]:
        notes.append(f"Layers {', '.join(dense)} read everything.")
    mixed = [counted for counted in layers.values() if counted.selecting_steps and counted.dense_steps]
    if mixed:
        most = max(mixed, key=lambda counted: counted.dense_steps)
        steps = most.dense_steps + most.selecting_steps
        notes.append(f"{most.dense_steps} of {steps} steps read everything, and are left out.")
    return notes
