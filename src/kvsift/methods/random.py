"""Random: units drawn with equal chance. The floor that any method must clear at the same budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.methods.base import Phase, ScoringMethod
from kvsift.methods.pages import check_page_size
from kvsift.types import Candidates, KVReader, LayerShape


@dataclass(frozen=True)
class Random(ScoringMethod):
    """Uniformly random units; the draw depends on seed, layer, head and position alone, so runs repeat.

    Attributes:
        page_size: tokens per unit.
        seed: of the draw.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    estimates_mass: ClassVar[bool] = False

    page_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_page_size(self.page_size)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise InputError(f"seed={self.seed!r} must be a whole number, 0 or more.")

    @property
    def unit_size(self) -> int:
        return self.page_size

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, shape.layer, start)) & 0x7FFFFFFF)
        draw = torch.rand(shape.num_query_heads, 1, candidates.stop, generator=generator)
        return draw[..., candidates.units].to(queries.device)
