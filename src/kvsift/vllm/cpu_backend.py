"""vLLM's CPU attention with sparse decode: everything is the stock backend's but the sequences that a plan makes
sparse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from kvsift.types import LayerShape
from kvsift.vllm import compat
from kvsift.vllm.block_cache import BlockCache, BlockLayout, attend_token
from kvsift.vllm.engine_state import EngineState, state_of
from kvsift.vllm.refusals import check_block_size
from kvsift.vllm.step_rows import GeneratingRow, StepRows

GIB = 1 << 30


class SparseCPUBackend(CPUAttentionBackend):  # type: ignore[misc]
    """The entry that replaces ``CPU_ATTN``."""

    @staticmethod
    def get_impl_cls() -> type[SparseCPUImpl]:
        return SparseCPUImpl

    @staticmethod
    def get_builder_cls() -> type[SparseCPUMetadataBuilder]:
        return SparseCPUMetadataBuilder


class SparseCPUMetadataBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Adds the sequences that decode to the stock metadata, as ``kvsift``."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._state = state_of(vllm_config)
        if self._state is not None:
            check_block_size(self.block_size, self._state.settings)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        stock = super().build
        metadata = stock(common_prefix_len, common_attn_metadata, fast_build)
        if self._state is not None:
            rows = StepRows.of(common_attn_metadata, self._state, lambda common: stock(0, common))
            metadata.kvsift = rows if rows.decodes else None
            counters = self._state.counters
            counters.export()
            if line := counters.line(self._state.settings.log_every_s):
                compat.logger.info(line)
        return metadata


class SparseCPUImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        state = state_of(get_current_vllm_config())
        if state is not None and (reason := compat.why_dense(self)):
            compat.logger.info_once("kvsift: layers with %s stay dense.", reason)
            state = None
        self._state: EngineState | None = state
        if state is not None:
            state.layers += 1
        self._cache: BlockCache | None = None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if self._state is not None and self._state.settings.summaries and kv_cache.numel():
            self._block_cache(self._state, layer, kv_cache).summarise(slot_mapping[: len(key)].to(torch.int64))

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """As the stock backend; ``query`` [num_tokens, num_heads, head_dim], ``output`` the same or flattened."""
        step: StepRows | None = getattr(attn_metadata, "kvsift", None)
        if self._state is None or step is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        shape = self._shape(layer)
        dense_below, sparse = self._state.settings.dense_below or 0, []
        for row in step.decodes:
            rule = row.sparse_rule(shape.layer, dense_below)
            if rule is None:
                self._count_dense(row, kv_cache)
            else:
                sparse.append((row, rule))
        if not sparse:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        tokens, metadata = step.others([row.row for row, _ in sparse])
        if len(tokens):
            part = torch.empty_like(output[tokens])
            some = (tensor[tokens] for tensor in (query, key, value))
            super().forward(layer, *some, kv_cache, metadata, part, *args, **kwargs)
            output[tokens] = part
        cache = self._block_cache(self._state, layer, kv_cache)
        for row, rule in sparse:
            blocks = attn_metadata.block_table[row.row].to(torch.int64)
            tally, own = self._state.counters.tally, query[row.token]
            is_probed = self._state.probes(tally.sparse_queries)
            attended = attend_token(shape, rule, own, cache, blocks, row.length, tally, self.sinks, is_probed)
            output[row.token] = attended.view_as(output[row.token])
        return output

    def _count_dense(self, row: GeneratingRow, kv_cache: Tensor) -> None:
        assert self._state is not None
        token_bytes = kv_cache.shape[1] * kv_cache.shape[3] * kv_cache.element_size()
        self._state.counters.tally.add_query(row.length, row.length, token_bytes)

    def _shape(self, layer: Any) -> LayerShape:
        index = compat.layer_index(layer.layer_name)
        softcap = self.logits_soft_cap or None
        return LayerShape(index, self.num_heads, self.num_kv_heads, self.head_size, self.scale, softcap)

    def _block_cache(self, state: EngineState, layer: Any, kv_cache: Tensor) -> BlockCache:
        if self._cache is None or self._cache.kv.data_ptr() != kv_cache.data_ptr():
            stock = super().do_kv_cache_update

            def write(keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
                stock(layer, keys, values, cache, slots)

            self._cache = BlockCache(kv_cache, BlockLayout.find(kv_cache, write), state.settings.summaries)
            state.summary_bytes += self._cache.summary_bytes
            compat.logger.info(
                "kvsift: layer %s keeps %.3f GiB of page summaries beside %.3f GiB of KV cache, %.3f GiB in all layers "
                "so far; they are not part of VLLM_CPU_KVCACHE_SPACE.",
                compat.layer_index(layer.layer_name), self._cache.summary_bytes / GIB, kv_cache.nbytes / GIB,
                state.summary_bytes / GIB,
            )  # fmt: skip
        return self._cache
