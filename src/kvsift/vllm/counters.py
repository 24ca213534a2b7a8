"""The counters of a phase as vLLM's log and Prometheus show them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from kvsift.layer.accounting import Tally
from kvsift.methods.base import Phase

COUNTED_ONCE = 4  # sums that every rank has and the first exports; the others are of its own heads


@dataclass
class PhaseCounters:
    """What the queries of a phase saw in all layers that plans apply to, for the log and for Prometheus.

    Attributes:
        phase: the phase of these queries.
        rank: rank of the process among those that share the heads: the others see the same tokens, by other heads.
        tally: the sums, one query for each token and layer; bytes are of the heads of this process.
    """

    phase: Phase = "decode"
    rank: int = 0
    tally: Tally = field(default_factory=Tally)
    _logged: tuple[float, ...] = (0.0,) * 8
    _exported: tuple[float, ...] = (0.0,) * 8
    _last_s: float = field(default_factory=monotonic)
    _prometheus: list[Any] | None = None

    def line(self, every_s: float) -> str | None:
        """Return a line about the queries since the last one; None before ``every_s`` seconds, or without any, and on
        all ranks but the first."""
        if self.rank or not every_s or monotonic() - self._last_s < every_s:
            return None
        queries, sparse, visible, context, read, dense, probes, recovery = self._since(self._logged)
        self._logged, self._last_s = self._sums(), monotonic()
        if not queries:
            return None
        if visible >= context:
            return f"kvsift: {queries:.0f} {self.phase} queries, all dense: the plan skipped nothing."
        probed = f", recovery {recovery / probes:.3f} in {probes:.0f} probes" if probes else ""
        return (
            f"kvsift: {queries:.0f} {self.phase} queries, {sparse / queries:.1%} sparse, {visible / queries:.0f} "
            f"visible tokens of {context / queries:.0f} (density {visible / context:.3f}{probed}), {read / dense:.1%} "
            "of the bytes of dense attention read."
        )

    def export(self) -> None:
        """Add to the Prometheus counters, which vLLM shows where its processes share PROMETHEUS_MULTIPROC_DIR."""
        if self._prometheus is None:
            self._prometheus = _new_counters(self.phase) if os.environ.get("PROMETHEUS_MULTIPROC_DIR") else []
        if self._prometheus:
            for counter, amount in [*zip(self._prometheus, self._since(self._exported))][
                COUNTED_ONCE * bool(self.rank) :
            ]:
                counter.inc(amount)
            self._exported = self._sums()

    def _since(self, before: tuple[float, ...]) -> list[float]:
        return [now - then for now, then in zip(self._sums(), before)]

    def _sums(self) -> tuple[float, ...]:
        tally = self.tally
        tokens = float(tally.visible_tokens), tally.context_tokens
        num_bytes = float(tally.kv_bytes_read) + tally.index_bytes_read, tally.kv_bytes_dense
        return (tally.queries, tally.sparse_queries, *tokens, *num_bytes, tally.probes, tally.recovery)


def _new_counters(phase: Phase) -> list[Any]:
    from prometheus_client import Counter

    names = {
        f"kvsift:{phase}_queries": f"Queries of {phase}, one for each token and layer that plans apply to.",
        f"kvsift:{phase}_sparse_queries": "Those that did not see their whole context.",
        f"kvsift:{phase}_visible_tokens": "Tokens that they saw, per head.",
        f"kvsift:{phase}_context_tokens": "Tokens that dense attention would have shown.",
        f"kvsift:{phase}_kv_bytes_read": f"Bytes of keys, values and page summaries read in {phase}.",
        f"kvsift:{phase}_kv_bytes_dense": "Bytes that dense attention would have read.",
    }
    if phase == "decode":
        names["kvsift:probes"] = "Queries of decode that were compared with exact attention."
        names["kvsift:recovery"] = "Softmax mass on what those saw; divided by their number, the mean."
    return [Counter(name, about) for name, about in names.items()]
