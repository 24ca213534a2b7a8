"""Decode at the speed of the memory: attention of one layer for a whole batch, without the host.

The composed path (``runtime.sequence``) is the specification; this is its fast twin for methods that rank pages by a
summary. Everything that changes from step to step is a tensor on the device, so a step can be captured in a CUDA
graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvsift.kernels.page_attention import SplitSpace, page_attention, split_count
from kvsift.kernels.page_spans import page_spans as spans_of
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.score_pages import KINDS
from kvsift.kernels.sifted_attention import SiftSpace, sifted_attention, single_launch_runs
from kvsift.methods.base import Method
from kvsift.methods.pages import SummaryMethod
from kvsift.runtime.budget import Budget
from kvsift.runtime.plan import Plan, Rule
from kvsift.types import LayerShape

MOST_TOKENS = 128  # in a page: keys and values of a tile of whole pages lie in shared memory, twice over

Space = TypeVar("Space")


def reason_against(plan: Plan) -> str | None:
    """Why the decode rule of a plan needs the composed path; None if this one can run it."""
    if unwritten := sorted(set(plan.summaries) - KINDS.keys()):  # of the rule of prefill too: steps go on with them
        return f"no kernel writes page summaries of kind {', '.join(unwritten)}"
    rule = plan.decode
    if rule is None or rule.method.unbounded:
        return None
    method, name = rule.method, str(rule).partition(":")[0]
    if not isinstance(method, SummaryMethod):
        way = "scores page summaries in its own way" if method.summaries else "does not rank pages by a summary"
        return f"{name} {way}"
    if method.page_size & (method.page_size - 1):
        return f"page_size={method.page_size} is not a power of two"
    if method.page_size > MOST_TOKENS:
        return f"a page of {method.page_size} tokens is more than a multiprocessor can hold; up to {MOST_TOKENS} can be"
    if method.prefilter:
        return f"prefilter={method.prefilter} ranks blocks first; the kernels score every page"
    if rule.budget.mass is not None:
        return "mass= chooses as many pages as the scores ask for; the kernels need a number"
    if rule.budget.layer_budgets != "equal":
        return f"layer_budgets={rule.budget.layer_budgets} gives layers lists of different lengths; kernels take one"
    if rule.budget.head_budgets != "equal":
        return f"head_budgets={rule.budget.head_budgets} gives heads lists of different lengths; kernels take one"
    if rule.budget.window == 0:
        return "window=0 lets the page being filled compete; the kernels always show it"
    return None


class DecodeBatch:
    """Sequences that decode together: what their layers share, in static device buffers.

    Args:
        table: int32 [batch, max_pages], physical pages of each row, enough for all tokens to come.
        lengths: tokens cached per row so far.
        page_size: tokens per page.
        budget: of the decode rule; None when everything is visible.
    """

    def __init__(self, table: Tensor, lengths: list[int], page_size: int, budget: Budget | None) -> None:
        self.table, self.page_size, self.budget = table, page_size, budget
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=table.device)
        self.spans = torch.zeros(len(lengths), 4, dtype=torch.int32, device=table.device)
        self._spaces: dict[tuple[Any, ...], Any] = {}  # workspaces, which layers of the same shape share

    def space(self, make: Callable[..., Space], *arguments: Any, key: tuple[Any, ...]) -> Space:
        """A workspace that is kept: layers run one after the other, so one serves all of the same ``key``."""
        if (make, key) not in self._spaces:
            self._spaces[make, key] = make(*arguments)
        return self._spaces[make, key]

    def advance(self) -> None:
        """Every row gets one more token: lengths and spans move on. Call before the layers of a step."""
        self.lengths += 1
        if self.budget is not None:
            page_spans(self.budget, self.lengths, self.page_size, self.spans)

    @property
    def capacity(self) -> int:
        """Pages that a list must be able to hold."""
        return list_capacity(self.budget, self.table.shape[1], self.page_size)


class DecodeLayer:
    """Attention of one layer, for queries whose own tokens are already stored.

    Args:
        shape: the layer.
        batch: the sequences.
        keys, values: [num_kv_heads, num_pages, page_size, head_dim].
        summary: [num_kv_heads, num_pages, width] of the decode method's kind; None if the layer is dense.
        method: of the decode rule.
        table: physical pages, if this layer's differ from the batch's.
    """

    def __init__(
        self, shape: LayerShape, batch: DecodeBatch, keys: Tensor, values: Tensor, summary: Tensor | None = None,
        method: Method | None = None, table: Tensor | None = None, sink_logit: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.batch, self.summary, self.sink_logit = shape, batch, summary, sink_logit
        self.kv = PagedKV(keys, values, batch.table if table is None else table, batch.lengths)
        self.method = method if isinstance(method, SummaryMethod) and summary is not None else None
        self.pages: Tensor | None = None  # int32 [batch, num_rows, capacity], what the last sparse step saw
        self.counts: Tensor | None = None  # int32 [batch, num_rows]
        if self.method is not None:
            shares = self.method.heads == "kv" or (self.method.heads == "auto" and shape.group_size > 1)
            num_rows = shape.num_kv_heads if shares else shape.num_query_heads
            self.pages = torch.zeros(self.kv.batch, num_rows, batch.capacity, dtype=torch.int32, device=keys.device)
            self.counts = torch.zeros(self.kv.batch, num_rows, dtype=torch.int32, device=keys.device)
        self.visible = torch.zeros(1, dtype=torch.int64, device=keys.device)  # tokens shown, summed over lists, steps

    @property
    def shares(self) -> bool:
        """Whether the query heads of a KV head share a list."""
        return self.pages is not None and self.pages.shape[1] == self.shape.num_kv_heads

    def attend(self, queries: Tensor, dense: bool, early: bool = False) -> Tensor:
        """[batch, num_query_heads, head_dim] -> the same; dense shows everything.

        With ``early`` it may start while the kernel before still runs, see ``sifted_attention``.
        """
        shape, kv = self.shape, self.kv
        knobs: dict[str, Any] = {
            "scale": shape.scale,
            "softcap": shape.softcap,
            "sink_logit": self.sink_logit,
            "visible": self.visible,
        }
        if dense or self.method is None or self.summary is None or self.pages is None or self.counts is None:
            return page_attention(queries, kv, None, None, space=self._split_space(), **knobs)
        space = None
        if single_launch_runs(queries, kv, self.summary, self.pages, self.method.score_by):
            space = self.batch.space(SiftSpace.make, kv, shape.group_size, key=(kv.keys.shape[0], *shape[1:4]))
        return sifted_attention(
            queries, kv, self.summary, self.batch.spans, self.pages, self.counts, kind=self.method.score_by,
            space=space, early=early, **knobs,
        )  # fmt: skip

    def _split_space(self) -> SplitSpace | None:
        if not self.kv.keys.is_cuda:
            return None
        rows, shape = self.kv.batch * self.kv.num_kv_heads, self.shape
        splits = split_count(self.kv, None, rows)
        arguments = (rows, splits, shape.group_size, shape.head_dim, self.kv.keys.device)
        return self.batch.space(SplitSpace.make, *arguments, key=arguments)


def page_spans(budget: Budget, lengths: Tensor, page_size: int, out: Tensor | None = None) -> Tensor:
    """What ``Budget`` says about a query at the end of each row, computed on the device (``kernels.page_spans``)."""
    return spans_of(
        lengths, page_size, sinks=budget.sinks, window=budget.window, tokens=budget.tokens, ratio=budget.ratio,
        min_context=budget.min_context, out=out,
    )  # fmt: skip


def list_capacity(budget: Budget | None, max_pages: int, page_size: int) -> int:
    """Pages that a row can see at most, for contexts of up to ``max_pages`` pages."""
    if budget is None:
        return max_pages
    pages = ceil(max(budget.limit(max_pages * page_size), budget.min_context) / page_size)
    if budget.tokens is None:  # a ratio may come to less than sinks, window and one page, which are shown all the same
        pages = max(pages + 1, ceil(budget.sinks / page_size) + ceil(budget.window / page_size) + 2)
    return min(pages, max_pages)


def rule_of(plan: Plan) -> Rule | None:
    """The decode rule if it skips anything."""
    return None if plan.decode is None or plan.decode.method.unbounded else plan.decode
