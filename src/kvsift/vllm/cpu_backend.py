"""vLLM's CPU attention with sparse decode: everything is the stock backend's but the sequences that a plan makes
sparse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from kvsift.plan.plan import Plan, Rule
from kvsift.types import LayerShape
from kvsift.vllm import compat
from kvsift.vllm.block_cache import BlockCache, BlockLayout, attend_token
from kvsift.vllm.engine_state import EngineState, state_of
from kvsift.vllm.refusals import check_block_size

Build = Callable[[Any], Any]  # vLLM's CommonAttentionMetadata -> metadata of the stock backend
GIB = 1 << 30


@dataclass(frozen=True)
class GeneratingRow:
    """A sequence whose one new token was generated."""

    row: int
    token: int  # its place among the new tokens of the step
    length: int  # tokens cached, this one included
    plan: Plan

    def sparse_rule(self, layer: int, dense_below: int) -> Rule | None:
        """Return the rule of the sequence in a layer; None if it sees its whole context there."""
        rule = self.plan.decode
        if rule is None or self.length < dense_below or rule.is_dense(layer, self.length - 1, self.length):
            return None
        return rule


@dataclass
class StepRows:
    """Sequences of one step.

    Attributes:
        decodes: sequences that generate.
        common: vLLM's description of the step.
        build: makes the stock backend's metadata of such a description.
    """

    decodes: list[GeneratingRow]
    common: Any
    build: Build
    _others: dict[tuple[int, ...], tuple[Tensor, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, common: Any, state: EngineState, build: Build) -> StepRows:
        """Return the sequences of a step, with their plans."""
        starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
        slots, prefilling = compat.slots_of_rows(common), compat.is_prefilling(common)
        decodes = [
            GeneratingRow(row, starts[row], lengths[row], state.plan(slots[row]))
            for row in range(common.num_reqs)
            if starts[row + 1] - starts[row] == 1 and not prefilling[row]
        ]
        return cls(decodes, common, build)

    def others(self, sparse: Sequence[int]) -> tuple[Tensor, Any]:
        """Return the new tokens of all sequences but the sparse ones, int64 [num_tokens], and the stock metadata of
        those sequences; layers with the same sparse sequences share them."""
        key = tuple(sparse)
        if key not in self._others:
            rows = [row for row in range(self.common.num_reqs) if row not in set(sparse)]
            self._others[key] = self._subset(rows)
        return self._others[key]

    def _subset(self, rows: list[int]) -> tuple[Tensor, Any]:
        common, index = self.common, torch.tensor(rows, dtype=torch.int64)
        starts = common.query_start_loc_cpu.tolist()
        tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows] or [index])
        counts = [starts[row + 1] - starts[row] for row in rows]
        query_starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        seq_lens, causal = common.seq_lens[index], common.causal
        return tokens, self.build(
            replace(
                common,
                query_start_loc=query_starts,
                query_start_loc_cpu=query_starts,
                seq_lens=seq_lens,
                num_reqs=len(rows),
                num_actual_tokens=len(tokens),
                max_query_len=max(counts, default=0),
                max_seq_len=int(seq_lens.max()) if rows else 0,
                block_table_tensor=common.block_table_tensor[index],
                slot_mapping=common.slot_mapping[tokens],
                causal=causal[index] if isinstance(causal, Tensor) else causal,
            )
        )


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
                token_bytes = kv_cache.shape[1] * kv_cache.shape[3] * kv_cache.element_size()
                self._state.counters.tally.add_query(row.length, row.length, token_bytes)
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
            state, own = self._state, query[row.token]
            tally, reuse = state.counters.tally, state.settings.reuse(rule, shape)
            attended = attend_token(
                shape, rule, own, cache, blocks, row.length, tally, self.sinks, state.probes(tally.sparse_queries),
                reuse, state.messages, row.row,
            )  # fmt: skip
            output[row.token] = attended.view_as(output[row.token])
        return output

    def _shape(self, layer: Any) -> LayerShape:
        index = compat.layer_index(layer.layer_name)
        softcap = self.logits_soft_cap or None
        return LayerShape(index, self.num_heads, self.num_kv_heads, self.head_size, self.scale, softcap)

    def _block_cache(self, state: EngineState, layer: Any, kv_cache: Tensor) -> BlockCache:
        if self._cache is None or self._cache.kv.data_ptr() != kv_cache.data_ptr():
            stock = super().do_kv_cache_update

            def write(keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
                stock(layer, keys, values, cache, slots)

            summaries = state.settings.summaries_in(self._shape(layer))
            self._cache = BlockCache(kv_cache, BlockLayout.find(kv_cache, write), summaries)
            state.summary_bytes += self._cache.summary_bytes
            if not summaries:
                return self._cache
            compat.logger.info(
                "kvsift: layer %s keeps %.3f GiB of page summaries beside %.3f GiB of KV cache, %.3f GiB in all layers "
                "so far; they are not part of VLLM_CPU_KVCACHE_SPACE.",
                compat.layer_index(layer.layer_name), self._cache.summary_bytes / GIB, kv_cache.nbytes / GIB,
                state.summary_bytes / GIB,
            )  # fmt: skip
        return self._cache
