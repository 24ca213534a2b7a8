"""How often the generated tokens of one sequence have selected each token before them, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsift.stores.base import Segment
from kvsift.types import Chunk, LayerShape, Selection


@dataclass
class LayerSelections:
    """What one layer has selected.

    Attributes:
        selecting_steps: steps that selected, or saw no more than sinks and window.
        dense_steps: steps that saw everything.
        counts: by unit size, steps in which a unit was selected, a mean over heads; float32 [units].
    """

    selecting_steps: int = 0
    dense_steps: int = 0
    counts: dict[int, Tensor] = field(default_factory=dict)

    def add(self, selection: Selection, num_tokens: int) -> None:
        """Count the selection of a step, of units before position ``num_tokens``."""
        units, size = selection.units, selection.unit_size
        if size not in self.counts:
            self.counts[size] = torch.zeros(-(-num_tokens // size) + 1, device=units.device)
        counts = self.counts[size]
        last = len(counts) - 1  # takes padding, and units of generated tokens
        where = torch.where((units < 0) | (units > last), last, units).flatten()
        counts.index_add_(0, where, torch.ones_like(where, dtype=torch.float32), alpha=1 / units.shape[0])

    def by_token(self, num_tokens: int) -> Tensor:
        """Steps in which each token was selected, a mean over heads; float32 [num_tokens] on the CPU."""
        total = torch.zeros(num_tokens)
        for size, counts in self.counts.items():
            total += counts[:-1].cpu().repeat_interleave(size)[:num_tokens]
        return total


class SelectionLog:
    """An ``Observer`` of the cache of one sequence. Sinks and the local window, which every step sees, are left out.

    A step that failed and is repeated counts once: what a layer selected last is counted when its next step comes.

    Args:
        prompt_length: tokens that may be selected; the steps of later tokens are counted.
    """

    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length
        self._layers: dict[int, LayerSelections] = {}
        self._last: dict[int, tuple[int, bool, Selection | None]] = {}  # position, is dense, selection; by layer

    def before_chunk(self, shape: LayerShape, chunk: Chunk, decode_tokens: int) -> None:
        pass

    @torch.inference_mode()
    def after_segment(
        self, shape: LayerShape, row: int, segment: Segment, spans: tuple[int, int], selection: Selection | None
    ) -> None:
        if segment.start < self.prompt_length:
            return
        if shape.layer in self._last and self._last[shape.layer][0] != segment.start:
            self._count(shape.layer)
        self._last[shape.layer] = segment.start, spans == (0, 0) and selection is None, selection

    @torch.inference_mode()
    def layers(self) -> dict[int, LayerSelections]:
        """What was selected so far, by layer."""
        for layer in [*self._last]:
            self._count(layer)
        return dict(sorted(self._layers.items()))

    def _count(self, layer: int) -> None:
        _, is_dense, selection = self._last.pop(layer)
        counted = self._layers.setdefault(layer, LayerSelections())
        counted.dense_steps += is_dense
        counted.selecting_steps += not is_dense
        if selection is not None:
            counted.add(selection, self.prompt_length)
