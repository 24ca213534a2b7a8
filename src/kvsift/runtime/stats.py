"""Run statistics: what was visible, read and skipped, counted from the selections themselves."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from torch import Tensor

from kvsift.methods.base import Phase
from kvsift.runtime.watch import Watch

RECALL_TOP_K = 10  # Quest's figure: share of the true top-10 tokens kept


@dataclass
class Tally:
    """Sums over the queries of one layer in one phase. Tensors stay on their device until they are read."""

    queries: int = 0
    context_tokens: int = 0  # what dense attention would have shown, summed over queries
    visible_tokens: float | Tensor = 0.0  # per head, summed over queries
    sparse_queries: int = 0
    kv_bytes_read: float | Tensor = 0.0  # keys and values attended
    index_bytes_read: float = 0.0  # keys and summaries read to choose
    kv_bytes_dense: float = 0.0
    kv_bytes_copied: int = 0  # keys and values brought from host memory to the device
    pieces_wanted: int = 0  # pages or tokens of a head that were chosen, of KV that is brought to the device
    pieces_found: int = 0  # those that were there already
    select_s: float = 0.0
    probes: int = 0
    recall: float = 0.0
    recovery: float = 0.0

    def add(self, other: Tally) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def report(self) -> dict[str, Any]:
        """Means per query and head, sums of bytes and seconds; None where nothing was counted."""
        visible, queries = float(self.visible_tokens), self.queries
        return {
            "queries": queries,
            "visible_tokens": visible / queries if queries else None,
            "density": visible / self.context_tokens if self.context_tokens else None,
            "sparse_queries": self.sparse_queries,
            "kv_bytes_read": int(float(self.kv_bytes_read) + self.index_bytes_read),
            "kv_bytes_attended": int(self.kv_bytes_read),
            "kv_bytes_to_select": int(self.index_bytes_read),
            "kv_bytes_dense": int(self.kv_bytes_dense),
            "kv_bytes_copied": self.kv_bytes_copied,
            "device_cache_hits": self.pieces_found / self.pieces_wanted if self.pieces_wanted else None,
            "select_s": self.select_s,
            "recall": self.recall / self.probes if self.probes else None,
            "recovery": self.recovery / self.probes if self.probes else None,
        }


Tallies = dict[tuple[int, Phase], Tally]  # by layer and phase


class Counters(ABC):
    """Sums over layers and phases of whatever counts by layer and phase."""

    @property
    @abstractmethod
    def tallies(self) -> Mapping[tuple[int, Phase], Tally]:
        """Counters by layer and phase."""

    def phase(self, phase: Phase) -> Tally:
        """Sum over the layers."""
        total = Tally()
        for (_, of), tally in self.tallies.items():
            if of == phase:
                total.add(tally)
        return total

    def skipped_nothing(self, phase: Phase) -> bool:
        """Whether queries ran in the phase and every one saw its whole context."""
        total = self.phase(phase)
        return total.queries > 0 and float(total.visible_tokens) >= total.context_tokens

    def report(self) -> dict[str, Any]:
        """Everything, ready for JSON: a summary per phase and a row per layer and phase."""
        phases: tuple[Phase, ...] = ("prefill", "decode")
        return {
            "phases": {phase: self.phase(phase).report() for phase in phases},
            "layers": [
                {"layer": layer, "phase": phase, **tally.report()}
                for (layer, phase), tally in sorted(self.tallies.items())
            ],
        }


class RunStats(Counters):
    """Counters of one cache. One thread at a time writes them.

    Attributes:
        probe_every: compare every so many sparse decode steps with exact attention, for recall and recovery; 0 never.
        probe_s: seconds spent on that, which are not part of the method.
        watch: observer of every chunk and what it was shown, if there is one.
    """

    def __init__(self, probe_every: int = 16, watch: Watch | None = None) -> None:
        self.probe_every = probe_every
        self.probe_s = 0.0
        self.watch = watch
        self._tallies: Tallies = {}

    @property
    def tallies(self) -> Tallies:
        return self._tallies

    def tally(self, layer: int, phase: Phase) -> Tally:
        """The counters of one layer in one phase."""
        return self._tallies.setdefault((layer, phase), Tally())

    def clear(self) -> None:
        """Start counting anew."""
        self._tallies.clear()
        self.probe_s = 0.0


class SharedStats(Counters):
    """The sum over all caches of a block, each of which counts for itself; threads may run them side by side.

    Args:
        probe_every: see ``RunStats``.

    Attributes:
        opened: caches that have counted here so far.
    """

    def __init__(self, probe_every: int = 16) -> None:
        self.probe_every = probe_every
        self.opened = 0
        self._lock = Lock()
        self._of_caches: list[tuple[weakref.ref[Any], RunStats]] = []
        self._of_freed_caches: Tallies = {}

    def open(self, owner: object) -> RunStats:
        """Counters of another cache, which writes them for as long as ``owner`` lives."""
        stats = RunStats(self.probe_every)
        with self._lock:
            self.opened += 1
            kept = [(weakref.ref(owner), stats)]
            for pair in self._of_caches:  # asked once: another thread may free its cache meanwhile
                if pair[0]() is None:
                    _add(self._of_freed_caches, pair[1].tallies)
                else:
                    kept.append(pair)
            self._of_caches = kept
        return stats

    @property
    def tallies(self) -> Tallies:
        total: Tallies = {}
        with self._lock:
            _add(total, self._of_freed_caches)
            for _, stats in self._of_caches:
                _add(total, dict(stats.tallies))
        return total

    def clear(self) -> None:
        """Start counting anew."""
        with self._lock:
            self._of_freed_caches.clear()
            for _, stats in self._of_caches:
                stats.clear()


def _add(total: Tallies, tallies: Tallies) -> None:
    for key, tally in tallies.items():
        total.setdefault(key, Tally()).add(tally)
