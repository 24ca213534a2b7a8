"""What is found out about one token of an answer: passages, who read them, and who would have."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Passage:
    """Consecutive tokens of the prompt: "sinks" or "window", always visible, or "text", which has to be chosen."""

    start: int
    stop: int
    kind: str
    text: str


@dataclass(frozen=True)
class LayerReading:
    """What one layer read for the token; lists [num_query_heads][num_passages].

    Attributes:
        layer: true index.
        mass: attention that the run gave to a passage, of what it saw; a head's sum to 1.
        seen: share of the passage's tokens that were visible.
        oracle: share of the passage's tokens that the oracle shows, a mean over heads; None if the layer is dense.
        recall: share of the ten heaviest tokens that were visible, a mean over heads.
        recovery: attention mass on what was visible, likewise.
    """

    layer: int
    mass: list[list[float]]
    seen: list[list[float]]
    oracle: list[float] | None
    recall: float
    recovery: float


@dataclass(frozen=True)
class Choice:
    """What a rule shows for the token, next to the oracle at the same budget; means over heads and sparse layers.

    Attributes:
        name: of the method, as it was asked for.
        plan: the rule as it was resolved.
        visible_tokens: per head.
        recall: share of the ten heaviest tokens that it shows.
        recovery: attention mass on what it shows.
        overlap: share of the oracle's tokens that it shows, always-visible ones left out.
        passages: share of each passage's tokens that it shows.
        layers: the four before, layer by layer.
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
    """One token of an answer.

    Attributes:
        answer: the whole of it; ``tokens``: its pieces, of which ``token`` is explained.
        position: of the query that asked for it, the last token before it.
        passages: all tokens up to the query.
        words: of each passage, with the attention that each got, a mean over layers and heads.
        readings: of every layer, as the run read.
        choices: the oracle's, then those of the methods asked for; over no layer if all are dense.
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
    choices: list[Choice]

    def attention(self) -> list[float]:
        """What each passage got, a mean over layers and heads."""
        rows = torch.tensor([row for reading in self.readings for row in reading.mass])
        means: list[float] = rows.mean(0).tolist()
        return means

    def most_read(self, count: int) -> list[int]:
        """Passages that had to be chosen, by the attention they got."""
        got = self.attention()
        text = [index for index, passage in enumerate(self.passages) if passage.kind == "text"]
        return sorted(text, key=lambda index: -got[index])[:count]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)
