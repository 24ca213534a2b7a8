"""vLLM's block table as ``layer.paged_decode`` takes it: the sequences that decode in a step, without the host.

A layer has one launch, and where requests may be dense another beside it. What they read has an address of its own that
never changes, so that CUDA graphs of whole steps replay it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from kvsift.errors import UnsupportedPlan
from kvsift.kernels.block_pages import BlockPages, place_pages
from kvsift.kernels.page_spans import page_spans
from kvsift.layer.paged_decode import ALWAYS, DecodeBatch, DecodeLayer, Lists, StepMode, list_capacity
from kvsift.methods.common.anchors import Reuse
from kvsift.methods.pages import PagedMethod
from kvsift.methods.sketch import Sketch
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Rule
from kvsift.types import LayerShape
from kvsift.vllm.settings import Settings

DENSE_BELOW = 5120  # tokens; pages of shorter contexts are attended as fast without choosing any (H200)
SPLIT_BYTES = 64 << 20  # of the workspace of dense sequences, and of that of reused lists, at most


@dataclass(frozen=True)
class LayerPages:
    """Keys, values and summaries of one layer, by page number."""

    pages: BlockPages
    keys: Tensor  # [num_kv_heads, count, page_size, head_dim], of the model's dtype or float8_e4m3fn
    values: Tensor
    rows: Tensor | None  # [num_kv_heads, count, width]; None where no rule reads any

    @property
    def row_bytes(self) -> int:
        """Bytes of the summaries."""
        return 0 if self.rows is None else self.rows.untyped_storage().nbytes()


class BlockBatch(DecodeBatch):
    """Sequences that decode together by a block table of vLLM: the first ones, as many as a step has.

    Args:
        rules: decode rules that sequences may have, of one method that keeps no memory; by default the first.
        shape: shape of the layers.
        max_rows, max_length: most sequences of a step, and their greatest length.
        dense_below: sequences shorter than this see everything.
        device: device of the model.
        allows_dense: a sequence may have no rule. Each layer then has a second launch, which costs up to 1 microsecond
            even where no sequence is dense.
        anchors: true indices of layers whose lists layers above attend; the others write one memory, since they run one
            after the other.
        kept: lists of anchors that have been made, which all batches of a model share, those of trial steps too.

    Attributes:
        mode: mode of all steps.
        totals: int64 [max_rows, 4], see ``place_pages``.
        visible: int64 [max_rows], tokens in the lists of all layers and KV heads.
        layers: whether each layer that has attended selects, by its name.
    """

    def __init__(
        self, rules: Sequence[Rule], shape: LayerShape, max_rows: int, max_length: int, dense_below: int,
        device: torch.device, allows_dense: bool = False, anchors: Container[int] = (),
        kept: dict[int, Lists] | None = None,
    ) -> None:  # fmt: skip
        method = rules[0].method
        assert isinstance(method, PagedMethod | Sketch), "settings.read_plan lets no others in"
        page_size = method.summary_page_size
        table = torch.zeros(max_rows, -(-max_length // page_size), dtype=torch.int32, device=device)
        super().__init__(table, [0] * max_rows, page_size, [None] * max_rows, unit_size=method.unit_size)
        self.shape, self._method, self._dense_below = shape, method, dense_below
        self.mode: StepMode = "mixed" if allows_dense else "sparse"  # else a short sequence has a list of all its pages
        self.layers = dict[str, bool]()
        self.sizes, self.split_bytes = range(1, max_rows + 1), SPLIT_BYTES
        self.capacity = capacity_of(rules, max_length, dense_below)
        self.ranked = self.need([rule.budget for rule in rules])
        self._lists = self.new_lists(method.num_selections(shape))
        self._anchors, self._kept = anchors, {} if kept is None else kept
        self.totals = torch.zeros(max_rows, 4, dtype=torch.int64, device=device)
        self.visible = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._sparse_from = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._rules: list[Rule | None] = []
        self.set_rules([rules[0]] * max_rows)

    def set_rules(self, rules: Sequence[Rule | None]) -> None:
        """Give the first sequences their rules for the steps to come, None for dense ones; not while capturing."""
        if list(rules) == self._rules[: len(rules)]:
            return
        self._rules[: len(rules)] = rules
        budgets = [None if rule is None else _budget(rule, self._dense_below) for rule in rules]
        self.set_budgets(budgets)
        first = [ALWAYS if budget is None else _sparse_from(budget) for budget in budgets]
        pinned = torch.tensor(first, dtype=torch.int32, pin_memory=self._sparse_from.is_cuda)
        self._sparse_from[: len(first)].copy_(pinned, non_blocking=True)

    def begin(self, blocks: Tensor, lengths: Tensor, pages: BlockPages) -> None:
        """Take over a step: block table int32 [batch, ..] and tokens cached int32 [batch], 0 for padding."""
        rows = len(lengths)
        own = self.table[:rows], self.lengths[:rows]
        place_pages(blocks, lengths, pages, own, self.totals[:rows], self._sparse_from[:rows])
        page_spans(self.lengths[:rows], self.unit_size, self.budgets[:rows], self.spans[:rows])

    def layer(
        self, pages: LayerPages, shape: LayerShape, sink_logit: Tensor | None = None, index: int = -1,
        reuse: Reuse | None = None,
    ) -> DecodeLayer:  # fmt: skip
        """Return the attention of a layer; not while capturing.

        Args:
            pages: its cache.
            shape: its shape, with the index that layers share which share launches.
            sink_logit: [num_query_heads].
            index: its true index.
            reuse: which lists it attends; None: its own.

        Raises:
            InputError: if it reuses what no layer below has selected.
        """
        if reuse is not None and reuse.anchor not in self._kept:
            raise UnsupportedPlan(
                f"Layer {index} reuses the selection of layer {reuse.anchor} by the anchors of this plan, and vLLM "
                "attends that layer densely. Leave out anchors."
            )
        if index in self._anchors and index not in self._kept:
            self._kept[index] = self.new_lists(self._method.num_selections(shape))
        memory = self._kept.get(index, self._lists) if reuse is None else self._kept[reuse.anchor]
        return DecodeLayer(
            shape, self, pages.keys, pages.values, pages.rows if reuse is None else None, self._method,
            sink_logit=sink_logit, dense_below=self._sparse_from, visible=self.visible, memory=memory,
            heads=() if reuse is None else reuse.heads,
        )  # fmt: skip

    def is_sparse(self, row: int) -> Tensor:
        """Whether a sequence of the last step left something out, bool []; vLLM's trial steps, on its block 0, do
        not."""
        return (self.lengths[row] >= self._sparse_from[row]) & (self.table[row, 0] > 0)

    @property
    def single_launches(self) -> str:
        """Which batches a single launch attends, for the log."""
        sizes = [size for launches in self.launches.values() for size in launches]
        return f"batches of up to {max(sizes)} rows" if sizes else "no batches"


def dense_below_of(settings: Settings) -> int:
    """Return the context length below which sequences are dense."""
    if settings.dense_below is not None:
        return settings.dense_below
    return DENSE_BELOW if any(isinstance(rule.method, PagedMethod) for rule in settings.decode_rules) else 0


def capacity_of(rules: Sequence[Rule], max_length: int, dense_below: int) -> int:
    """Return the most units of a list under rules of one method."""
    unit_size, page_size = rules[0].method.unit_size, rules[0].method.summary_page_size
    max_units = ceil(max_length / page_size) * page_size // unit_size
    return max(list_capacity(_budget(rule, dense_below), max_units, unit_size) for rule in rules)


def _budget(rule: Rule, dense_below: int) -> Budget:
    return replace(rule.budget, min_context=max(rule.budget.min_context, dense_below))


def _sparse_from(budget: Budget) -> int:
    """Fewest tokens of a sequence that does not see all of them."""
    return max(budget.min_context, 1 if budget.tokens is None else budget.tokens + 1)
