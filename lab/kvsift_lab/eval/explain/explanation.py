"""Records of an explanation, and how they are made: passages of a prompt, what the layers of the run read, and what
methods would read, from visible tokens and exact attention.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvsift.layer.probe import recall_and_recovery
from kvsift.plan.plan import Rule
from kvsift_lab.eval.explain.observer import ORACLE, RUN, LayerObservation

TOP, SHOWN = 5, 0.02  # passages per list; the least share of a head's attention in it


@dataclass(frozen=True)
class Passage:
    """Consecutive tokens of the prompt.

    Attributes:
        start, stop: positions of its tokens.
        kind: "sinks" or "window", which are always visible; "text" for a part of the document, or "prompt" for what is
            around it (chat format, system prompt, question), which are selected.
        text: of its tokens.
        line: of the document, from 1, in which it begins; 0 outside of the document.
    """

    start: int
    stop: int
    kind: str
    text: str
    line: int = 0

    @property
    def is_candidate(self) -> bool:
        """Whether methods choose if it is visible."""
        return self.kind in ("text", "prompt")


@dataclass(frozen=True)
class LayerReading:
    """What one layer reads for the token; lists are [num_query_heads][num_passages].

    Attributes:
        layer: index in the model.
        mass: attention of the run to a passage, over its visible tokens; a head sums to 1.
        seen: share of the passage's tokens that is visible.
        oracle: share of the passage's tokens that the oracle selects, a mean over heads; None if the layer is dense.
        recall: share of the ten heaviest tokens that is visible, a mean over heads.
        recovery: attention mass on visible tokens, a mean over heads.
    """

    layer: int
    mass: list[list[float]]
    seen: list[list[float]]
    oracle: list[float] | None
    recall: float
    recovery: float


@dataclass(frozen=True)
class MethodReading:
    """What a method reads for the token at the budget of the oracle; means over heads and sparse layers.

    Attributes:
        name: of the method, as given.
        plan: the resolved rule.
        visible_tokens: per head.
        recall: share of the ten heaviest tokens that is visible.
        recovery: attention mass on visible tokens.
        overlap: share of the oracle's tokens that is visible, without sinks and window.
        passages: share of each passage's tokens that is visible.
        layers: the four numbers before, layer by layer.
    """

    name: str
    plan: str
    visible_tokens: float
    recall: float
    recovery: float
    overlap: float
    passages: list[float]
    layers: list[dict[str, float]]


@dataclass(frozen=True)
class Explanation:
    """Explanation of one token of an answer.

    Attributes:
        answer: the whole answer; ``tokens``: its pieces; ``token``: the index of the explained piece.
        position: of the query that predicts the token, which is the last token before it.
        passages: all tokens up to the query.
        words: of each passage, with their attention, a mean over layers and heads.
        readings: of every layer of the run.
        choices: what the oracle reads, then each compared method; empty if all layers are dense.
    """

    model: str
    plan: str
    question: str
    answer: str
    tokens: list[str]
    token: int
    position: int
    passages: list[Passage]
    words: list[list[tuple[str, float]]]
    readings: list[LayerReading]
    choices: list[MethodReading]

    def attention(self) -> list[float]:
        """Return the attention to each passage, a mean over layers and heads."""
        rows = torch.tensor([row for reading in self.readings for row in reading.mass])
        means: list[float] = rows.mean(0).tolist()
        return means

    def most_read(self, count: int) -> list[int]:
        """Return the indices of the passages of the document with the most attention."""
        attention = self.attention()
        text = [index for index, passage in enumerate(self.passages) if passage.kind == "text"]
        return sorted(text, key=lambda index: -attention[index])[:count]

    def most_read_by(self, reading: LayerReading, head: int) -> list[int]:
        """Return the indices of the passages that a head attends most, if they have a share worth a line."""
        mass = reading.mass[head]
        order = sorted(range(len(mass)), key=lambda index: -mass[index])
        return [index for index in order[:TOP] if mass[index] >= SHOWN]

    def visible_to(self, reading: LayerReading, head: int) -> str:
        """Return how many passages of the document a head sees a part of."""
        text = [seen for seen, passage in zip(reading.seen[head], self.passages) if passage.kind == "text"]
        return f"{sum(seen > 0 for seen in text)} of {len(text)}"

    def name(self, index: int) -> str:
        """Return the number of a passage of the document, or the kind of another."""
        kind = self.passages[index].kind
        return str(index) if kind == "text" else kind

    def as_dict(self) -> dict[str, Any]:
        """Return the record for JSON."""
        return asdict(self)


NO_SPACES = 0x2E80  # scripts from this code point on have no spaces: every character may begin a word


def word_starts(pieces: Sequence[str]) -> list[bool]:
    """Return for each token whether a word begins with it."""
    starts, last = [], " "
    for piece in pieces:
        first = piece[:1]
        starts.append(bool(first) and (first.isspace() or last.isspace() or max(ord(first), ord(last)) >= NO_SPACES))
        last = piece[-1:] or last
    return starts


def passages_of(pieces: Sequence[str], spans: tuple[int, int], size: int, document: str = "") -> list[Passage]:
    """Return the sinks, passages of at most ``size`` tokens, and the window.

    A passage ends before a word, unless it would lose more than half of its tokens, and at the ends of the document.

    Args:
        pieces: texts of the tokens of the prompt.
        spans: (stop of the sinks, start of the window).
        size: the most tokens of a passage.
        document: a part of the prompt; if it is not found, all passages count as parts of it.
    """
    starts, (sinks, window) = word_starts(pieces), spans
    offsets = list(accumulate(map(len, pieces), initial=0))  # of tokens in the text of the prompt
    prompt = "".join(pieces)
    begin = max(prompt.find(document.strip()), 0)
    end = begin + len(document.strip()) if document and document.strip() in prompt else len(prompt)
    first, last = bisect_right(offsets, begin) - 1, bisect_left(offsets, end)  # tokens of the document
    edges, start = [(0, sinks, "sinks")], sinks
    while start < window:
        inside = first <= start < last
        limit = min(window, last if inside else first if start < first else window)
        stop = min(start + size, limit)
        if stop < limit:
            stop = next((at for at in range(stop, start + size // 2, -1) if starts[at]), stop)
        edges.append((start, stop, "text" if inside else "prompt"))
        start = stop
    edges.append((window, len(pieces), "window"))
    passages = []
    for start, stop, kind in edges:
        line = prompt.count("\n", begin, max(offsets[start], begin)) + 1 if first <= start < last else 0
        passages.append(Passage(start, stop, kind, "".join(pieces[start:stop]), line))
    return [passage for passage in passages if passage.start < passage.stop]


def words_of(
    pieces: Sequence[str], shares: Sequence[float], passages: Sequence[Passage]
) -> list[list[tuple[str, float]]]:
    """Return the words of every passage, each with the sum of the attention to its tokens."""
    starts = word_starts(pieces)
    passage_words = []
    for passage in passages:
        words: list[tuple[str, float]] = []
        for at in range(passage.start, passage.stop):
            text, share = words.pop() if words and not starts[at] else ("", 0.0)
            words.append((text + pieces[at], share + shares[at]))
        passage_words.append(words)
    return passage_words


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
