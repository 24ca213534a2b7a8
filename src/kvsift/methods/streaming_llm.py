"""StreamingLLM: sinks and the most recent tokens, nothing between (https://arxiv.org/abs/2309.17453).

With ``positions="cache"``, as in the paper, tokens are numbered within the cache: sinks are 0 to s - 1, the window s to
s + w - 1. Distances within the window do not change; the sinks are attended from position s + w - 1, by one rotation of
the query. No distance exceeds s + w - 1 in any context.

Deviation from the paper: keys keep their absolute positions by default, as in most re-implementations. The store keeps
tokens outside sinks and window, and they are not read. ``evict=true`` frees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvsift.methods.base import Method, Phase
from kvsift.methods.checks import knob
from kvsift.methods.traits import Traits
from kvsift.types import Moved


@dataclass(frozen=True)
class StreamingLLM(Method):
    """Sinks and window alone: the window is the budget without the sinks.

    Attributes:
        positions: "absolute", or "cache": re-numbered. No layer is dense then by default, as dense layers would have
            distances that the model was not trained for.
        evict: free tokens that have left the window.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    source: ClassVar[str] = "arXiv 2309.17453"

    positions: Literal["absolute", "cache"] = knob("absolute")
    evict: bool = knob(False)

    @property
    def traits(self) -> Traits:
        return Traits(selects=False, slides=True, keeps_all=False, repositions=self.positions == "cache")

    @property
    def budget_defaults(self) -> dict[str, Any]:
        return {"dense_layers": ()} if self.positions == "cache" else {}

    def reposition(self, positions: Tensor, spans: Sequence[tuple[int, int]]) -> Moved:
        skipped = torch.tensor([window_start - sinks_stop for sinks_stop, window_start in spans])
        return Moved(positions - skipped)
