"""vLLM's FlashAttention with sparse decode: ``--attention-backend CUSTOM``.

Rows that decode take one launch in each layer, in captured graphs too; all others are the stock backend's, with
metadata of their own, so that what a row gives does not depend on its neighbours. A plan that skips nothing up to
max_model_len leaves everything to the stock backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from kvsift.errors import InputError
from kvsift.kernels.block_pages import BlockPages
from kvsift.kernels.page_summary import row_format
from kvsift.kernels.summarise_slots import compile_ahead, summarise_slots
from kvsift.layer.paged_decode import rule_of
from kvsift.plan.plan import Rule
from kvsift.types import LayerShape
from kvsift.vllm import compat
from kvsift.vllm.engine_state import EngineState, state_of
from kvsift.vllm.gpu_counters import GpuCounters
from kvsift.vllm.gpu_decode import DecodeBuffers, LayerPages
from kvsift.vllm.gpu_memory import GIB, hold
from kvsift.vllm.refusals import check_block_size


def sparse_rule(config: Any) -> tuple[EngineState, Rule] | None:
    """Return the state of an engine and its rule of decode; None if that skips nothing."""
    state = state_of(config)
    rule = None if state is None else rule_of(state.settings.plan)
    if state is None or rule is None:
        return None
    length, budget = config.model_config.max_model_len, rule.budget
    dense_to = max(budget.limit(length), budget.min_context - 1, state.settings.dense_below - 1)
    return None if dense_to >= length else (state, rule)


class SparseFlashBackend(FlashAttentionBackend):  # type: ignore[misc]
    """The entry CUSTOM."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SparseFlashImpl]:
        return SparseFlashImpl

    @staticmethod
    def get_builder_cls() -> type[SparseFlashMetadataBuilder]:
        return SparseFlashMetadataBuilder


@dataclass
class GpuStep:
    """What the layers of a step share, as ``kvsift`` of the stock metadata."""

    decodes: int  # rows, which come first; each has one token
    buffers: DecodeBuffers
    rest: Any  # stock metadata of the other rows; None if there are none
    begun: bool = False  # whether a layer has taken the step over into the buffers


class SparseFlashMetadataBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Splits a step into rows that decode and others."""

    supports_update_block_table = False  # tables are read by the first layer of a step alone

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        # graphs of mixed batches would fix which rows decode
        if sparse_rule(vllm_config) is not None:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        found = sparse_rule(vllm_config)
        self._buffers: DecodeBuffers | None = None
        if found is None or getattr(kv_cache_spec, "sliding_window", None) is not None:
            return
        self._state, rule = found
        check_block_size(self.block_size, self._state.settings)
        self._init_reorder_batch_threshold(1)  # model runner V1 then puts rows that decode first, as V2 does
        heads, dim = kv_cache_spec.num_kv_heads, kv_cache_spec.head_size
        shape = LayerShape(-1, self.num_heads_q, heads, dim, dim**-0.5)
        self._buffers = DecodeBuffers(
            rule, shape, vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len,
            self._state.settings.dense_below, device,
        )  # fmt: skip
        kind, page_size = self._state.settings.summaries[0]
        element = kv_cache_spec.dtype.itemsize
        index_bytes = heads * row_bytes(kind, dim, page_size, kv_cache_spec.dtype) / page_size
        self._counters = GpuCounters(self._buffers, heads * 2 * dim * element, index_bytes)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        buffers, common = self._buffers, common_attn_metadata
        if buffers is None or common.causal is not True:
            return super().build(common_prefix_len, common, fast_build)
        decodes, others, tokens, _ = split_decodes_and_prefills(common, 1)
        rest = None
        if decodes and others:
            assert tokens == decodes, "each of the first rows has one token"
            rest = super().build(0, _without_first(common, decodes), fast_build)
            if rest.scheduler_metadata is not None:  # in a buffer that the next call fills again
                rest.scheduler_metadata = rest.scheduler_metadata.clone()
        metadata = super().build(common_prefix_len, common, fast_build)
        metadata.kvsift = GpuStep(decodes, buffers, rest) if decodes else None
        counters = self._state.counters
        self._counters.poll(counters)
        counters.export()
        if line := counters.line(self._state.settings.log_every_s):
            compat.logger.info(line)
        return metadata

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return self._buffers is None and super().use_cascade_attention(*args, **kwargs)


def row_bytes(kind: str, head_dim: int, page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of a page summary."""
    width, own = row_format(kind, head_dim, page_size)
    return width * (own or dtype).itemsize


def _without_first(common: Any, rows: int) -> Any:
    """Return vLLM's description of a step without its first rows, each of one token."""
    return replace(
        common,
        query_start_loc=common.query_start_loc[rows:] - rows,
        query_start_loc_cpu=common.query_start_loc_cpu[rows:] - rows,
        seq_lens=common.seq_lens[rows:],
        num_reqs=common.num_reqs - rows,
        num_actual_tokens=common.num_actual_tokens - rows,
        block_table_tensor=common.block_table_tensor[rows:],
        slot_mapping=common.slot_mapping[rows:],
    )


class SparseFlashImpl(FlashAttentionImpl):  # type: ignore[misc]
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._config = get_current_vllm_config()
        found = sparse_rule(self._config)
        if found is not None and (reason := self._stays_dense()):
            compat.logger.info_once("kvsift: layers with %s stay dense.", reason)
            found = None
        self._found = found
        self._dense_layer: bool | None = None  # whether the plan leaves this layer dense, once its name is known
        self._layer: LayerPages | None = None
        self._cache: tuple[int, torch.Size] | None = None  # address and shape of the cache that _layer is of

    def _stays_dense(self) -> str:
        """Why the layer is attended by the stock backend alone; empty if it need not be."""
        if self.attn_type != "decoder":
            return f"attention of type {self.attn_type}"
        if self.sliding_window != (-1, -1):
            return f"a sliding window of {self.sliding_window[0] + 1} tokens"
        if self.alibi_slopes is not None:
            return "ALiBi"
        return "a cache of another layer" if self.kv_sharing_target_layer_name else ""

    def _is_sparse(self, layer: Any) -> bool:
        if self._found is None:
            return False
        if self._dense_layer is None:
            self._dense_layer = compat.layer_index(layer.layer_name) in self._found[1].budget.dense_layers
        return not self._dense_layer

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if self._is_sparse(layer) and kv_cache.numel():
            own, (kind, _) = self._layer_pages(layer, kv_cache), self._summary
            summarise_slots(kind, slot_mapping, own.keys, own.values, own.rows, own.pages)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """As the stock backend; ``query`` and ``output`` [num_tokens, num_heads, head_dim]."""
        if attn_metadata is None and self._found is not None and not kv_cache.numel():
            self._hold_memory(query)
        step: GpuStep | None = getattr(attn_metadata, "kvsift", None)
        if step is None or not self._is_sparse(layer):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        own, rows, buffers = self._layer_pages(layer, kv_cache), step.decodes, step.buffers
        if not step.begun:
            step.begun = True
            buffers.begin(attn_metadata.block_table[:rows], attn_metadata.seq_lens[:rows], own.pages)
        softcap = self.logits_soft_cap or None
        new = layer.layer_name not in buffers.layers
        buffers.layers.add(layer.layer_name)
        buffers.attend(query[:rows], own, self.scale, softcap, self.sinks, output[:rows])
        if new and len(buffers.layers) == 1:
            compat.logger.info_once(
                "kvsift: a single launch decodes %s; Triton kernels the others.", buffers.single_launches
            )
        if step.rest is not None:
            rest = (tensor[rows:] for tensor in (query, key, value))
            super().forward(layer, *rest, kv_cache, step.rest, output[rows:], *args, **kwargs)
        return output

    @property
    def _summary(self) -> tuple[str, int]:
        """Kind of summary, and page size."""
        assert self._found is not None
        return self._found[0].settings.summaries[0]

    def _hold_memory(self, query: Tensor) -> None:
        assert self._found is not None
        state = self._found[0]
        if state.held is None:
            kind, page_size = self._summary
            summary = row_bytes(kind, self.head_size, page_size, query.dtype)
            share = summary / (page_size * 2 * self.head_size * query.element_size())
            state.held = hold(self._config, share, query.device)

    def _layer_pages(self, layer: Any, kv_cache: Tensor) -> LayerPages:
        cache = kv_cache.data_ptr(), kv_cache.shape
        if self._layer is not None and self._cache == cache:
            return self._layer
        assert self._found is not None
        assert not torch.cuda.is_current_stream_capturing(), "vLLM runs a step before it captures one"
        if kv_cache.dim() != 4 or kv_cache.shape[1:4:2] != (self.num_kv_heads, 2 * self.head_size):
            raise InputError(
                f"this vLLM keeps its KV cache as {list(kv_cache.shape)}, in a way that kvsift does not know. Start it "
                "without the kvsift settings."
            )
        state, (kind, page_size) = self._found[0], self._summary
        state.held = None  # what the profile run held is for this
        pages = BlockPages.of(kv_cache, page_size)
        width, dtype = row_format(kind, self.head_size, page_size)
        old = self._layer.rows.untyped_storage().nbytes() if self._layer is not None else 0
        self._layer = None  # freed before the new one is made
        keys, values = pages.split(kv_cache)
        rows = pages.new_rows(len(kv_cache), self.num_kv_heads, width, dtype or kv_cache.dtype, kv_cache.device)
        self._layer, self._cache = LayerPages(pages, keys, values, rows), cache
        size = rows.untyped_storage().nbytes()
        if not state.summary_bytes:  # else the first prompt waits for it
            compile_ahead(kind, keys, values, rows, pages)
        state.summary_bytes += size - old
        compat.logger.info(
            "kvsift: layer %s keeps %.3f GiB of page summaries for %d blocks, %.3f GiB in all layers so far.",
            compat.layer_index(layer.layer_name), size / GIB, len(kv_cache), state.summary_bytes / GIB,
        )  # fmt: skip
        return self._layer
