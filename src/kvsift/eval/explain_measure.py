"""What layers and methods read of each passage, from the tokens that were visible and their exact attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvsift.eval.explain_panel import ORACLE, RUN, Shown
from kvsift.eval.explanation import Choice, LayerReading, Passage
from kvsift.runtime.plan import Rule
from kvsift.runtime.probe import measured


def _by_passage(rows: Tensor, passages: Sequence[Passage]) -> Tensor:
    """Sums over the tokens of each passage, [num_heads, num_tokens] -> [num_heads, num_passages]."""
    return torch.stack([rows[:, each.start : each.stop].float().sum(1) for each in passages], 1)


def _seen(visible: Tensor, passages: Sequence[Passage]) -> Tensor:
    sizes = torch.tensor([each.stop - each.start for each in passages], device=visible.device)
    return _by_passage(visible, passages) / sizes


def reading_of(shown: Shown, passages: Sequence[Passage]) -> LayerReading:
    """What the run read in one layer."""
    visible, oracle = shown.visible[RUN], shown.visible[ORACLE]
    mass = _by_passage(_attention(shown), passages)
    recall, recovery = measured(shown.weights, visible)
    chosen = None if bool(oracle.all()) else _seen(oracle, passages).mean(0).tolist()
    return LayerReading(shown.layer, mass.tolist(), _seen(visible, passages).tolist(), chosen, recall, recovery)


def attention_of(layers: Sequence[Shown]) -> list[float]:
    """What the run gave to each token, a mean over layers and heads."""
    shares: list[float] = torch.stack([_attention(shown).mean(0).cpu() for shown in layers]).mean(0).tolist()
    return shares


def _attention(shown: Shown) -> Tensor:
    """Attention of the run over what it saw, [num_query_heads, num_tokens]; a head's sums to 1."""
    weights = shown.weights * shown.visible[RUN]
    return weights / weights.sum(1, keepdim=True)


def choices_of(layers: Sequence[Shown], rules: Mapping[str, Rule], passages: Sequence[Passage]) -> list[Choice]:
    """What each rule shows, next to the oracle, in the layers where the oracle has to choose; none if it never has."""
    sparse = [each for each in layers if not bool(each.visible[ORACLE].all())]
    return [_choice(name, rule, sparse, passages) for name, rule in rules.items()] if sparse else []


def _choice(name: str, rule: Rule, layers: Sequence[Shown], passages: Sequence[Passage]) -> Choice:
    text = [slice(each.start, each.stop) for each in passages if each.kind == "text"]
    chosen = slice(text[0].start, text[-1].stop)
    rows = []
    for shown in layers:
        visible, oracle = shown.visible[name], shown.visible[ORACLE]
        recall, recovery = measured(shown.weights, visible)
        both, wanted = (tensor[:, chosen].sum(1).float() for tensor in (visible & oracle, oracle))
        overlap = float((both / wanted.clamp_min(1)).mean())
        count = float(visible.sum(1).float().mean())
        measures = {"visible_tokens": count, "recall": recall, "recovery": recovery, "overlap": overlap}
        rows.append({"layer": shown.layer, **measures})
    means = {key: sum(row[key] for row in rows) / len(rows) for key in measures}
    seen = torch.stack([_seen(shown.visible[name], passages).mean(0) for shown in layers]).mean(0)
    return Choice(name=name, plan=str(rule), passages=seen.tolist(), layers=rows, **means)
