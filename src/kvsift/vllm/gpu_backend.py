"""vLLM's FlashAttention with sparse decode: ``--attention-backend CUSTOM``.

Sequences that decode take one launch in each layer, in CUDA graphs too. Sequences whose plan is sparse in prefill
are attended one by one (``gpu_prefill``). All others are the stock backend's, with metadata of their own, so that what
a sequence gives does not depend on its neighbours. Plans that skip nothing up to max_model_len leave everything to the
stock backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

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

from kvsift.errors import UnsupportedCall
from kvsift.kernels.block_pages import BlockPages
from kvsift.kernels.page_summary import row_format
from kvsift.kernels.summarise_slots import FEW, compile_ahead, summarise_slots
from kvsift.layer.paged_decode import DecodeLayer, rule_of
from kvsift.methods.common.anchors import Reuse
from kvsift.types import LayerShape
from kvsift.vllm import compat, gpu_prefill
from kvsift.vllm.engine_state import EngineState, state_of
from kvsift.vllm.gpu_counters import GpuCounters
from kvsift.vllm.gpu_decode import BlockBatch, LayerPages, capacity_of, dense_below_of
from kvsift.vllm.gpu_prefill import PromptRow, attend_prompt, workspace_bytes
from kvsift.vllm.refusals import FP8, check_block_size

GIB = 1 << 30


def sparse_state(config: Any) -> EngineState | None:
    """Return the state of an engine; None if its plans skip nothing."""
    state, length = state_of(config), config.model_config.max_model_len
    if state is None or state.settings.plan.prefill is not None:
        return state
    for budget in (rule.budget for rule in state.settings.decode_rules):
        if max(budget.limit(length), budget.min_context - 1, dense_below_of(state.settings) - 1) < length:
            return state
    return None


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


class RowRun(NamedTuple):
    """Neighbouring sequences of a step that are attended in the same way."""

    tokens: slice
    prompts: tuple[PromptRow, ...]  # empty: by the stock backend
    metadata: Any = None  # for it


@dataclass
class GpuStep:
    """What the layers of a step share, as ``kvsift`` of the stock metadata.

    Attributes:
        decodes: sequences that decode, which come first; each has one token.
        rest: stock metadata of the other sequences; None if there are none, or nothing before them.
        runs: the other sequences, where some are attended by a rule of prefill; empty if none is.
        dense_decodes: stock metadata of the sequences that decode, for layers where those alone are dense.
        begun: whether a layer has taken the step over into the batch.
    """

    decodes: int
    batch: BlockBatch
    counters: GpuCounters
    rest: Any = None
    runs: tuple[RowRun, ...] = ()
    dense_decodes: Any = None
    begun: bool = False

    @property
    def only_decodes(self) -> bool:
        """Whether no other sequences are in it."""
        return self.rest is None and not self.runs


class SparseFlashMetadataBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Splits a step into sequences that decode and others."""

    supports_update_block_table = False  # tables are read by the first layer of a step alone

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        # CUDA graphs of mixed batches would fix which sequences decode
        if sparse_state(vllm_config) is not None:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        state = sparse_state(vllm_config)
        self._batch: BlockBatch | None = None
        if state is None:
            if state_of(vllm_config) is not None:
                compat.logger.info_once("kvsift: up to max_model_len the plan skips nothing: vLLM's own attention.")
            return
        if getattr(kv_cache_spec, "sliding_window", None) is not None:
            return
        self._state, settings = state, state.settings
        check_block_size(self.block_size, settings)
        self._init_reorder_batch_threshold(1)  # model runner V1 then puts sequences that decode first, as V2 does
        heads, dim = kv_cache_spec.num_kv_heads, kv_cache_spec.head_size
        shape = LayerShape(-1, self.num_heads_q, heads, dim, dim**-0.5)
        self._batch = BlockBatch(
            settings.decode_rules, shape, vllm_config.scheduler_config.max_num_seqs,
            vllm_config.model_config.max_model_len, dense_below_of(settings), device, settings.allows_dense,
            settings.anchor_layers, state.lists,
        )  # fmt: skip
        kind, page_size = settings.summaries[0]
        element, dtype = kv_cache_spec.dtype.itemsize, vllm_config.model_config.dtype
        index_bytes = heads * row_bytes(kind, dim, page_size, dtype) / page_size
        dense = settings.decode_rules[0].budget.dense_layers
        sparse = [name for name in layer_names if compat.layer_index(name) not in dense]
        token_bytes, self._decoded = heads * 2 * dim * element, 0
        self._counters = GpuCounters(self._batch, sparse, settings.probe_every, dtype, token_bytes, index_bytes)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        batch, common = self._batch, common_attn_metadata
        if batch is None or common.causal is not True:
            return super().build(common_prefix_len, common, fast_build)
        decodes, others, tokens, _ = split_decodes_and_prefills(common, 1)
        slots = compat.slots_of_rows(common)
        self._counters.probe(self._decoded)  # before anything of the last step is replaced
        self._decoded = decodes
        batch.set_rules([rule_of(self._state.plan(slot)) for slot in slots[:decodes]])
        step = GpuStep(decodes, batch, self._counters)
        if others:
            assert tokens == decodes, "each of the first rows has one token"
            prompts = self._prompts(common, decodes, slots)
            step.rest = self._stock(common, decodes, common.num_reqs) if decodes else None
            step.runs = self._runs(common, decodes, prompts)
            step.dense_decodes = self._stock(common, 0, decodes) if decodes and prompts else None
        metadata = super().build(common_prefix_len, common, fast_build)
        metadata.kvsift = step if decodes or step.runs else None
        self._counters.poll(self._state.counters.tally)
        for counters in (self._state.counters, self._state.prompts):
            counters.export()
            if line := counters.line(self._state.settings.log_every_s):
                compat.logger.info(line)
        return metadata

    def _prompts(self, common: Any, decodes: int, slots: list[int]) -> dict[int, PromptRow]:
        """Sequences that are prefilled by a rule which leaves something out."""
        found = dict[int, PromptRow]()
        if self._state.settings.plan.prefill is None:
            return found
        starts, lengths = common.query_start_loc_cpu.tolist(), compat.lengths_of_rows(common)
        for row in range(decodes, common.num_reqs):
            tokens, rule = slice(starts[row], starts[row + 1]), self._state.plan(slots[row]).prefill
            start = lengths[row] - (tokens.stop - tokens.start)
            if rule is None or not 0 <= start < lengths[row]:  # vLLM's trial steps have any lengths
                continue
            prompt = PromptRow(row, tokens, start, rule, common.block_table_tensor[row])
            if not prompt.is_dense:
                found[row] = prompt
        return found

    def _runs(self, common: Any, decodes: int, prompts: dict[int, PromptRow]) -> tuple[RowRun, ...]:
        runs, starts = [], common.query_start_loc_cpu.tolist()
        rows = range(decodes, common.num_reqs) if prompts else range(0)
        for is_prompt, group in groupby(rows, prompts.__contains__):
            run = list(group)
            metadata = None if is_prompt else self._stock(common, run[0], run[-1] + 1)
            own = tuple(prompts[row] for row in run) if is_prompt else ()
            runs.append(RowRun(slice(starts[run[0]], starts[run[-1] + 1]), own, metadata))
        return tuple(runs)

    def _stock(self, common: Any, first: int, stop: int) -> Any:
        """Stock metadata of some sequences."""
        metadata = super().build(0, _rows_of(common, first, stop))
        if metadata.scheduler_metadata is not None:  # in a buffer that the next call fills again
            metadata.scheduler_metadata = metadata.scheduler_metadata.clone()
        return metadata

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return self._batch is None and super().use_cascade_attention(*args, **kwargs)


def row_bytes(kind: str, head_dim: int, page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of a page summary."""
    width, own = row_format(kind, head_dim, page_size)
    return width * (own or dtype).itemsize


def _rows_of(common: Any, first: int, stop: int) -> Any:
    """Return vLLM's description of some neighbouring sequences of a step."""
    begin, end = (int(common.query_start_loc_cpu[row]) for row in (first, stop))
    return replace(
        common,
        query_start_loc=common.query_start_loc[first : stop + 1] - begin,
        query_start_loc_cpu=common.query_start_loc_cpu[first : stop + 1] - begin,
        seq_lens=common.seq_lens[first:stop],
        num_reqs=stop - first,
        num_actual_tokens=end - begin,
        block_table_tensor=common.block_table_tensor[first:stop],
        slot_mapping=common.slot_mapping[begin:end],
    )


class SparseFlashImpl(FlashAttentionImpl):  # type: ignore[misc]
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._config = get_current_vllm_config()
        self._dtype: torch.dtype = self._config.model_config.dtype
        self._pdl = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
        state = sparse_state(self._config)
        if state is not None and (reason := compat.why_dense(self)):
            compat.logger.info_once("kvsift: layers with %s stay dense.", reason)
            state = None
        self._state = state
        self._sparse: tuple[bool, bool] | None = None  # in decode and in prefill, once the layer's name is known
        self._index = -1  # the true one, known then, too
        self._reuse: Reuse | None = None  # what it reuses in decode
        self._layer: LayerPages | None = None
        self._attention: DecodeLayer | None = None  # over _layer
        self._cache: tuple[int, torch.Size] | None = None  # address and shape of the cache that _layer is of

    def _is_sparse(self, layer: Any) -> tuple[bool, bool]:
        """Whether plans leave something out in this layer, in decode and in prefill."""
        if self._state is None:
            return False, False
        if self._sparse is None:
            settings, index = self._state.settings, compat.layer_index(layer.layer_name)
            first, prefill = settings.decode_rules[0], settings.plan.prefill
            reads = prefill is not None and index not in prefill.budget.dense_layers
            self._index, self._reuse = index, settings.reuse(first, self._shape(index))
            self._sparse = index not in first.budget.dense_layers, reads
        return self._sparse

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        side_by_side = key.stride()[1:] == value.stride()[1:] == (self.head_size, 1) and key.dtype == kv_cache.dtype
        tokens = (key, value) if side_by_side and len(slot_mapping) <= FEW else None
        own = self._layer_pages(layer, kv_cache) if any(self._is_sparse(layer)) and kv_cache.numel() else None
        if tokens is None or own is None or own.rows is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if own is not None and own.rows is not None:
            pools = own.keys, own.values, own.rows, own.pages
            summarise_slots(self._summary[0], slot_mapping, *pools, tokens, pdl=self._pdl)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """As the stock backend; ``query`` and ``output`` [num_tokens, num_heads, head_dim]."""
        if attn_metadata is None and self._state is not None and not kv_cache.numel():
            self._hold_memory(query)
        step: GpuStep | None = getattr(attn_metadata, "kvsift", None)
        decodes, reads = self._is_sparse(layer)
        if step is None or not ((decodes and step.decodes) or (reads and step.runs)):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        stock, own = super().forward, self._layer_pages(layer, kv_cache)

        def attend_densely(tokens: slice, metadata: Any) -> None:
            some = (tensor[tokens] for tensor in (query, key, value))
            stock(layer, *some, kv_cache, metadata, output[tokens], *args, **kwargs)

        first = slice(0, step.decodes)
        if step.decodes and decodes:
            self._decode(layer, step, own, query[first], attn_metadata, output[first])
        elif step.decodes:
            attend_densely(first, step.dense_decodes)
        if reads and step.runs:
            for run in step.runs:
                for prompt in run.prompts:
                    self._read(layer, prompt, own, query[prompt.tokens], output[prompt.tokens])
                if not run.prompts:
                    attend_densely(run.tokens, run.metadata)
        elif step.rest is not None:
            attend_densely(slice(step.decodes, None), step.rest)
        return output

    def _decode(
        self, layer: Any, step: GpuStep, own: LayerPages, query: Tensor, attn_metadata: Any, output: Tensor
    ) -> None:  # fmt: skip
        rows, batch = step.decodes, step.batch
        # Else the launch before has just written the step's table and spans, or pages of a prompt, behind which another
        # sequence may decode in the same step: vLLM shares them when it plans the step.
        early = self._pdl and step.begun and step.only_decodes
        if not step.begun:
            step.begun = True
            batch.begin(attn_metadata.block_table[:rows], attn_metadata.seq_lens[:rows], own.pages)
        shape, known = self._shape(scale=self._logit_scale(layer)), self._attention
        if known is None or known.shape != shape or known.sink_logit is not self.sinks:
            known = self._attention = batch.layer(own, shape, self.sinks, self._index, self._reuse)
        query = query.to(output.dtype).contiguous()
        new = layer.layer_name not in batch.layers
        batch.layers[layer.layer_name] = known.summary is not None
        known.attend(query, batch.mode, early=early, out=output)
        step.counters.keep(layer.layer_name, query, known)
        self._scale_values(layer, output)
        if new and len(batch.layers) == 1:
            compat.logger.info_once(
                "kvsift: a single launch decodes %s; Triton kernels the others.", batch.single_launches
            )

    def _read(self, layer: Any, prompt: PromptRow, own: LayerPages, query: Tensor, output: Tensor) -> None:
        assert self._state is not None
        state, shape = self._state, self._shape(compat.layer_index(layer.layer_name), self._logit_scale(layer))
        attend_prompt(
            prompt, shape, own, self._summary[0], query.to(output.dtype), state.messages, state.prompts.tally,
            self.sinks, output,
        )  # fmt: skip
        self._scale_values(layer, output)

    def _shape(self, index: int = -1, scale: float | None = None) -> LayerShape:
        softcap, scale = self.logits_soft_cap or None, self.scale if scale is None else scale
        return LayerShape(index, self.num_heads, self.num_kv_heads, self.head_size, scale, softcap)

    @property
    def _is_fp8(self) -> bool:
        """Whether keys and values are cached as numbers of a byte, times a scale of the layer; queries come so, too."""
        return bool(self.kv_cache_dtype in FP8)

    def _logit_scale(self, layer: Any) -> float:
        """Return the scale of this moment: CUDA graphs keep it, and weights loaded later must have the same scales."""
        return float(self.scale * layer._q_scale_float * layer._k_scale_float if self._is_fp8 else self.scale)

    def _scale_values(self, layer: Any, output: Tensor) -> None:
        if self._is_fp8 and layer._v_scale_float != 1.0:
            output.mul_(float(layer._v_scale_float))

    @property
    def _summary(self) -> tuple[str, int]:
        """Kind of summary, and page size."""
        assert self._state is not None
        return self._state.settings.summaries[0]

    def _hold_memory(self, query: Tensor) -> None:
        assert self._state is not None
        state, prefill = self._state, self._state.settings.plan.prefill
        if prefill is not None:  # the profile run remembers the most that was taken at once
            most = workspace_bytes(prefill, self._shape(), state.max_length, len(query), self._dtype.itemsize)
            most += self._dtype.itemsize * query.numel() * self._is_fp8  # queries, widened
            torch.empty(most, dtype=torch.uint8, device=query.device)
        if state.held is None:
            kind, page_size = self._summary
            summary = row_bytes(kind, self.head_size, page_size, self._dtype)
            element = 1 if self._config.cache_config.cache_dtype in FP8 else self._dtype.itemsize  # of most layers
            share = state.settings.summarised_share * summary / (page_size * 2 * self.head_size * element)
            state.held = hold(self._config, share, self._kept_list_bytes(), query.device)

    def _kept_list_bytes(self) -> int:
        """Return the bytes of the lists that layers above attend."""
        assert self._state is not None
        settings, max_rows = self._state.settings, self._config.scheduler_config.max_num_seqs
        capacity = capacity_of(settings.decode_rules, self._state.max_length, dense_below_of(settings))
        return len(settings.anchor_layers) * max_rows * self.num_kv_heads * 4 * (capacity + 1)

    def _layer_pages(self, layer: Any, kv_cache: Tensor) -> LayerPages:
        cache = kv_cache.data_ptr(), kv_cache.shape
        if self._layer is not None and self._cache == cache:
            return self._layer
        assert self._state is not None
        assert not torch.cuda.is_current_stream_capturing(), "vLLM runs a step before it captures one"
        if kv_cache.dim() != 4 or kv_cache.shape[1:4:2] != (self.num_kv_heads, 2 * self.head_size):
            raise UnsupportedCall(
                f"this vLLM keeps its KV cache as {list(kv_cache.shape)}, in a way that kvsift does not know. Start it "
                "without the kvsift settings."
            )
        if self._is_fp8 and layer._k_scale.numel() > 1:
            raise UnsupportedCall(
                "kvsift reads fp8 caches with one scale for all heads. Take --kv-cache-dtype bfloat16."
            )
        state, (kind, page_size) = self._state, self._summary
        state.held = None  # what the profile run held is for this
        pages = BlockPages.of(kv_cache, page_size)
        width, dtype = row_format(kind, self.head_size, page_size)
        old = 0 if self._layer is None else self._layer.row_bytes
        self._layer = self._attention = None  # freed before the new one is made
        keys, values = pages.split(kv_cache.view(torch.float8_e4m3fn) if self._is_fp8 else kv_cache)
        rows = None
        if state.settings.summaries_in(self._shape(self._index)):
            rows = pages.new_rows(len(kv_cache), self.num_kv_heads, width, dtype or self._dtype, kv_cache.device)
        self._layer, self._cache = LayerPages(pages, keys, values, rows), cache
        if rows is None:
            return self._layer
        size = self._layer.row_bytes
        if keys.dtype not in state.compiled:  # else the first prompt waits for it
            state.compiled.add(keys.dtype)
            compile_ahead(kind, keys, values, rows, pages, self._pdl)
            if (prefill := state.settings.plan.prefill) is not None:
                gpu_prefill.compile_ahead(prefill, self._shape(), self._layer, kind, state.max_length, self._dtype)
        state.summary_bytes += size - old
        compat.logger.info(
            "kvsift: layer %s keeps %.3f GiB of page summaries for %d blocks, %.3f GiB in all layers so far.",
            compat.layer_index(layer.layer_name), size / GIB, len(kv_cache), state.summary_bytes / GIB,
        )  # fmt: skip
        return self._layer


def hold(config: Any, summary_share: float, list_bytes: int, device: torch.device) -> Tensor:
    """Return memory for summaries, of ``summary_share`` bytes for each byte of KV cache, and for lists of so many;
    empty where vLLM was given the size of the cache, and plans nothing.

    A backend has no say in the size of a KV cache: it is what a profile run leaves of ``gpu_memory_utilization``. So
    the profile run holds as many bytes as both will take, and the first step with a cache gives them back.
    """
    cache = config.cache_config
    if cache.kv_cache_memory_bytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    free, total = torch.cuda.mem_get_info(device)
    # as vLLM counts: memory of other processes is no part of its share
    planned = int(total * cache.gpu_memory_utilization) - torch.cuda.memory_allocated(device)
    left = max(0, min(free, planned) - list_bytes)
    held = int(left * summary_share / (1 + summary_share))
    compat.logger.info("kvsift: %.2f GiB of the memory planned for the KV cache is for page summaries.", held / GIB)
    return torch.empty(held + list_bytes, dtype=torch.uint8, device=device)
