"""An observer that runs other methods beside a plan.

Each method keeps a cache of its own and gets every token with the queries of the run. At the explained tokens the
methods therefore differ in what they select and in nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import Tensor

from kvsift.layer.accounting import RunStats
from kvsift.layer.layer_messages import LayerMessages
from kvsift.layer.probe import exact_shares, visible_tokens
from kvsift.layer.sparse_attention import SparseAttention
from kvsift.plan.plan import Plan, Rule
from kvsift.stores.base import Segment
from kvsift.types import Chunk, LayerShape, Selection

ORACLE = "oracle_tokens"
RUN = "run"


class LayerObservation(NamedTuple):
    """One layer at an explained token."""

    layer: int
    weights: Tensor  # float32 [num_query_heads, num_tokens], exact attention
    visible: dict[str, Tensor]  # by name of the method, or RUN: bool [num_query_heads, num_tokens]


class MethodObserver:
    """Observer of a run of one sequence.

    Args:
        rules: decode rules by name, the oracle's among them.
        positions: of the explained queries.
    """

    def __init__(self, rules: Mapping[str, Rule], positions: Collection[int]) -> None:
        self._rules, self._last = rules, max(positions)
        self._visible = {name: VisibleTokens(positions) for name in [RUN, *rules]}
        self._messages = {name: LayerMessages() for name in rules}
        self._layers: dict[int, dict[str, SparseAttention]] = {}

    @property
    def wants_hidden(self) -> bool:
        """Whether a method needs hidden states."""
        return any(rule.method.traits.wants_hidden for rule in self._rules.values())

    def before_chunk(self, shape: LayerShape, chunk: Chunk, decode_tokens: int) -> None:
        if shape.layer not in self._layers:
            self._layers[shape.layer] = {name: self._attention(name, shape, chunk.keys) for name in self._rules}
        for attention in self._layers[shape.layer].values():
            if attention.store.lengths[0] > self._last:
                return
            if decode_tokens:
                attention.attend(chunk, decode_tokens)
            else:
                attention.take(chunk)

    def after_segment(
        self, shape: LayerShape, row: int, segment: Segment, spans: tuple[int, int], selection: Selection | None
    ) -> None:
        self._visible[RUN].after_segment(shape, row, segment, spans, selection)

    def layers(self, position: int) -> list[LayerObservation]:
        """Return every layer at a position; empty before the run has passed it."""
        observations = []
        for layer, queries in sorted(self._visible[RUN].queries[position].items()):
            oracle = self._layers[layer][ORACLE]
            keys = oracle.stored(0)[0][:, : position + 1]
            visible = {name: tokens.visible[position][layer].to(keys.device) for name, tokens in self._visible.items()}
            weights = exact_shares(oracle.shape, queries.to(keys.device), keys)
            observations.append(LayerObservation(layer, weights, visible))
        return observations

    def _attention(self, name: str, shape: LayerShape, like: Tensor) -> SparseAttention:
        stats = RunStats(probe_every=0, observer=self._visible[name])
        return SparseAttention(shape, Plan(decode=self._rules[name]), 1, like, stats, messages=self._messages[name])


class VisibleTokens:
    """Observer that records the tokens that the queries at some positions see, layer by layer."""

    def __init__(self, positions: Collection[int]) -> None:
        self.queries: dict[int, dict[int, Tensor]] = {at: {} for at in positions}  # [num_query_heads, 1, head_dim]
        self.visible: dict[int, dict[int, Tensor]] = {at: {} for at in positions}  # [num_query_heads, position + 1]

    def before_chunk(self, shape: LayerShape, chunk: Chunk, decode_tokens: int) -> None:
        pass

    def after_segment(
        self, shape: LayerShape, row: int, segment: Segment, spans: tuple[int, int], selection: Selection | None
    ) -> None:
        if segment.stop != segment.start + 1 or segment.start not in self.queries:
            return
        device = segment.queries.device if selection is None else selection.units.device
        self.queries[segment.start][shape.layer] = segment.queries[0]
        self.visible[segment.start][shape.layer] = visible_tokens(shape, segment.stop, spans, selection, device)
