"""Methods that are asked what a run is asked: each keeps a cache of its own, and what it would have shown is noted.

All hear of every token with the queries of the run, so that at the tokens that are explained they differ in what they
choose and in nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import Tensor

from kvsift.runtime.attend import Segment
from kvsift.runtime.plan import Plan, Rule
from kvsift.runtime.probe import exact_shares, visible_tokens
from kvsift.runtime.relay import Relay
from kvsift.runtime.sequence import SparseAttention
from kvsift.runtime.stats import RunStats
from kvsift.types import Chunk, LayerShape, Selection

ORACLE = "oracle_tokens"
RUN = "run"


class Shown(NamedTuple):
    """One layer at a token that is explained."""

    layer: int
    weights: Tensor  # float32 [num_query_heads, num_tokens], exact shares of attention
    visible: dict[str, Tensor]  # by name, the run's under RUN: bool [num_query_heads, num_tokens]


class Panel:
    """Watches a run of one sequence.

    Args:
        rules: of decode, by name; the oracle's is among them.
        positions: of the queries that are explained.
    """

    def __init__(self, rules: Mapping[str, Rule], positions: Collection[int]) -> None:
        self._rules, self._last = rules, max(positions)
        self._notes = {name: Note(positions) for name in [RUN, *rules]}
        self._relays = {name: Relay() for name in rules}
        self._layers: dict[int, dict[str, SparseAttention]] = {}

    def fed(self, shape: LayerShape, chunk: Chunk, decode_tokens: int) -> None:
        if shape.layer not in self._layers:
            self._layers[shape.layer] = {name: self._member(name, shape, chunk.keys) for name in self._rules}
        for member in self._layers[shape.layer].values():
            if member.store.lengths[0] > self._last:
                return
            if decode_tokens:
                member.attend(chunk, decode_tokens)
            else:
                member.take(chunk)

    def answered(
        self, shape: LayerShape, row: int, segment: Segment, spans: tuple[int, int], selection: Selection | None
    ) -> None:
        self._notes[RUN].answered(shape, row, segment, spans, selection)

    def layers(self, position: int) -> list[Shown]:
        """Every layer, once the run has come past the position; nothing before that."""
        found = []
        for layer, queries in sorted(self._notes[RUN].queries[position].items()):
            oracle = self._layers[layer][ORACLE]
            keys = oracle.store.row(0).keys(0, position + 1)
            visible = {name: note.visible[position][layer].to(keys.device) for name, note in self._notes.items()}
            found.append(Shown(layer, exact_shares(oracle.shape, queries.to(keys.device), keys), visible))
        return found

    def _member(self, name: str, shape: LayerShape, like: Tensor) -> SparseAttention:
        stats = RunStats(probe_every=0, watch=self._notes[name])
        return SparseAttention(shape, Plan(decode=self._rules[name]), 1, like, stats, relay=self._relays[name])


class Note:
    """What one member shows to the queries at some positions, layer by layer."""

    def __init__(self, positions: Collection[int]) -> None:
        self.queries: dict[int, dict[int, Tensor]] = {each: {} for each in positions}  # [num_query_heads, 1, head_dim]
        self.visible: dict[int, dict[int, Tensor]] = {each: {} for each in positions}  # [num_query_heads, position + 1]

    def fed(self, shape: LayerShape, chunk: Chunk, decode_tokens: int) -> None:
        pass

    def answered(
        self, shape: LayerShape, row: int, segment: Segment, spans: tuple[int, int], selection: Selection | None
    ) -> None:
        if segment.stop != segment.start + 1 or segment.start not in self.queries:
            return
        device = segment.queries.device if selection is None else selection.units.device
        self.queries[segment.start][shape.layer] = segment.queries[0]
        self.visible[segment.start][shape.layer] = visible_tokens(shape, segment.stop, spans, selection, device)
