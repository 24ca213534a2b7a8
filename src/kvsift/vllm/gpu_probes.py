"""Recovery of plans on a GPU, by probes between captured steps: now and then, of one row in one layer.

A step keeps the queries of a few layers, each by one small copy. Between two steps the lists of such a layer are chosen
again, from the summaries that it read, and compared with exact attention; the result stays on the device until the
counters are read.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsift.kernels.recovery import RecoverySpace, recovery
from kvsift.vllm.gpu_decode import DecodeBuffers, LayerPages

LAYERS = 4  # whose queries are kept
WHOLE = 1 << 32  # a recovery of 1, as they are added up


@dataclass
class _Kept:
    """A layer whose queries a step has kept."""

    queries: Tensor  # [max_rows, num_query_heads, head_dim]
    layer: weakref.ref[LayerPages]  # vLLM replaces a cache after its trial steps
    scale: float
    softcap: float | None


class GpuProbes:
    """Probes of the layers that share ``DecodeBuffers``.

    Args:
        layers: names of those that are sparse; a few of them are probed, the first and the last among them.
        every: steps between two probes; 0: there are none.
        dtype: of queries.

    Attributes:
        sums: int64 [2], probes, and their recoveries (a mean over query heads) in units of 1 / WHOLE.
    """

    def __init__(self, buffers: DecodeBuffers, layers: Sequence[str], every: int, dtype: torch.dtype) -> None:
        self._buffers, self._every, self._steps, shape = buffers, every, 0, buffers.shape
        last, count = len(layers) - 1, min(LAYERS, len(layers)) if every else 0
        names = [layers[i * last // max(count - 1, 1)] for i in range(count)]
        memory = torch.zeros(
            count, buffers.max_rows, shape.num_query_heads, shape.head_dim, dtype=dtype, device=buffers.totals.device
        )
        self._queries = dict(zip(names, memory))
        self._kept: dict[str, _Kept] = {}
        self._space: RecoverySpace | None = None
        self.sums = torch.zeros(2, dtype=torch.int64, device=memory.device)

    def keep(self, name: str, queries: Tensor, layer: LayerPages, scale: float, softcap: float | None) -> None:
        """Keep the queries of a layer, [batch, num_query_heads, head_dim], if it is one of those; in a graph, too."""
        if (memory := self._queries.get(name)) is not None:
            memory[: len(queries)].copy_(queries)
            self._kept[name] = _Kept(memory, weakref.ref(layer), scale, softcap)

    def after(self, rows: int) -> None:
        """Probe one of the rows that decoded in the step before, when it is time; not while capturing."""
        if not rows or not self._kept:
            return
        turn, early = divmod(self._steps, self._every)
        self._steps += 1
        if early:
            return
        turn, number = divmod(turn, len(self._kept))
        kept = list(self._kept.values())[number]
        if (layer := kept.layer()) is not None:
            self._probe(turn % rows, kept, layer)

    def _probe(self, row: int, kept: _Kept, layer: LayerPages) -> None:
        buffers, queries = self._buffers, kept.queries[row : row + 1]
        kv, units, counts = buffers.lists(row, queries, layer, kept.scale, kept.softcap)
        if self._space is None and queries.is_cuda:
            self._space = RecoverySpace.make(kv, queries, units, buffers.unit_size)
        found = recovery(
            queries, kv, units, counts, scale=kept.scale, softcap=kept.softcap, unit_size=buffers.unit_size,
            space=self._space,
        )  # fmt: skip
        share = (found.double().clamp_max(1).mean() * WHOLE).long()
        self.sums += torch.stack([torch.ones_like(share), share]) * buffers.is_sparse(row)
