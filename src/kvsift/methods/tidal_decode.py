"""TidalDecode: each head's tokens, chosen in one layer and reused above (https://arxiv.org/abs/2410.05076).

The first sparse layer and a later one attend everything and rank all tokens exactly; the layers above attend the best
tokens of the same head. LessIsMore selects in the same layers, but one set for all heads.

Deviation from the paper: sinks and window are always visible, and query heads that share a KV head share a set,
unless ``heads="query"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvsift.methods.checks import knob
from kvsift.methods.less_is_more import LessIsMore
from kvsift.methods.scoring import ScoringMethod
from kvsift.methods.traits import Traits
from kvsift.types import LayerShape


@dataclass(frozen=True)
class TidalDecode(LessIsMore, ScoringMethod):
    """The tokens that each head ranks highest, for all layers up to the correction and for all above.

    Attributes: see ``LessIsMore``.
    """

    traits: ClassVar[Traits] = Traits(no_mass="selects for layers whose attention it does not compute")
    source: ClassVar[str] = "arXiv 2410.05076"
    published: ClassVar[int] = 13

    recent_fraction: float = knob(0.0, is_share=True)

    def ranking(self, shape: LayerShape, shares: Tensor, k: int) -> Tensor:
        by_list = shares.unflatten(0, (self.num_selections(shape), -1)).mean(1)
        return by_list.sort(dim=-1, descending=True, stable=True).indices[:, :k]
