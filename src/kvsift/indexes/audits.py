"""Comparisons of a graph with a scan during use.

A graph is tuned on queries of the prompt. Queries of questions are less like those, and queries of generated tokens
drift away from them. Therefore a scan of all keys answers a step from time to time, and heads whose graph would have
missed keys widen their search.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

TARGET = 0.98  # recall; with 0.95 some needles were missed that an exact search finds
WIDER, WIDEST = 1.5, 16.0  # factors of the beam: at each audit below the target, and at most


@dataclass(frozen=True)
class Audit:
    """One comparison.

    Attributes:
        length: tokens cached at the time; a roll-back to fewer undoes it.
        found: recall of the graph, per KV head.
        widths: multiple of its beam that each KV head searches afterwards.
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
        """Present widths of the KV heads; None before the first audit."""
        return self.log[-1].widths if self.log else None

    @property
    def failed(self) -> bool:
        """Whether the last audit was below the target in some head: then the next step is audited too."""
        return bool(self.log) and min(self.log[-1].found) < TARGET

    def take(self, length: int, ids: Tensor, exact: Tensor, num_kv_heads: int) -> None:
        """Compare the keys that a graph and a scan found, int64 [num_query_heads, k] each."""
        hits = (ids.unsqueeze(2) == exact.unsqueeze(1)).any(1).float()
        recalls = hits.unflatten(0, (num_kv_heads, -1)).mean((1, 2)).tolist()
        before = self.widths or (1.0,) * num_kv_heads
        pairs = zip(before, recalls)
        widths = tuple(min(width * WIDER, WIDEST) if recall < TARGET else width for width, recall in pairs)
        self.log.append(Audit(length, tuple(recalls), widths))

    def fork(self) -> Audits:
        return Audits(list(self.log))

    def crop(self, length: int) -> None:
        self.log = [audit for audit in self.log if audit.length <= length]

    def describe(self) -> dict[str, Any]:
        """Number of audits, mean recall of each, and the present widths."""
        shares = [sum(audit.found) / len(audit.found) for audit in self.log]
        return {"count": len(shares), "found": [round(share, 4) for share in shares], "widths": self.widths}


def is_due(tokens: int, every: int) -> bool:
    """Whether the step ``tokens`` after the build is audited: at powers of two, then at every ``every``-th; never if
    that is 0."""
    if every == 0 or tokens < 0:
        return False
    return tokens % every == 0 if tokens >= every else tokens & (tokens - 1) == 0
