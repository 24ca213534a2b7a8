"""Counters of a run: visible tokens and bytes read, from the selections themselves."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kvsift.layer.segments import SegmentGroup
from kvsift.methods.base import Phase
from kvsift.plan.guard import Widening
from kvsift.stores.base import Segment, Store, seen_densely
from kvsift.types import Candidates, Chunk, LayerShape, Selection

RECALL_TOP_K = 10  # Quest's figure: share of the true top-10 tokens kept


class Observer(Protocol):
    """The value of ``RunStats.observer``: called before a chunk is stored and after a segment is attended; changes
    nothing."""

    def before_chunk(self, shape: LayerShape, chunk: Chunk, decode_tokens: int) -> None:
        """Called before a layer stores and attends a chunk, whose last ``decode_tokens`` are generated tokens."""

    def after_segment(
        self, shape: LayerShape, row: int, segment: Segment, spans: tuple[int, int], selection: Selection | None
    ) -> None:
        """Called after a layer attended queries to everything before ``spans[0]`` and from ``spans[1]`` on, and to the
        selection. Not called for segments of a prompt that are attended together."""


@dataclass
class Tally:
    """Sums over the queries of one layer in one phase. Tensors stay on their device until they are read."""

    queries: int = 0
    context_tokens: int = 0  # what dense attention would have shown, summed over queries
    visible_tokens: float | Tensor = 0.0  # per head, summed over queries
    sparse_queries: int = 0
    estimated_queries: int = 0
    estimated: float | Tensor = 0.0  # share of their attention that the method estimated, per head, summed over them
    kv_bytes_read: float | Tensor = 0.0  # keys and values attended
    index_bytes_read: float = 0.0  # keys and summaries read to choose
    kv_bytes_dense: float = 0.0
    kv_bytes_copied: int = 0  # keys and values copied from host memory to the device
    pieces_requested: int = 0  # pages or tokens of a head that were selected, of KV that is copied to the device
    pieces_cached: int = 0  # of them, those that were there already
    select_s: float = 0.0
    probes: int = 0
    recall: float = 0.0
    recovery: float = 0.0

    def add(self, other: Tally) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def add_dense(self, segment: Segment, store: Store) -> None:
        """Count a segment that was attended to its whole context."""
        self._add(segment, store, segment.context_tokens, segment.stop * store.token_bytes)

    def add_sparse(
        self, segment: Segment, store: Store, spans: tuple[int, int], selection: Selection | None,
        visible: float | Tensor,
    ) -> None:  # fmt: skip
        """Count a segment that was attended to spans (sinks_stop, window_start) and a selection; visible tokens are
        summed over its queries."""
        self.sparse_queries += segment.stop - segment.start
        num_bytes = (spans[0] + max(segment.stop - spans[1], 0)) * store.token_bytes
        if selection is not None:
            num_kv_heads, (num_heads, count) = store.shape.num_kv_heads, selection.units.shape
            tokens = count * selection.unit_size
            num_bytes += tokens * store.token_bytes * max(num_kv_heads, num_heads) // num_kv_heads
        self._add(segment, store, visible, num_bytes)

    def _add(self, segment: Segment, store: Store, visible: float | Tensor, num_bytes: int) -> None:
        """Count queries, what they saw and what was read for them, and what dense attention would have read."""
        start, stop = segment.start, segment.stop
        self.queries += stop - start
        self.context_tokens += seen_densely(start, stop)
        self.kv_bytes_dense += stop * store.token_bytes
        self.visible_tokens = self.visible_tokens + visible  # never in place: inference tensors would refuse it
        self.kv_bytes_read += num_bytes

    def add_group(self, group: SegmentGroup, store: Store, selected: float | Tensor = 0, read: int = 0) -> None:
        """As ``add_dense`` or ``add_sparse`` of each segment.

        Args:
            group: segments, which were attended together.
            store: has their keys and values.
            selected: tokens per head besides those that are always visible, summed over queries.
            read: tokens read for that, a mean over KV heads, summed over segments.
        """
        self.queries += group.num_queries
        self.context_tokens += group.context_tokens
        self.kv_bytes_dense += group.read_densely * store.token_bytes
        if group.is_dense:
            self.visible_tokens = self.visible_tokens + group.context_tokens
            self.kv_bytes_read += group.read_densely * store.token_bytes
            return
        self.sparse_queries += group.num_queries
        self.visible_tokens = self.visible_tokens + (group.visible_always + selected)
        self.kv_bytes_read += (group.read_always + read) * store.token_bytes

    def add_query(self, visible: float, context: int, token_bytes: int) -> None:
        """Count a query that saw ``visible`` of ``context`` tokens, of ``token_bytes`` each, and read no others."""
        self.queries += 1
        self.sparse_queries += visible < context
        self.visible_tokens = self.visible_tokens + visible
        self.context_tokens += context
        self.kv_bytes_read += visible * token_bytes
        self.kv_bytes_dense += context * token_bytes

    def add_estimated(self, share: float | Tensor, num_queries: int = 1) -> None:
        """Count queries of whose attention a share was estimated, per head, summed over them."""
        self.estimated_queries += num_queries
        self.estimated = self.estimated + share

    def add_transfers(self, store: Store) -> None:
        """Count what a store has copied to the device since the last call."""
        num_bytes, requested, cached = store.take_transfers()
        self.kv_bytes_copied += num_bytes
        self.pieces_requested += requested
        self.pieces_cached += cached

    def add_probe(self, recall: float, recovery: float) -> None:
        """Count a comparison with exact attention."""
        self.probes, self.recall, self.recovery = self.probes + 1, self.recall + recall, self.recovery + recovery

    def report(self) -> dict[str, Any]:
        """Means per query and head, sums of bytes and seconds; None where nothing was counted."""
        visible, queries = float(self.visible_tokens), self.queries
        return {
            "queries": queries,
            "visible_tokens": visible / queries if queries else None,
            "density": visible / self.context_tokens if self.context_tokens else None,
            "sparse_queries": self.sparse_queries,
            "estimated_share": float(self.estimated) / self.estimated_queries if self.estimated_queries else None,
            "kv_bytes_read": int(float(self.kv_bytes_read) + self.index_bytes_read),
            "kv_bytes_attended": int(self.kv_bytes_read),
            "kv_bytes_to_select": int(self.index_bytes_read),
            "kv_bytes_dense": int(self.kv_bytes_dense),
            "kv_bytes_copied": self.kv_bytes_copied,
            "device_cache_hits": self.pieces_cached / self.pieces_requested if self.pieces_requested else None,
            "select_s": self.select_s,
            "recall": self.recall / self.probes if self.probes else None,
            "recovery": self.recovery / self.probes if self.probes else None,
        }


class TokenView(NamedTuple):
    """What a generated token sees in the sparse layers of a step, beside ``num_units`` units that each head selects.

    Attributes:
        layers: those that are sparse, by their place among the tallies.
        bytes_read: bytes of summaries read to select in a layer.
        lists: selections per KV head.
        by_sketches, rest: how tokens are ranked, and whether attention to those that are not selected is estimated.
    """

    sinks_stop: int
    window_start: int
    candidates: Candidates
    num_units: int
    num_selections: int
    layers: tuple[int, ...]
    bytes_read: int = 0
    lists: int = 0
    by_sketches: bool = False
    rest: bool = False


Tallies = dict[tuple[int, Phase], Tally]  # by layer and phase
Snapshot = tuple[Tallies, list[Widening], float]  # counters of a cache at some time


class RunStats:
    """Counters of one cache. One thread at a time writes them.

    Attributes:
        probe_every: compare every Nth sparse decode step with exact attention, for recall and recovery; 0 never.
        probe_s: seconds spent on that, which are not part of the method.
        observer: called around every chunk and segment, if there is one.
    """

    def __init__(self, probe_every: int = 16, observer: Observer | None = None) -> None:
        self.probe_every = probe_every
        self.probe_s = 0.0
        self.observer = observer
        self._tallies: Tallies = {}
        self._widenings: list[Widening] = []

    @property
    def tallies(self) -> Tallies:
        """Counters by layer and phase."""
        return self._tallies

    @property
    def widenings(self) -> list[Widening]:
        """Budgets that the guard doubled, in their order."""
        return self._widenings

    def tally(self, layer: int, phase: Phase) -> Tally:
        """The counters of one layer in one phase."""
        tally = self._tallies.get((layer, phase))
        if tally is None:
            tally = self._tallies[layer, phase] = Tally()
        return tally

    def count_step(
        self, keys: Sequence[tuple[int, Phase]], start: int, stop: int, token_bytes: int, view: TokenView | None,
        select_s: float, estimated: Sequence[float],
    ) -> list[Tally]:  # fmt: skip
        """As ``Tally.add_dense`` of the tokens from ``start`` to ``stop``, or ``add_sparse`` of the only one under a
        view, in each layer of a step, without a call for each; returns their counters.

        ``select_s`` is that of all layers together, ``estimated`` the share in each that estimates.
        """
        try:
            tallies = [self._tallies[key] for key in keys]
        except KeyError:
            tallies = [self.tally(*key) for key in keys]
        seen, sparse = (stop, view.layers) if view is not None else (seen_densely(start, stop), ())
        for tally in tallies:
            tally.queries += stop - start
            tally.context_tokens += seen
            tally.kv_bytes_dense += stop * token_bytes
        for index, tally in enumerate(tallies):
            if index not in sparse:
                tally.visible_tokens = tally.visible_tokens + seen
                tally.kv_bytes_read += stop * token_bytes
        if view is None:
            return tallies
        always, selected = view.sinks_stop + stop - view.window_start, view.num_units * view.candidates.unit_size
        num_bytes = (always + selected * view.lists) * token_bytes
        for index in view.layers:
            tally = tallies[index]
            tally.sparse_queries += 1
            tally.visible_tokens = tally.visible_tokens + (always + selected)
            tally.kv_bytes_read += num_bytes
            tally.index_bytes_read += view.bytes_read
            tally.select_s += select_s / len(view.layers)
        for index, share in zip(view.layers if view.rest else (), estimated, strict=True):
            tallies[index].estimated_queries += 1
            tallies[index].estimated += share
        return tallies

    def snapshot(self, phase: Phase | None = None) -> Snapshot:
        """All counters, for ``set_back``; with ``phase`` no other phase may count in between."""
        tallies: Tallies = dict(self._tallies)
        for key, tally in self._tallies.items():
            if phase is None or key[1] == phase:
                tallies[key] = kept = object.__new__(Tally)  # copy() takes several times as long, of all layers
                kept.__dict__.update(tally.__dict__)
        return tallies, [*self._widenings], self.probe_s

    def set_back(self, counters: Snapshot) -> None:
        """Forget what was counted since a snapshot, which is used up."""
        self._tallies, self._widenings, self.probe_s = counters

    def clear(self) -> None:
        """Reset all counters."""
        self._tallies.clear()
        self._widenings.clear()
        self.probe_s = 0.0

    def phase(self, phase: Phase) -> Tally:
        """Sum over the layers."""
        total = Tally()
        for (_, tally_phase), tally in self.tallies.items():
            if tally_phase == phase:
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
            "guard": [widening.as_dict() for widening in self.widenings],
        }


class SharedStats(RunStats):
    """The sum over all caches of a block, each of which counts for itself; threads may run them side by side.

    What it keeps itself are the counters of caches that were freed.

    Args:
        probe_every: see ``RunStats``.

    Attributes:
        opened: caches that have counted here so far.
    """

    def __init__(self, probe_every: int = 16) -> None:
        super().__init__(probe_every)
        self.opened = 0
        self._lock = Lock()
        self._of_caches: list[tuple[weakref.ref[Any], RunStats]] = []

    def open(self, owner: object) -> RunStats:
        """Counters of another cache, which writes them for as long as ``owner`` lives."""
        stats = RunStats(self.probe_every)
        with self._lock:
            self.opened += 1
            kept = [(weakref.ref(owner), stats)]
            for pair in self._of_caches:  # asked once: another thread may free its cache meanwhile
                if pair[0]() is None:
                    _add(self._tallies, pair[1].tallies)
                    self._widenings += pair[1].widenings
                else:
                    kept.append(pair)
            self._of_caches = kept
        return stats

    @property
    def tallies(self) -> Tallies:
        total: Tallies = {}
        with self._lock:
            _add(total, self._tallies)
            for _, stats in self._of_caches:
                _add(total, dict(stats.tallies))
        return total

    @property
    def widenings(self) -> list[Widening]:
        with self._lock:
            return self._widenings + [each for _, stats in self._of_caches for each in stats.widenings]

    def clear(self) -> None:
        """Reset all counters."""
        with self._lock:
            super().clear()
            for _, stats in self._of_caches:
                stats.clear()


def _add(total: Tallies, tallies: Tallies) -> None:
    for key, tally in tallies.items():
        total.setdefault(key, Tally()).add(tally)
