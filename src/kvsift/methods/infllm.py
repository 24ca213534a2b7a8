"""InfLLM: initial tokens, a local window, and between them a few blocks for all heads (https://arxiv.org/abs/2402.04617).

A block is represented by the ``representatives`` keys that queries behind them attended to most, and

score(block) = sum over query heads of (mean query of the segment) . (mean of the representatives).

Keys are seen without rotation, from queries that stand at ``local``: every token outside the window is at the same
distance, which no context exceeds. So are the initial tokens. The paper's budget is 128 initial tokens, a window of
4096 and 16 blocks; each of them may be given.

Deviations from the paper:
- what is accumulated over the window is cut at multiples of ``chunk`` and ``block``, its weights are normalised over
  the window alone, and the heads of a group agree on the representatives of their keys;
- a context that fits the budget is attended densely, with true positions, so the budget must lie within the length the
  model was trained for; the paper moves what leaves the window as soon as it does;
- queries of a segment other than the first, and the rounding of the window to blocks, see a little more than ``local``;
- blocks whose queries are not known, as in a cache that another plan has filled, are represented by their mean key;
- where the keys are is the placement's business: nothing is moved to host memory here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsift.errors import InputError
from kvsift.kernels.rerotate import rerotate
from kvsift.methods import knobs
from kvsift.methods.base import Phase, top_units
from kvsift.methods.chunked import ChunkedMethod
from kvsift.methods.local_scores import LocalScores
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
        positions: "remapped", or "absolute": every token where it is.
        compat: representatives by the sum of softmax weights ("code"), or by the mean product with queries ("paper").
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    wants_queries: ClassVar[bool] = True
    follows: ClassVar[bool] = True
    granularity: ClassVar[str] = "block"
    source: ClassVar[str] = "arXiv 2402.04617"

    chunk: int = 512
    block: int = 128
    representatives: int = 4
    local: int = 4096
    positions: Literal["remapped", "absolute"] = "remapped"
    compat: Literal["code", "paper"] = "code"

    def __post_init__(self) -> None:
        super().__post_init__()
        knobs.whole("block", self.block, 1)
        knobs.whole("representatives", self.representatives, 1, self.block)
        knobs.whole("local", self.local, self.chunk)
        knobs.one_of("positions", self.positions, ("remapped", "absolute"))
        knobs.one_of("compat", self.compat, ("code", "paper"))
        if self.chunk % self.block:
            raise InputError(f"chunk={self.chunk} must be a multiple of block={self.block}.")

    @property
    def unit_size(self) -> int:
        return self.block

    @property
    def moves(self) -> bool:  # type: ignore[override]
        return self.positions == "remapped"

    @property
    def budget_defaults(self) -> dict[str, Any]:
        always = INITIAL_TOKENS + self.local + self.block - 1  # the window is rounded up to blocks
        tokens = always + BLOCKS * self.block
        return {"tokens": tokens, "sinks": INITIAL_TOKENS, "window": self.local, "dense_layers": ()}

    def move(self, positions: Tensor, spans: Sequence[tuple[int, int]]) -> Moved:
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

    def follow(self, state: Any, shape: LayerShape, start: int, stop: int, phase: Phase, reader: KVReader) -> None:
        self._catch_up(state, shape, stop, reader)
        state.end_chunk()

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        self._catch_up(state, shape, start, reader)
        keys = self._block_keys(state, shape, candidates, start, reader)  # [num_kv_heads, count, head_dim]
        if self.moves:
            assert shape.rope is not None, "refused at the start"
            positions = torch.arange(start, start + queries.shape[1])
            queries = rerotate(queries, positions, self.move(positions, ()).queries, shape.rope)
        mean = queries.float().mean(1).unflatten(0, (shape.num_kv_heads, -1)).sum(1, keepdim=True)
        scores = (mean @ keys.mT).sum(0)  # [1, count]
        return Selection(top_units(scores, limit.units) + candidates.first, self.block, full=True)

    @torch.inference_mode()  # sums outlive the block they were made in
    def _catch_up(self, state: LocalScores, shape: LayerShape, stop: int, reader: KVReader) -> None:
        """Sum over the tiles that are complete before ``stop``."""
        while (end := (len(state.tiles) + 1) * state.tile) <= stop:
            state.append(shape, reader.keys(state.first_key(len(state.tiles)), end))

    def _block_keys(
        self, state: LocalScores, shape: LayerShape, candidates: Candidates, start: int, reader: KVReader
    ) -> Tensor:
        """What stands for each candidate, by the queries of the tiles before ``start``."""
        num_tiles = start // state.tile
        complete = min(state.num_complete(num_tiles), candidates.stop)
        held = 0 if state.chosen is None else state.chosen.shape[1]
        if held < complete:
            new = self._represented(state, shape, held, complete, num_tiles, reader)
            state.chosen = new if state.chosen is None else torch.cat([state.chosen, new], 1)
        parts = []
        if candidates.first < complete:
            parts.append(reader.counted(state.chosen[:, candidates.first : complete]))  # type: ignore[index]
        if complete < candidates.stop:
            first = max(complete, candidates.first)
            parts.append(self._represented(state, shape, first, candidates.stop, num_tiles, reader))
        return torch.cat(parts, 1)

    @torch.inference_mode()  # some outlive the block they were made in
    def _represented(
        self, state: LocalScores, shape: LayerShape, first: int, stop: int, num_tiles: int, reader: KVReader
    ) -> Tensor:
        """Means of the representatives of blocks ``first`` to ``stop``, float32 [num_kv_heads, number, head_dim]."""
        start, end = first * self.block, min(stop * self.block, reader.length)
        keys = reader.keys(start, end).float()
        if self.moves:
            assert shape.rope is not None, "refused at the start"
            positions = torch.arange(start, end)
            keys = rerotate(keys, positions, torch.zeros_like(positions), shape.rope)
        there = torch.full((stop - first, 1), self.block, device=keys.device)
        there[-1] -= stop * self.block - end  # window=0: the block being filled competes
        keys = pad(keys, (0, 0, 0, stop * self.block - end)).unflatten(1, (stop - first, self.block))
        means = keys.sum(2) / there
        worth, looks = state.worth(first, stop, num_tiles)
        if worth is None:
            return means
        best = top_units(worth.flatten(0, 1), self.representatives).unflatten(0, worth.shape[:2]).to(keys.device)
        chosen = keys.gather(2, best.unsqueeze(-1).expand(*best.shape, keys.shape[3])).mean(2)
        return torch.where((looks > 0).any(1).to(keys.device)[:, None], chosen, means)
