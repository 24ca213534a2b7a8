"""TOVA: tokens that the last query attended to (https://arxiv.org/abs/2401.06104).

Before each token is generated, softmax weights of the previous query, averaged over all heads of the layer, rank the
remaining tokens, and the heads keep the same set:

worth(j) = mean over heads h of softmax_j(scale * q_h . k_j), q the last query, j over what it saw.

A prompt is attended in full; then all tokens above the budget are dropped at once, and later one token at a time.
Dropped tokens are lost: hidden by default, freed with ``evict=true``.

Deviations from the paper:
- sinks and a window are visible whatever their weight, as for every method; ``compat`` says otherwise;
- the own token of the query counts in the budget, in the paper it does not: budget=513 is its 512;
- where the last query is unknown, because another plan filled the cache, the query being answered ranks the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from kvsift.methods.checks import knob
from kvsift.methods.common.dropped_tokens import keys_of
from kvsift.methods.common.dropping import DroppingMethod, DroppingState, attention_weights
from kvsift.types import KVReader, LayerShape


@dataclass(frozen=True)
class TOVA(DroppingMethod):
    """Tokens with the largest weight for the previous query, one set for all heads.

    Attributes:
        compat: "paper": every token competes, the newest too, in all layers, 512 in all; "code": as widespread
            re-implementations, which always keep the newest.
    """

    source: ClassVar[str] = "arXiv 2401.06104"

    compat: Literal["paper", "code"] | None = knob(None)

    @property
    def budget_defaults(self) -> dict[str, Any]:
        if self.compat is None:
            return {}
        window = 1 if self.compat == "paper" else 2  # the query's own token, and the previous one
        return {"tokens": 513, "sinks": 0, "window": window, "dense_layers": ()}

    def new_state(self, shape: LayerShape) -> DroppingState:
        return DroppingState(self.num_rows(shape), wanted=1)

    def num_rows(self, shape: LayerShape) -> int:
        return 1

    def rank(
        self, state: DroppingState, shape: LayerShape, queries: Tensor, start: int, left: Tensor, reader: KVReader
    ) -> Tensor:
        last = state.queries.read(start - 1, start)
        keys = keys_of(reader, left, start)
        weights = attention_weights(shape, queries[:, :1] if last is None else last, keys)
        return weights.mean((0, 1)).unsqueeze(0).to(queries.device)
