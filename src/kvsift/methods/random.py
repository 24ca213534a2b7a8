"""Random: units drawn with equal probability. The floor for every method at the same budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvsift.methods.base import Phase
from kvsift.methods.checks import knob
from kvsift.methods.pages import PagedMethod
from kvsift.methods.traits import Traits
from kvsift.types import Candidates, KVReader, LayerShape


@dataclass(frozen=True)
class Random(PagedMethod):
    """Uniformly random units; the draw depends on seed, layer, head and position alone, so runs are reproducible.

    Attributes:
        seed: seed of the draw.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    traits: ClassVar[Traits] = Traits(granularity="page")

    seed: int = knob(0, 0)

    def score(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, reader: KVReader
    ) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, shape.layer, start)) & 0x7FFFFFFF)
        draw = torch.rand(shape.num_query_heads, 1, candidates.stop, generator=generator, dtype=torch.float32)
        return draw[..., candidates.units].to(queries.device)
