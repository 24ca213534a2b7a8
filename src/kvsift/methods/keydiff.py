"""KeyDiff: tokens whose keys point elsewhere than most (https://arxiv.org/abs/2504.15364). Asks no query.

score(k) = -cos(k, mean of k / |k|), the mean over all tokens before the queries.

Deviation from the paper: it evicts what it does not keep; nothing is dropped here, only not read, and every chunk
chooses anew from all that came before. ``evict=true`` drops for good and frees, and the mean is that of the tokens that
are left before the query: for both phases as in the paper, block by block of the prompt; for decode alone after a
prompt all at once, then token by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvsift.methods import knobs
from kvsift.methods.base import Phase, top_units
from kvsift.methods.chunked import ChunkedMethod, seen_by_all
from kvsift.methods.dropping import dropped
from kvsift.methods.drops import Drops, keys_of
from kvsift.methods.keeping import select_left
from kvsift.methods.key_norms import SMALLEST_NORM, KeyNorms
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection


@dataclass(frozen=True)
class KeyDiff(ChunkedMethod):
    """Tokens least like the mean direction of the keys.

    Attributes:
        evict: drop what is not kept for good, and free it.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    source: ClassVar[str] = "arXiv 2504.15364"

    evict: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        knobs.flag("evict", self.evict)

    def new_state(self, shape: LayerShape) -> KeyNorms | Drops:
        return Drops(shape.num_kv_heads) if self.evict else KeyNorms()

    def describe(self, state: Any) -> dict[str, Any]:
        return dropped(state, self.evict) if self.evict else {}

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        return KeyNorms.BYTES * shape.num_kv_heads

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        if self.evict:
            return _select_left(state, start, candidates, limit, reader, queries.device)
        stop = seen_by_all(start, queries.shape[1])
        scores = unlike_mean(reader.keys(0, stop), state.read(reader, 0, stop))[:, candidates.tokens]
        return Selection(top_units(scores, limit.units) + candidates.first, 1, full=True)


def _select_left(
    drops: Drops, start: int, candidates: Candidates, limit: Limit, reader: KVReader, device: torch.device
) -> Selection:
    def worth(left: Tensor) -> Tensor:
        keys = keys_of(reader, left, start)
        norms = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32)
        return unlike_mean(keys, norms.clamp_min(SMALLEST_NORM).reciprocal())

    return select_left(drops, candidates, limit, start, device, worth)


def unlike_mean(keys: Tensor, norms: Tensor) -> Tensor:
    """-cos(k, mean direction), float32 [num_kv_heads, count].

    keys [num_kv_heads, count, head_dim]; norms float32 [num_kv_heads, count], one over their lengths.
    """
    norms = norms.unsqueeze(1)
    mean = norms.to(keys.dtype) @ keys  # [num_kv_heads, 1, head_dim]; only its direction matters
    mean = mean / mean.norm(dim=-1, keepdim=True).clamp_min(SMALLEST_NORM)
    return -((mean @ keys.mT).float() * norms).squeeze(1)
