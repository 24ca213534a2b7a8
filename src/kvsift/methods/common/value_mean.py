"""The mean of all values of a sequence: sums of complete blocks are kept, the other values are read from the store.

Sums are float64 and of blocks at absolute positions, so that the mean does not depend on the chunks, and a roll-back
removes the last sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsift.types import KVReader

BLOCK = 256  # tokens
AT_ONCE = 16  # blocks that are summed together, which bounds temporary memory


@dataclass
class ValueMean:
    """Mean value of one sequence in one layer."""

    sums: Tensor | None = None  # float64 [num_kv_heads, n + 1, head_dim], of the first 0 to n blocks; never written to

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

    @torch.inference_mode()  # the sums outlive the caller's inference mode
    def _append(self, reader: KVReader, stop_block: int) -> None:
        first = self.num_blocks
        values = reader.values(first * BLOCK, stop_block * BLOCK).double()
        added = values.unflatten(1, (-1, BLOCK)).sum(2).cumsum(1)
        if self.sums is None:
            self.sums = torch.nn.functional.pad(added, (0, 0, 1, 0))
        else:
            self.sums = torch.cat([self.sums, self.sums[:, -1:] + added], 1)

    def fork(self) -> ValueMean:
        return ValueMean(self.sums)  # shared: never written to

    def crop(self, length: int) -> None:
        if self.sums is not None:
            self.sums = self.sums[:, : length // BLOCK + 1]
