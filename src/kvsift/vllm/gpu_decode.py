"""Sparse attention of all rows that decode in a step, on vLLM's cache and by its block table, without the host.

A layer has one launch, and where requests may be dense another beside it. What they read has an address of its own that
never changes, so that CUDA graphs of whole steps replay it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvsift.kernels import sketch_launch
from kvsift.kernels.block_pages import BlockPages, place_pages
from kvsift.kernels.page_attention import SplitSpace, page_attention, split_count
from kvsift.kernels.page_spans import page_spans
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.sifted_attention import SiftSpace, sifted_attention, single_launch_runs
from kvsift.kernels.sketch_attention import sketch_attention
from kvsift.layer.paged_decode import ALWAYS, DecodeBatch, list_capacity
from kvsift.methods.pages import PagedMethod
from kvsift.methods.sketch import Sketch
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Rule
from kvsift.types import LayerShape
from kvsift.vllm.launch_spaces import LaunchSpaces
from kvsift.vllm.settings import Settings

DENSE_BELOW = 5120  # tokens; pages of shorter contexts are attended as fast without choosing any (H200)
DENSE_BYTES = 64 << 20  # of the workspace of dense rows, at most


@dataclass(frozen=True)
class LayerPages:
    """Keys, values and summaries of one layer, by page number."""

    pages: BlockPages
    keys: Tensor  # [num_kv_heads, count, page_size, head_dim], of the model's dtype or float8_e4m3fn
    values: Tensor
    rows: Tensor  # [num_kv_heads, count, width]


class DecodeBuffers:
    """Buffers of the layers that share a block table.

    Args:
        rules: of decode, which rows may have, of one method that keeps no memory; all have the first until told.
        shape: of the layers.
        max_rows, max_length: of a step.
        dense_below: rows shorter than this see everything.
        device: of the model.
        allows_dense: a row may have no rule. Each layer then has a second launch, which costs up to 1 microsecond even
            where no row is dense.

    Attributes:
        totals: int64 [max_rows, 4], see ``place_pages``.
        visible: int64 [max_rows], tokens that all layers and KV heads saw.
        layers: names of those that have attended.
    """

    def __init__(
        self, rules: Sequence[Rule], shape: LayerShape, max_rows: int, max_length: int, dense_below: int,
        device: torch.device, allows_dense: bool = False,
    ) -> None:  # fmt: skip
        self._dense_below, self._allows_dense = dense_below, allows_dense
        method = rules[0].method
        assert isinstance(method, PagedMethod | Sketch), "settings.read_plan lets no others in"
        self._method, self.shape, self.max_rows = method, shape, max_rows
        page_size = method.summary_page_size
        table = torch.zeros(max_rows, -(-max_length // page_size), dtype=torch.int32, device=device)
        lengths = [0] * max_rows
        max_units, budgets = table.shape[1] * page_size // method.unit_size, [self._budget(rule) for rule in rules]
        capacity = max(list_capacity(budget, max_units, method.unit_size) for budget in budgets)
        self._ranked = max(list_capacity(rule.budget, max_units, method.unit_size) for rule in rules)
        self._batch = DecodeBatch(table, lengths, page_size, budgets[:1] * max_rows, capacity, method.unit_size)
        rows = method.num_selections(shape)
        self._units = torch.zeros(max_rows, rows, self._batch.capacity, dtype=torch.int32, device=device)
        self._counts = torch.zeros(max_rows, rows, dtype=torch.int32, device=device)
        self.totals = torch.zeros(max_rows, 4, dtype=torch.int64, device=device)
        self.visible = torch.zeros(max_rows, dtype=torch.int64, device=device)
        # one row at an address of its own: Triton compiles again for addresses that 16 does not divide
        shared = self._batch.table, self._batch.lengths, self._batch.spans, self._units, self._counts, self.visible
        self._one = [torch.zeros_like(memory[:1]) for memory in shared]
        self.layers: set[str] = set()
        self._sparse_from = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._rules: list[Rule | None] = []
        self.set_rules([rules[0]] * max_rows)
        self._spaces: LaunchSpaces | None = None
        self._dense_space: SplitSpace | None = None

    def _budget(self, rule: Rule) -> Budget:
        return replace(rule.budget, min_context=max(rule.budget.min_context, self._dense_below))

    def set_rules(self, rules: Sequence[Rule | None]) -> None:
        """Give the first rows their rules for the steps to come, None for dense ones; not while capturing."""
        if list(rules) == self._rules[: len(rules)]:
            return
        self._rules[: len(rules)] = rules
        budgets = [None if rule is None else self._budget(rule) for rule in rules]
        self._batch.set_budgets(budgets)
        first = [ALWAYS if budget is None else _sparse_from(budget) for budget in budgets]
        pinned = torch.tensor(first, dtype=torch.int32, pin_memory=self._sparse_from.is_cuda)
        self._sparse_from[: len(first)].copy_(pinned, non_blocking=True)

    def begin(self, blocks: Tensor, lengths: Tensor, pages: BlockPages) -> None:
        """Take over a step: block table int32 [batch, ..] and tokens cached int32 [batch], 0 for padding."""
        rows, batch = len(lengths), self._batch
        own = batch.table[:rows], batch.lengths[:rows]
        place_pages(blocks, lengths, pages, own, self.totals[:rows], self._sparse_from[:rows])
        page_spans(batch.lengths[:rows], batch.unit_size, batch.budgets[:rows], batch.spans[:rows])

    def attend(
        self, queries: Tensor, layer: LayerPages, scale: float, softcap: float | None, sink_logit: Tensor | None,
        out: Tensor, value_scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Attend one query of every row, [batch, num_query_heads, head_dim], into ``out``; ``value_scale`` is of the
        values in the cache."""
        rows = len(queries)
        arguments: dict[str, Any] = {
            "queries": queries.contiguous(), "kv": self._kv(layer, rows), "scale": scale, "softcap": softcap,
            "sink_logit": sink_logit, "visible": self.visible[:rows], "out": out,
            "dense_below": self._sparse_from[:rows] if self._allows_dense else None,
        }  # fmt: skip
        lists = self._batch.spans[:rows], self._units[:rows], self._counts[:rows]
        if self._spaces is None:
            self._spaces = self._new_spaces(queries, layer)
        if self._allows_dense:
            if self._dense_space is None:
                self._dense_space = self._new_dense_space(arguments["kv"])
            with self._batch.fork() as side:
                self._attend_sparse(layer, *lists, arguments)
                with side:
                    page_attention(units=None, counts=None, space=self._dense_space, **arguments)
        else:  # a row that is short for its rule has a list of all its pages
            self._attend_sparse(layer, *lists, arguments)
        if value_scale != 1.0:
            out.mul_(value_scale)

    def lists(
        self, row: int, queries: Tensor, layer: LayerPages, scale: float, softcap: float | None
    ) -> tuple[PagedKV, Tensor, Tensor]:
        """Return a row of the last step, with its lists in a layer, which are chosen again: units int32 [1, num_rows,
        capacity], and how many of them count, [1, num_rows]. In memory that the next call fills again.

        ``queries`` [1, num_query_heads, head_dim]. Not before a layer has attended, nor while capturing.
        """
        table, lengths, spans, units, counts, visible = self._one
        for own, shared in zip((table, lengths, spans), (self._batch.table, self._batch.lengths, self._batch.spans)):
            own.copy_(shared[row : row + 1])
        kv = PagedKV(layer.keys, layer.values, table, lengths)
        self._attend_sparse(layer, spans, units, counts, {
            "queries": queries, "kv": kv, "scale": scale, "softcap": softcap, "sink_logit": None, "visible": visible,
            "out": torch.empty_like(queries), "dense_below": None,
        })  # fmt: skip
        return kv, units, counts

    def is_sparse(self, row: int) -> Tensor:
        """Whether a row of the last step left something out, bool []; vLLM's trial steps, on its block 0, do not."""
        batch = self._batch
        return (batch.lengths[row] >= self._sparse_from[row]) & (batch.table[row, 0] > 0)

    @property
    def unit_size(self) -> int:
        """Tokens per unit of the lists."""
        return self._batch.unit_size

    def _attend_sparse(
        self, layer: LayerPages, spans: Tensor, units: Tensor, counts: Tensor, arguments: dict[str, Any]
    ) -> None:
        assert self._spaces is not None
        method = self._method
        arguments = {**arguments, "spans": spans, "counts": counts, "space": self._spaces.of(len(units))}
        if isinstance(method, Sketch):
            sketch_attention(rows=layer.rows, tokens=units, bits=method.bits, rest=method.rest, **arguments)
        else:
            sifted_attention(summary=layer.rows, pages=units, kind=method.ranking, ranked=self._ranked, **arguments)

    @property
    def single_launches(self) -> str:
        """Which batches a single launch attends, for the log."""
        sizes = self._spaces.sizes if self._spaces is not None else []
        return f"batches of up to {max(sizes)} rows" if sizes else "no batches"

    def _kv(self, layer: LayerPages, rows: int) -> PagedKV:
        return PagedKV(layer.keys, layer.values, self._batch.table[:rows], self._batch.lengths[:rows])

    def _new_dense_space(self, kv: PagedKV) -> SplitSpace | None:
        if not kv.keys.is_cuda:
            return None
        heads, group, dim = self.shape.num_kv_heads, self.shape.group_size, self.shape.head_dim
        rows, split_bytes = self.max_rows * heads, 4 * group * (dim + 2)
        splits = min(split_count(kv, None, heads), max(1, DENSE_BYTES // (rows * split_bytes)))
        return SplitSpace.make(rows, splits, group, dim, kv.keys.device)

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


def dense_below_of(settings: Settings) -> int:
    """Return the context length below which rows are dense."""
    if settings.dense_below is not None:
        return settings.dense_below
    return DENSE_BELOW if any(isinstance(rule.method, PagedMethod) for rule in settings.decode_rules) else 0


def _sparse_from(budget: Budget) -> int:
    """Fewest tokens of a row that does not see all of them."""
    return max(budget.min_context, 1 if budget.tokens is None else budget.tokens + 1)
