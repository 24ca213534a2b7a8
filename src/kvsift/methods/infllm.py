"""InfLLM: initial tokens, a local window, and between them a few blocks for all heads (https://arxiv.org/abs/2402.04617).

A block is represented by the ``representatives`` keys that later queries attended to most, and

score(block) = sum over query heads of (mean query of the segment) . (mean of the representatives).

Keys are attended without rotation, by queries rotated to position ``local``: every token outside the window, initial
tokens included, has the same distance in any context. The paper's budget is 128 initial tokens, a window of 4096 and 16
blocks; each can be changed.

Deviations from the paper:
- weights are accumulated over a window that is cut at multiples of ``chunk`` and ``block``, normalised over that window
  alone, and the heads of a group agree on the representatives of their keys;
- a context that fits the budget is attended densely, with true positions, so the budget must lie within the length the
  model was trained for; the paper repositions tokens as soon as they leave the window;
- all queries of a segment but the first see slightly more than ``local`` tokens, as the window is rounded to blocks;
- blocks whose queries are unknown, as in a cache that another plan has filled, are represented by their mean key;
- the placement decides where keys are stored: this method moves nothing to host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsift.errors import InvalidValue
from kvsift.kernels.rerotate import rerotate
from kvsift.methods import checks
from kvsift.methods.base import ChunkedMethod, Phase
from kvsift.methods.checks import knob
from kvsift.methods.common.local_scores import LocalScores
from kvsift.methods.scoring import top_units
from kvsift.methods.traits import Traits
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Moved, Selection

INITIAL_TOKENS, BLOCKS = 128, 16


@dataclass(frozen=True)
class InfLLM(ChunkedMethod):
    """Blocks of tokens, one set for all heads of a layer, by their representative keys.

    Attributes:
        chunk: prefill queries that share a selection; holds whole blocks.
        block: tokens per block.
        representatives: keys that stand for a block.
        local: tokens over which attention to a key is accumulated, and the distance of everything outside the window;
            the window, unless another is given.
        positions: "remapped", or "absolute": every token at its own position.
        compat: representatives by the sum of softmax weights ("code"), or by the mean product with queries ("paper").
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    source: ClassVar[str] = "arXiv 2402.04617"

    chunk: int = 512
    block: int = knob(128, 1)
    representatives: int = 4
    local: int = 4096
    positions: Literal["remapped", "absolute"] = knob("remapped")
    compat: Literal["code", "paper"] = knob("code")

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole("representatives", self.representatives, 1, self.block)
        checks.whole("local", self.local, self.chunk)
        if self.chunk % self.block:
            raise InvalidValue(f"chunk={self.chunk} must be a multiple of block={self.block}.")

    @property
    def unit_size(self) -> int:
        return self.block

    @property
    def traits(self) -> Traits:
        remapped = self.positions == "remapped"
        return Traits(granularity="block", wants_queries=True, follows=True, repositions=remapped)

    @property
    def budget_defaults(self) -> dict[str, Any]:
        always = INITIAL_TOKENS + self.local + self.block - 1  # the window is rounded up to blocks
        tokens = always + BLOCKS * self.block
        return {"tokens": tokens, "sinks": INITIAL_TOKENS, "window": self.local, "dense_layers": ()}

    def reposition(self, positions: Tensor, spans: Sequence[tuple[int, int]]) -> Moved:
        return Moved(torch.full_like(positions, self.local), keys=0)

    def new_state(self, shape: LayerShape) -> LocalScores:
        return LocalScores(self.compat, self.chunk, self.block, self.local)

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        sums, means = self.local / self.chunk, shape.head_dim / self.block
        return 4 * shape.num_kv_heads * (sums + means)

    def observe(
        self, state: Any, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        state.observe(queries, start, start + keys.shape[1])

    def checkpoint(self, state: Any) -> None:
        state.checkpoint()

    def follow(self, state: Any, shape: LayerShape, start: int, stop: int, phase: Phase, reader: KVReader) -> None:
        self._catch_up(state, shape, stop, reader)
        state.end_chunk()

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        self._catch_up(state, shape, start, reader)
        keys = self._block_keys(state, shape, candidates, start, reader)  # [num_kv_heads, count, head_dim]
        if self.traits.repositions:
            assert shape.rope is not None, "the plan was checked"
            positions = torch.arange(start, start + queries.shape[1])
            queries = rerotate(queries, positions, self.reposition(positions, ()).queries, shape.rope)
        mean = queries.float().mean(1).unflatten(0, (shape.num_kv_heads, -1)).sum(1, keepdim=True)
        scores = (mean @ keys.mT).sum(0)  # [1, count]
        return Selection(top_units(scores, limit.units) + candidates.first, self.block, full=True)

    @torch.inference_mode()  # the sums outlive the caller's inference mode
    def _catch_up(self, state: LocalScores, shape: LayerShape, stop: int, reader: KVReader) -> None:
        """Add the sums of all tiles that are complete before ``stop``."""
        while (end := (len(state.tiles) + 1) * state.tile) <= stop:
            state.append(shape, reader.keys(state.first_key(len(state.tiles)), end))

    def _block_keys(
        self, state: LocalScores, shape: LayerShape, candidates: Candidates, start: int, reader: KVReader
    ) -> Tensor:
        """Representative of each candidate, by the queries of the tiles before ``start``."""
        num_tiles = start // state.tile
        complete = min(state.num_complete(num_tiles), candidates.stop)
        known = 0 if state.chosen is None else state.chosen.shape[1]
        if known < complete:
            new = self._represented(state, shape, known, complete, num_tiles, reader)
            state.chosen = new if state.chosen is None else torch.cat([state.chosen, new], 1)
        parts = []
        if candidates.first < complete:
            parts.append(reader.counted(state.chosen[:, candidates.first : complete]))  # type: ignore[index]
        if complete < candidates.stop:
            first = max(complete, candidates.first)
            parts.append(self._represented(state, shape, first, candidates.stop, num_tiles, reader))
        return torch.cat(parts, 1)

    @torch.inference_mode()  # some means outlive the caller's inference mode
    def _represented(
        self, state: LocalScores, shape: LayerShape, first: int, stop: int, num_tiles: int, reader: KVReader
    ) -> Tensor:
        """Means of the representatives of blocks ``first`` to ``stop``, float32 [num_kv_heads, number, head_dim]."""
        start, end = first * self.block, min(stop * self.block, reader.length)
        keys = reader.keys(start, end).float()
        if self.traits.repositions:
            assert shape.rope is not None, "the plan was checked"
            positions = torch.arange(start, end)
            keys = rerotate(keys, positions, torch.zeros_like(positions), shape.rope)
        sizes = torch.full((stop - first, 1), self.block, device=keys.device)
        sizes[-1] -= stop * self.block - end  # window=0: the incomplete block is a candidate
        keys = pad(keys, (0, 0, 0, stop * self.block - end)).unflatten(1, (stop - first, self.block))
        means = keys.sum(2) / sizes
        worth, counts = state.worth(first, stop, num_tiles)
        if worth is None:
            return means
        best = top_units(worth.flatten(0, 1), self.representatives).unflatten(0, worth.shape[:2]).to(keys.device)
        chosen = keys.gather(2, best.unsqueeze(-1).expand(*best.shape, keys.shape[3])).mean(2)
        return torch.where((counts > 0).any(1).to(keys.device)[:, None], chosen, means)
