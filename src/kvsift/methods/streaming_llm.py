"""StreamingLLM: sinks and the most recent tokens, nothing between (https://arxiv.org/abs/2309.17453).

With ``positions="cache"``, as in the paper, a token's position is its place among those that are seen: sinks are
0 to s - 1, the window s to s + w - 1. The window is as far from the query as it was, so all that changes is that sinks
are seen from s + w - 1: one turn of the query. No distance exceeds s + w - 1, however long the context.

Deviation from the paper: keys keep their absolute positions by default, as in most re-implementations. Nothing is
dropped from the store; it is only not read. ``evict=true`` frees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvsift.methods import knobs
from kvsift.methods.base import Method, Phase
from kvsift.types import Moved


@dataclass(frozen=True)
class StreamingLLM(Method):
    """Sinks and window alone: the whole budget that sinks leave is the window.

    Attributes:
        positions: "absolute", or "cache": re-numbered. No layer is dense then by default, as dense layers would see
            distances that the model was not trained for.
        evict: free what has left the window.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    selects: ClassVar[bool] = False
    slides: ClassVar[bool] = True
    keeps_all: ClassVar[bool] = False
    source: ClassVar[str] = "arXiv 2309.17453"

    positions: Literal["absolute", "cache"] = "absolute"
    evict: bool = False

    def __post_init__(self) -> None:
        knobs.flag("evict", self.evict)
        knobs.one_of("positions", self.positions, ("absolute", "cache"))

    @property
    def moves(self) -> bool:  # type: ignore[override]
        return self.positions == "cache"

    @property
    def budget_defaults(self) -> dict[str, Any]:
        return {"dense_layers": ()} if self.moves else {}

    def move(self, positions: Tensor, spans: Sequence[tuple[int, int]]) -> Moved:
        skipped = torch.tensor([window_start - sinks_stop for sinks_stop, window_start in spans])
        return Moved(positions - skipped)
