"""Sums over passages: what layers attend to and what methods select, from visible tokens and exact attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvsift.layer.probe import recall_and_recovery
from kvsift.plan.plan import Rule
from kvsift_lab.eval.explain.explanation import LayerReading, MethodReading, Passage
from kvsift_lab.eval.explain.observer import ORACLE, RUN, LayerObservation


def layer_reading(layer: LayerObservation, passages: Sequence[Passage]) -> LayerReading:
    """Return what the run read in one layer."""
    visible, oracle = layer.visible[RUN], layer.visible[ORACLE]
    mass = _by_passage(_attention(layer), passages)
    recall, recovery = recall_and_recovery(layer.weights, visible)
    selected = None if bool(oracle.all()) else _visible_share(oracle, passages).mean(0).tolist()
    return LayerReading(
        layer.layer, mass.tolist(), _visible_share(visible, passages).tolist(), selected, recall, recovery
    )


def mean_attention(layers: Sequence[LayerObservation]) -> list[float]:
    """Return the attention of the run to each token, a mean over layers and heads."""
    shares: list[float] = torch.stack([_attention(layer).mean(0).cpu() for layer in layers]).mean(0).tolist()
    return shares


def method_readings(
    layers: Sequence[LayerObservation], rules: Mapping[str, Rule], passages: Sequence[Passage]
) -> list[MethodReading]:
    """Return what each rule reads in the layers that are sparse for the oracle; empty if no layer is."""
    sparse = [layer for layer in layers if not bool(layer.visible[ORACLE].all())]
    return [_method_reading(name, rule, sparse, passages) for name, rule in rules.items()] if sparse else []


def _method_reading(
    name: str, rule: Rule, layers: Sequence[LayerObservation], passages: Sequence[Passage]
) -> MethodReading:
    selected = [passage for passage in passages if passage.is_candidate]
    candidates = slice(selected[0].start, selected[-1].stop)
    rows = []
    for layer in layers:
        visible, oracle = layer.visible[name], layer.visible[ORACLE]
        recall, recovery = recall_and_recovery(layer.weights, visible)
        both, all_of_oracle = (tokens[:, candidates].sum(1).float() for tokens in (visible & oracle, oracle))
        overlap = float((both / all_of_oracle.clamp_min(1)).mean())
        count = float(visible.sum(1).float().mean())
        measures = {"visible_tokens": count, "recall": recall, "recovery": recovery, "overlap": overlap}
        rows.append({"layer": layer.layer, **measures})
    means = {key: sum(row[key] for row in rows) / len(rows) for key in measures}
    shares = torch.stack([_visible_share(layer.visible[name], passages).mean(0) for layer in layers]).mean(0)
    return MethodReading(name=name, plan=str(rule), passages=shares.tolist(), layers=rows, **means)


def _attention(layer: LayerObservation) -> Tensor:
    """Return the attention of the run over its visible tokens, [num_query_heads, num_tokens]; a head sums to 1."""
    weights = layer.weights * layer.visible[RUN]
    return weights / weights.sum(1, keepdim=True)


def _by_passage(rows: Tensor, passages: Sequence[Passage]) -> Tensor:
    """Sum over the tokens of each passage, [num_heads, num_tokens] -> [num_heads, num_passages]."""
    return torch.stack([rows[:, passage.start : passage.stop].float().sum(1) for passage in passages], 1)


def _visible_share(visible: Tensor, passages: Sequence[Passage]) -> Tensor:
    lengths = torch.tensor([passage.stop - passage.start for passage in passages], device=visible.device)
    return _by_passage(visible, passages) / lengths
