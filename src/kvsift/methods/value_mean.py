"""The mean of all values of a sequence so far: sums of whole blocks are remembered, the rest is read when asked for.

Sums are float64 and of blocks at absolute places, so that the mean does not depend on how tokens came, and a roll-back
cuts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsift.types import KVReader

BLOCK = 256  # tokens
AT_ONCE = 16  # blocks that are summed together, bounding what is needed besides


@dataclass
class ValueMean:
    """Of one sequence in one layer."""

    sums: Tensor | None = (
        None  # float64 [num_kv_heads, n + 1, head_dim], of the first 0 to n blocks; a new one each time
    )

    def read(self, reader: KVReader, stop: int) -> Tensor:
        """Mean of the first ``stop`` values, float32 [num_kv_heads, head_dim]."""
        while self.num_blocks < stop // BLOCK:
            self._append(reader, min(self.num_blocks + AT_ONCE, stop // BLOCK))
        whole = stop // BLOCK
        total = reader.values(whole * BLOCK, stop).double().sum(1)
        if self.sums is not None:
            total = total + reader.counted(self.sums[:, whole])
        return (total / stop).float()

    @property
    def num_blocks(self) -> int:
        return 0 if self.sums is None else self.sums.shape[1] - 1

    @torch.inference_mode()  # what is remembered outlives the block it was made in
    def _append(self, reader: KVReader, stop_block: int) -> None:
        first = self.num_blocks
        values = reader.values(first * BLOCK, stop_block * BLOCK).double()
        added = values.unflatten(1, (-1, BLOCK)).sum(2).cumsum(1)
        if self.sums is None:
            self.sums = torch.nn.functional.pad(added, (0, 0, 1, 0))
        else:
            self.sums = torch.cat([self.sums, self.sums[:, -1:] + added], 1)

    def fork(self) -> ValueMean:
        return ValueMean(self.sums)  # never written in place

    def crop(self, length: int) -> None:
        if self.sums is not None:
            self.sums = self.sums[:, : length // BLOCK + 1]
