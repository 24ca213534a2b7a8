"""Sequences of a step that decode, and how each is attended in a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvsift.plan.plan import Plan, Rule
from kvsift.vllm import compat
from kvsift.vllm.engine_state import EngineState

Build = Callable[[Any], Any]  # vLLM's CommonAttentionMetadata -> metadata of the stock backend


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
