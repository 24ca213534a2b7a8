"""KeyDiff: tokens whose keys point elsewhere than most (https://arxiv.org/abs/2504.15364). Asks no query.

score(k) = -cos(k, mean of k / |k|), the mean over all tokens before the queries.

Deviation from the paper: it evicts what it does not keep; nothing is dropped here, only not read, and every chunk
chooses anew from all that came before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvsift.methods.base import Phase, top_units
from kvsift.methods.chunked import ChunkedMethod, seen_by_all
from kvsift.methods.key_norms import SMALLEST_NORM, KeyNorms
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection


@dataclass(frozen=True)
class KeyDiff(ChunkedMethod):
    """Tokens least like the mean direction of the keys."""

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    source: ClassVar[str] = "arXiv 2504.15364"

    def new_state(self, shape: LayerShape) -> KeyNorms:
        return KeyNorms()

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        stop = seen_by_all(start, queries.shape[1])
        keys, norms = reader.keys(0, stop), state.read(reader, 0, stop).unsqueeze(1)
        mean = norms.to(keys.dtype) @ keys  # [num_kv_heads, 1, head_dim]; only its direction matters
        mean = mean / mean.norm(dim=-1, keepdim=True).clamp_min(SMALLEST_NORM)
        scores = -((mean @ keys.mT).float() * norms).squeeze(1)[:, candidates.tokens]
        return Selection(top_units(scores, limit.units) + candidates.first, 1, full=True)
