"""What captured steps count on a GPU, and probes between them, until the host adds both to a tally.

A step keeps the queries of a few layers, each by one small copy. Between two steps the lists of such a layer are chosen
again for one sequence, from the summaries that it read, and compared with exact attention; lists that it reuses are
still there. Nothing waits for the GPU: what it has counted is copied every few seconds, and read when the copy is
there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from time import monotonic

import torch
from torch import Tensor

from kvsift.kernels.recovery import RecoverySpace, recovery
from kvsift.layer.accounting import Tally
from kvsift.layer.paged_decode import DecodeBatch, DecodeLayer
from kvsift.vllm.gpu_decode import BlockBatch

EVERY_S = 5.0  # seconds between two copies
LAYERS = 4  # whose queries are kept
WHOLE = 1 << 32  # a recovery of 1, as they are added up


class GpuCounters:
    """Counts and probes of the layers that share a batch.

    Args:
        batch: batch of the layers.
        layers: names of those that are sparse; a few of them are probed, the first and the last among them.
        every: steps between two probes; 0: there are none.
        dtype: dtype of queries.
        token_bytes: bytes of keys and values of a token, all KV heads.
        index_bytes: bytes of summaries per token, all KV heads.

    Attributes:
        probed: int64 [2], probes, and their recoveries (a mean over query heads) in units of 1 / WHOLE.
    """

    def __init__(
        self, batch: BlockBatch, layers: Sequence[str], every: int, dtype: torch.dtype, token_bytes: int,
        index_bytes: float,
    ) -> None:  # fmt: skip
        self._batch, self._every, self._token_bytes, self._index_bytes = batch, every, token_bytes, index_bytes
        last, count = len(layers) - 1, min(LAYERS, len(layers)) if every else 0
        names = [layers[i * last // max(count - 1, 1)] for i in range(count)]
        shape, device, rows = batch.shape, batch.table.device, batch.table.shape[0]
        memory = torch.zeros(count, rows, shape.num_query_heads, shape.head_dim, dtype=dtype, device=device)
        self._queries = dict(zip(names, memory))
        self._kept: dict[str, weakref.ref[DecodeLayer]] = {}  # vLLM replaces a cache after its trial steps
        # one row at an address of its own: Triton compiles again for addresses that 16 does not divide
        table = torch.zeros_like(batch.table[:1])
        self._one = DecodeBatch(table, [0], batch.page_size, [None], batch.capacity, batch.unit_size)
        self._one.ranked, self._one.launches = batch.ranked, batch.launches
        self._lists: tuple[Tensor, Tensor] | None = None
        self._space: RecoverySpace | None = None
        self._steps = 0
        self.probed = torch.zeros(2, dtype=torch.int64, device=device)
        self._host = torch.zeros(7, dtype=torch.int64, pin_memory=self.probed.is_cuda)
        self._before = [0] * 7
        self._copied: torch.cuda.Event | None = None
        self._next_s = monotonic() + EVERY_S

    def keep(self, name: str, queries: Tensor, layer: DecodeLayer) -> None:
        """Keep the queries of a layer, [batch, num_query_heads, head_dim], if it is one of those; captured as well."""
        if (memory := self._queries.get(name)) is not None:
            memory[: len(queries)].copy_(queries)
            self._kept[name] = weakref.ref(layer)

    def probe(self, rows: int) -> None:
        """Probe one of the sequences that decoded in the step before, when it is time; not while capturing."""
        if not rows or not self._kept:
            return
        turn, early = divmod(self._steps, self._every)
        self._steps += 1
        if early:
            return
        turn, number = divmod(turn, len(self._kept))
        name, kept = list(self._kept.items())[number]
        if (layer := kept()) is not None:
            row = turn % rows
            self._probe(row, self._queries[name][row : row + 1], layer)

    def _probe(self, row: int, queries: Tensor, layer: DecodeLayer) -> None:
        batch, one, shape = self._batch, self._one, layer.shape
        for own, shared in ((one.table, batch.table), (one.lengths, batch.lengths), (one.spans, batch.spans)):
            own.copy_(shared[row : row + 1])
        kv, is_sparse = layer.kv, batch.is_sparse(row)
        alone = DecodeLayer(shape, one, kv.keys, kv.values, layer.summary, layer.method, memory=self._lists)
        if layer.summary is None:  # a row that is dense has none: what is there is of another sequence
            units, counts = (each.clone() for each in layer.lists_of(slice(row, row + 1)))
            counts *= is_sparse
        else:
            alone.attend(queries, "sparse")
            assert alone.lists is not None
            self._lists = units, counts = alone.lists
        if self._space is None and queries.is_cuda:
            self._space = RecoverySpace.make(alone.kv, queries, units, one.unit_size)
        found = recovery(
            queries, alone.kv, units, counts, scale=shape.scale, softcap=shape.softcap, unit_size=one.unit_size,
            space=self._space,
        )  # fmt: skip
        share = (found.double().clamp_max(1).mean() * WHOLE).long()
        self.probed += torch.stack([torch.ones_like(share), share]) * is_sparse

    def poll(self, tally: Tally) -> None:
        """Add what was counted up to the last copy, and start the next copy when it is time. Not while capturing."""
        if self._copied is not None and self._copied.query():
            self._copied = None
            tally.add(self.counted(self._host.tolist()))
        elif self._copied is None and monotonic() >= self._next_s:
            self._host.copy_(self.sums(), non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
            self._next_s = monotonic() + EVERY_S

    def sums(self) -> Tensor:
        """All that was counted so far, int64 [7]."""
        return torch.cat([self._batch.totals.sum(0), self._batch.visible.sum(0, keepdim=True), self.probed])

    def counted(self, sums: list[int]) -> Tally:
        """Return what was counted in all layers between the sums of the last call and these."""
        queries, context, sparse, sparse_context, listed, probes, recovered = (
            now - then for now, then in zip(sums, self._before)
        )
        self._before, layers, selecting = sums, len(self._batch.layers), sum(self._batch.layers.values())
        dense = (context - sparse_context) * layers if self._batch.mode == "mixed" else 0  # the others have lists
        visible = listed / self._batch.shape.num_kv_heads + dense
        return Tally(
            queries=queries * layers, context_tokens=context * layers, visible_tokens=visible,
            sparse_queries=sparse * layers, kv_bytes_read=visible * self._token_bytes,
            index_bytes_read=sparse_context * selecting * self._index_bytes,
            kv_bytes_dense=context * layers * self._token_bytes, probes=probes, recovery=recovered / WHOLE,
        )  # fmt: skip
