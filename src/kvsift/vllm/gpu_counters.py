"""PhaseCounters of decode that live on a GPU: read every few seconds, without waiting for them."""

from __future__ import annotations

from time import monotonic

import torch
from torch import Tensor

from kvsift.layer.accounting import Tally
from kvsift.vllm.counters import PhaseCounters
from kvsift.vllm.gpu_decode import DecodeBuffers
from kvsift.vllm.gpu_probes import WHOLE, GpuProbes

EVERY_S = 5.0


class GpuCounters:
    """Copies what ``DecodeBuffers`` count to ``PhaseCounters``.

    Args:
        buffers, probes: of a group of layers.
        token_bytes: of keys and values of a token, all KV heads.
        index_bytes: of summaries per token, all KV heads.
    """

    def __init__(self, buffers: DecodeBuffers, probes: GpuProbes, token_bytes: int, index_bytes: float) -> None:
        self._buffers, self._probes, self._token_bytes, self._index_bytes = buffers, probes, token_bytes, index_bytes
        self._host = torch.zeros(7, dtype=torch.int64).pin_memory()
        self._before = [0] * 7
        self._copied: torch.cuda.Event | None = None
        self._next_s = monotonic() + EVERY_S

    def poll(self, counters: PhaseCounters) -> None:
        """Add what was counted up to the last copy, and start the next copy when it is time. Not while capturing."""
        if self._copied is not None and self._copied.query():
            self._copied = None
            self._add(counters, self._host.tolist())
        elif self._copied is None and monotonic() >= self._next_s:
            self._host.copy_(self._sums(), non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
            self._next_s = monotonic() + EVERY_S

    def _sums(self) -> Tensor:
        buffers = self._buffers
        return torch.cat([buffers.totals.sum(0), buffers.visible.sum(0, keepdim=True), self._probes.sums])

    def _add(self, counters: PhaseCounters, sums: list[int]) -> None:
        queries, context, sparse, sparse_context, visible, probes, recovery = (
            now - then for now, then in zip(sums, self._before)
        )
        self._before, layers = sums, len(self._buffers.layers)
        visible_tokens = visible / self._buffers.shape.num_kv_heads
        counters.tally.add(Tally(
            queries=queries * layers, sparse_queries=sparse * layers, visible_tokens=visible_tokens,
            context_tokens=context * layers, kv_bytes_read=visible_tokens * self._token_bytes,
            index_bytes_read=sparse_context * layers * self._index_bytes,
            kv_bytes_dense=context * layers * self._token_bytes, probes=probes, recovery=recovery / WHOLE,
        ))  # fmt: skip
