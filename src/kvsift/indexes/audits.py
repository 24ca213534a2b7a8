"""Whether a graph still finds what a scan finds, looked at while it is in use.

It was tried on queries of the prompt. Questions are less like those, and what is generated drifts away from them. So
now and then a step is answered by a scan of all keys, and what the graph would have missed says which heads must
search wider from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

TARGET = 0.98  # of the keys that a scan finds; with 0.95 some needles were missed that an exact search finds
WIDER, WIDEST = 1.5, 16.0  # times the beam: at each audit that finds too little, and at most


@dataclass(frozen=True)
class Audit:
    """One comparison.

    Attributes:
        length: tokens cached then; a roll-back to fewer undoes it.
        found: share of a scan's keys that the graph found, per KV head.
        widths: how many times its beam each KV head searches from then on.
    """

    length: int
    found: tuple[float, ...]
    widths: tuple[float, ...]


@dataclass
class Audits:
    """All audits of one sequence in one layer, in order."""

    log: list[Audit] = field(default_factory=list)

    @property
    def widths(self) -> tuple[float, ...] | None:
        """Of each KV head now; None before the first audit."""
        return self.log[-1].widths if self.log else None

    @property
    def failed(self) -> bool:
        """Whether the last audit found too little in some head: the next step is audited too, and so on until a graph
        that is wide enough finds what a scan finds."""
        return bool(self.log) and min(self.log[-1].found) < TARGET

    def take(self, length: int, ids: Tensor, exact: Tensor, num_kv_heads: int) -> None:
        """Compare what was found with what a scan finds, int64 [num_query_heads, k] each."""
        hits = (ids.unsqueeze(2) == exact.unsqueeze(1)).any(1).float()
        found = hits.unflatten(0, (num_kv_heads, -1)).mean((1, 2)).tolist()
        before = self.widths or (1.0,) * num_kv_heads
        widths = tuple(min(width * WIDER, WIDEST) if of < TARGET else width for width, of in zip(before, found))
        self.log.append(Audit(length, tuple(found), widths))

    def fork(self) -> Audits:
        return Audits(list(self.log))

    def crop(self, length: int) -> None:
        self.log = [audit for audit in self.log if audit.length <= length]

    def describe(self) -> dict[str, Any]:
        """How many, the share found in each, mean of the KV heads, and the widths now."""
        shares = [sum(audit.found) / len(audit.found) for audit in self.log]
        return {"count": len(shares), "found": [round(share, 4) for share in shares], "widths": self.widths}


def is_due(tokens: int, every: int) -> bool:
    """Whether the step ``tokens`` after the build is audited: at powers of two, when least is known of the questions,
    then at every ``every``-th; never if that is 0."""
    if every == 0 or tokens < 0:
        return False
    return tokens % every == 0 if tokens >= every else tokens & (tokens - 1) == 0
