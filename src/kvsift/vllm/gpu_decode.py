"""Sparse attention of all rows that decode in a step, on vLLM's cache and by its block table, without the host.

What a launch reads has an address of its own that never changes, so that CUDA graphs of whole steps replay it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvsift.kernels import sketch_launch
from kvsift.kernels.block_pages import BlockPages, place_pages
from kvsift.kernels.page_spans import page_spans
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.sifted_attention import SiftSpace, sifted_attention, single_launch_runs
from kvsift.kernels.sketch_attention import sketch_attention
from kvsift.layer.paged_decode import DecodeBatch
from kvsift.methods.pages import PagedMethod
from kvsift.methods.sketch import Sketch
from kvsift.plan.plan import Rule
from kvsift.types import LayerShape
from kvsift.vllm.launch_spaces import LaunchSpaces


@dataclass(frozen=True)
class LayerPages:
    """Keys, values and summaries of one layer, by page number."""

    pages: BlockPages
    keys: Tensor  # [num_kv_heads, count, page_size, head_dim]
    values: Tensor
    rows: Tensor  # [num_kv_heads, count, width]


class DecodeBuffers:
    """Buffers of the layers that share a block table.

    Args:
        rule: of decode, without methods that keep memory.
        shape: of the layers.
        max_rows, max_length: of a step.
        dense_below: rows shorter than this see everything.
        device: of the model.

    Attributes:
        totals: int64 [max_rows, 4], see ``place_pages``.
        visible: int64 [max_rows], tokens that all layers and KV heads saw.
        layers: names of those that have attended.
    """

    def __init__(
        self, rule: Rule, shape: LayerShape, max_rows: int, max_length: int, dense_below: int, device: torch.device
    ) -> None:
        # a row that sees everything is one launch too, of a list of all its pages
        budget = replace(rule.budget, min_context=max(rule.budget.min_context, dense_below))
        method = rule.method
        assert isinstance(method, PagedMethod | Sketch), "settings.read_plan lets no others in"
        self._method, self.shape, self.max_rows = method, shape, max_rows
        page_size = method.summary_page_size
        table = torch.zeros(max_rows, -(-max_length // page_size), dtype=torch.int32, device=device)
        lengths = [0] * max_rows
        self._batch = DecodeBatch(table, lengths, page_size, [budget] * max_rows, unit_size=method.unit_size)
        rows = method.num_selections(shape)
        self._units = torch.zeros(max_rows, rows, self._batch.capacity, dtype=torch.int32, device=device)
        self._counts = torch.zeros(max_rows, rows, dtype=torch.int32, device=device)
        self.totals = torch.zeros(max_rows, 4, dtype=torch.int64, device=device)
        self.visible = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.layers: set[str] = set()
        self._sparse_from = max(budget.min_context, 1 if budget.tokens is None else budget.tokens + 1)
        self._spaces: LaunchSpaces | None = None

    def begin(self, blocks: Tensor, lengths: Tensor, pages: BlockPages) -> None:
        """Take over a step: block table int32 [batch, ..] and tokens cached int32 [batch], 0 for padding."""
        rows, batch = len(lengths), self._batch
        own = batch.table[:rows], batch.lengths[:rows]
        place_pages(blocks, lengths, pages, own, self.totals[:rows], self._sparse_from)
        page_spans(batch.lengths[:rows], batch.unit_size, batch.budgets[:rows], batch.spans[:rows])

    def attend(
        self, queries: Tensor, layer: LayerPages, scale: float, softcap: float | None, sink_logit: Tensor | None,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Attend one query of every row, [batch, num_query_heads, head_dim], into ``out``."""
        rows, method = len(queries), self._method
        if self._spaces is None:
            self._spaces = self._new_spaces(queries, layer)
        arguments: dict[str, Any] = {
            "queries": queries.contiguous(), "kv": self._kv(layer, rows), "spans": self._batch.spans[:rows],
            "counts": self._counts[:rows], "scale": scale, "softcap": softcap, "sink_logit": sink_logit,
            "visible": self.visible[:rows], "out": out, "space": self._spaces.of(rows),
        }  # fmt: skip
        units = self._units[:rows]
        if isinstance(method, Sketch):
            sketch_attention(rows=layer.rows, tokens=units, bits=method.bits, rest=method.rest, **arguments)
        else:
            sifted_attention(summary=layer.rows, pages=units, kind=method.ranking, **arguments)

    @property
    def single_launches(self) -> str:
        """Which batches a single launch attends, for the log."""
        sizes = self._spaces.sizes if self._spaces is not None else []
        return f"batches of up to {max(sizes)} rows" if sizes else "no batches"

    def _kv(self, layer: LayerPages, rows: int) -> PagedKV:
        return PagedKV(layer.keys, layer.values, self._batch.table[:rows], self._batch.lengths[:rows])

    def _new_spaces(self, queries: Tensor, layer: LayerPages) -> LaunchSpaces:
        group, capacity, method = self.shape.group_size, self._batch.capacity, self._method

        def of_sketches(size: int) -> Any:
            kv = self._kv(layer, size)
            runs = sketch_launch.single_launch_runs(queries, kv, capacity)
            return sketch_launch.SketchSpace.shapes(kv, group, capacity) if runs else None

        def of_pages(size: int) -> Any:
            assert isinstance(method, PagedMethod)
            kv = self._kv(layer, size)
            runs = single_launch_runs(queries, kv, layer.rows, self._units, method.ranking)
            return SiftSpace.shapes(kv, group) if runs else None

        sizes = range(1, self.max_rows + 1)
        if isinstance(method, Sketch):
            return LaunchSpaces(sketch_launch.SketchSpace, of_sketches, sizes, queries.device)
        return LaunchSpaces(SiftSpace, of_pages, sizes, queries.device)
