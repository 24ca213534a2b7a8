"""Records of an explanation: passages, what the layers of the run read, and what methods would read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch


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

    def as_dict(self) -> dict[str, Any]:
        """Return the record for JSON."""
        return asdict(self)
