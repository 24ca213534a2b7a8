"""Verify: the pages to which the last verification attended most; for the drafts of exact decoding alone.

Dense attention weighs every token anyway, so that drafts need no index (as in PillarAttn,
https://arxiv.org/abs/2512.01278, and Vegas, https://arxiv.org/abs/2602.07223). What is not selected enters a draft as
it entered the answer of the last verified token: its value and share of the attention there are known exactly. Before
the first verification the latest pages are selected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvsift import native
from kvsift.methods.base import Method
from kvsift.methods.scoring import top_units
from kvsift.methods.traits import Traits
from kvsift.native.shapes import supports
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Part, Rest, Selection

PAGE_SIZE = 16  # tokens, of the shares that a verification returns
MOST_SHARE = 0.999  # of what is not selected: the rest of the attention keeps a weight


@dataclass
class Verified:
    """What a verification has found, as long as most of its tokens are there.

    Attributes:
        shares: [num_kv_heads, num_pages] of the attention of its queries.
        queries: [1, num_query_heads, num_tokens, head_dim].
        part: their attention.
        length: tokens that it has seen.
        selection: made of them since.
    """

    shares: Tensor | None = None
    queries: Tensor | None = None
    part: Part | None = None
    length: int = 0
    selection: Selection | None = None

    def fork(self) -> Verified:
        return replace(self)

    def crop(self, length: int) -> None:
        if self.length > length + PAGE_SIZE:
            self.shares = self.selection = None


@dataclass(frozen=True)
class Verify(Method):
    """The pages to which the last verification of exact decoding attended most, by KV head."""

    traits: ClassVar[Traits] = Traits(granularity="page", drafts_only=True)
    source: ClassVar[str] = "arXiv 2512.01278"

    @property
    def unit_size(self) -> int:
        return PAGE_SIZE

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        return 4 * shape.num_kv_heads / PAGE_SIZE

    def new_state(self, shape: LayerShape) -> Verified:
        return Verified()

    def verified(self, state: Verified, queries: Tensor, part: Part, shares: Tensor, length: int) -> None:
        state.shares, state.queries, state.part, state.length = shares, queries, part, length
        state.selection = None

    def select(
        self, state: Verified, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        chosen = state.selection
        if chosen is not None and chosen.units.shape[1] <= limit.units and int(chosen.units.max()) < candidates.stop:
            return chosen
        known = None if state.shares is None else state.shares[:, candidates.first : candidates.stop]
        if known is None or known.shape[1] < candidates.count:
            latest = torch.arange(candidates.stop - limit.units, candidates.stop, device=queries.device)
            return Selection(latest.unsqueeze(0), PAGE_SIZE, full=True)
        units = top_units(known, limit.units) + candidates.first
        rest = self._rest(state, shape, start, candidates, units, reader)
        state.selection = Selection(units, PAGE_SIZE, full=True, rest=rest)
        return state.selection

    def _rest(
        self, state: Verified, shape: LayerShape, start: int, candidates: Candidates, units: Tensor, reader: KVReader
    ) -> Rest | None:
        """Return what the last verified token before ``start`` saw besides the units and what is always visible."""
        in_place = getattr(reader, "in_place", None)
        assert state.queries is not None
        assert state.part is not None
        token = min(max(start - 1 - state.length + state.queries.shape[2], 0), state.queries.shape[2] - 1)
        stop = state.length - state.queries.shape[2] + token + 1
        query = state.queries[0, :, token]  # [num_query_heads, head_dim]
        if in_place is None:
            return None
        keys, values = in_place(stop)
        if not supports(query, keys):
            return None
        spans = [(0, candidates.first * PAGE_SIZE), (min(candidates.stop * PAGE_SIZE, stop), stop)]
        output, lse = native.attend_units(query, keys, values, units, PAGE_SIZE, spans, shape.scale, shape.softcap)
        seen = Part(output[None, :, None], lse[None, :, None])
        whole = Part(state.part.output[:, :, token : token + 1], state.part.lse[:, :, token : token + 1])
        share = (1 - (seen.lse - whole.lse).exp()).clamp(1e-6, MOST_SHARE)
        value = (whole.output.float() - (1 - share.unsqueeze(-1)) * seen.output.float()) / share.unsqueeze(-1)
        return Rest(value, share)
