"""Methods that are asked what a run is asked: each keeps a cache of its own, and what it would have shown is noted.

All hear of every token with the queries of the run, so that at the token that is explained they differ in what they
choose and in nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """One layer at the token that is explained."""

    layer: int
    weights: Tensor  # float32 [num_query_heads, num_tokens], exact shares of attention
    visible: dict[str, Tensor]  # by name, the run's under RUN: bool [num_query_heads, num_tokens]


class Panel:
    """Watches a run of one sequence.

    Args:
        rules: of decode, by name; the oracle's is among them.
        position: of the query that is explained.
    """

    def __init__(self, rules: Mapping[str, Rule], position: int) -> None:
        self._rules, self._position = rules, position
        self._notes = {name: Note(position) for name in [RUN, *rules]}
        self._relays = {name: Relay() for name in rules}
        self._layers: dict[int, dict[str, SparseAttention]] = {}

    def fed(self, shape: LayerShape, chunk: Chunk, decode_tokens: int) -> None:
        if shape.layer not in self._layers:
            self._layers[shape.layer] = {name: self._member(name, shape, chunk.keys) for name in self._rules}
        for member in self._layers[shape.layer].values():
            if member.store.lengths[0] > self._position:
                return
            if decode_tokens:
                member.attend(chunk, decode_tokens)
            else:
                member.take(chunk)

    def answered(
        self, shape: LayerShape, row: int, segment: Segment, spans: tuple[int, int], selection: Selection | None
    ) -> None:
        self._notes[RUN].answered(shape, row, segment, spans, selection)

    def layers(self) -> list[Shown]:
        """Every layer, once the run has come past the position; nothing before that."""
        found = []
        for layer, queries in sorted(self._notes[RUN].queries.items()):
            oracle = self._layers[layer][ORACLE]
            keys = oracle.store.row(0).keys(0, self._position + 1)
            visible = {name: note.visible[layer].to(keys.device) for name, note in self._notes.items()}
            found.append(Shown(layer, exact_shares(oracle.shape, queries.to(keys.device), keys), visible))
        return found

    def _member(self, name: str, shape: LayerShape, like: Tensor) -> SparseAttention:
        stats = RunStats(probe_every=0, watch=self._notes[name])
        return SparseAttention(shape, Plan(decode=self._rules[name]), 1, like, stats, relay=self._relays[name])


class Note:
    """What one member shows to the query at a position, layer by layer."""

    def __init__(self, position: int) -> None:
        self._position = position
        self.queries: dict[int, Tensor] = {}  # [num_query_heads, 1, head_dim]
        self.visible: dict[int, Tensor] = {}  # bool [num_query_heads, position + 1]

    def fed(self, shape: LayerShape, chunk: Chunk, decode_tokens: int) -> None:
        pass

    def answered(
        self, shape: LayerShape, row: int, segment: Segment, spans: tuple[int, int], selection: Selection | None
    ) -> None:
        if (segment.start, segment.stop) != (self._position, self._position + 1):
            return
        device = segment.queries.device if selection is None else selection.units.device
        self.queries[shape.layer] = segment.queries[0]
        self.visible[shape.layer] = visible_tokens(shape, segment.stop, spans, selection, device)
