"""KeyDiff: tokens whose keys differ in direction from most (https://arxiv.org/abs/2504.15364). Uses no query.

score(k) = -cos(k, mean of k / |k|), the mean over all tokens before the queries.

Deviation from the paper, which evicts all other tokens: by default every token is kept, and every chunk selects anew
from all earlier tokens. ``evict=true`` drops tokens for good and frees them, and the mean is that of the remaining
tokens before the query: for both phases as in the paper, block by block of the prompt; for decode alone after the whole
prompt at once, then token by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvsift.methods.base import ChunkedMethod, Phase, seen_by_all
from kvsift.methods.checks import knob
from kvsift.methods.common.dropped_tokens import DroppedTokens, keys_of, select_remaining
from kvsift.methods.common.dropping import dropped_report
from kvsift.methods.common.token_rows import SMALLEST_NORM, KeyNorms, inverse_norms
from kvsift.methods.scoring import top_units
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection

AT_ONCE = 1 << 14  # keys that are added up in float16


@dataclass(frozen=True)
class KeyDiff(ChunkedMethod):
    """Tokens least like the mean direction of the keys.

    Attributes:
        evict: drop all other tokens for good, and free them.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    source: ClassVar[str] = "arXiv 2504.15364"

    evict: bool = knob(False)

    def new_state(self, shape: LayerShape) -> KeyNorms | DroppedTokens:
        return DroppedTokens(shape.num_kv_heads) if self.evict else KeyNorms()

    def describe(self, state: Any) -> dict[str, Any]:
        return dropped_report(state, self.evict) if self.evict else {}

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        return KeyNorms.BYTES * shape.num_kv_heads

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        if self.evict:
            return _select_remaining(state, start, candidates, limit, reader, queries.device)
        stop = seen_by_all(start, queries.shape[1])
        scores = unlike_mean(reader.keys(0, stop), state.norms(reader, 0, stop))[:, candidates.tokens]
        return Selection(top_units(scores, limit.units) + candidates.first, 1, full=True)


def _select_remaining(
    drops: DroppedTokens, start: int, candidates: Candidates, limit: Limit, reader: KVReader, device: torch.device
) -> Selection:
    def worth(left: Tensor) -> Tensor:
        keys = keys_of(reader, left, start)
        return unlike_mean(keys, inverse_norms(keys))

    return select_remaining(drops, candidates, limit, start, device, worth)


def unlike_mean(keys: Tensor, norms: Tensor) -> Tensor:
    """Return -cos(k, mean direction), float32 [num_kv_heads, count].

    keys [num_kv_heads, count, head_dim]; norms float32 [num_kv_heads, count], inverse.
    """
    norms = norms.unsqueeze(1)
    mean = _sum(norms, keys)  # not normalised
    mean = (mean / mean.norm(dim=-1, keepdim=True).clamp_min(SMALLEST_NORM)).to(keys.dtype)
    return -((mean @ keys.mT).float() * norms).squeeze(1)


def _sum(factors: Tensor, keys: Tensor) -> Tensor:
    """Sum of keys times factors [num_kv_heads, 1, count]: [num_kv_heads, 1, head_dim]; in float32 for float16, whose
    numbers end at 65504."""
    if keys.dtype != torch.float16:
        return factors.to(keys.dtype) @ keys
    parts = zip(factors.to(keys.dtype).split(AT_ONCE, 2), keys.split(AT_ONCE, 1))
    return torch.stack([(part @ of_part).float() for part, of_part in parts]).sum(0)
