"""Decode attention of one layer for a whole batch, without the host.

The composed path (``layer.sparse_attention``) is the specification; this is its fast twin for methods that rank pages
by a summary, and for sketches, whose units are tokens. Everything that changes from step to step is a tensor on the
device, so a step can be captured in a CUDA graph and replayed. Each sequence has a budget of its own and is dense or
sparse by itself.

A table says where the pages of a sequence are, and strides how a page lies in memory, so that the cache may be that of
another host: the plugin for vLLM attends vLLM's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import ceil
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from kvsift.kernels import sketch_launch
from kvsift.kernels.block_attention import block_attention, new_parts
from kvsift.kernels.page_attention import SplitSpace, page_attention, split_count
from kvsift.kernels.page_spans import page_spans as spans_of
from kvsift.kernels.paged import PagedKV, SpaceShape, shared_spaces
from kvsift.kernels.sifted_attention import SiftSpace, sifted_attention, single_launch_runs
from kvsift.kernels.sketch_attention import sketch_attention
from kvsift.kernels.sketch_launch import SketchSpace
from kvsift.methods.base import Method
from kvsift.methods.pages import PagedMethod
from kvsift.methods.sketch import Sketch
from kvsift.plan.budget import Budget
from kvsift.plan.capabilities import reason
from kvsift.plan.plan import Plan, Rule
from kvsift.types import LayerShape, Objections

MOST_TOKENS = 128  # in a page: shared memory holds keys and values of two tiles of whole pages
CAPTURED = (PagedMethod, Sketch)

ALWAYS = (1 << 31) - 1  # tokens, more than a context has: a sequence that is dense below this is dense
StepMode = Literal["dense", "sparse", "mixed"]  # of a step; mixed: each sequence by its own length and rule
Lists = tuple[Tensor, Tensor]  # units int32 [batch, num_rows, capacity], and how many count, int32 [batch, num_rows]
Space = TypeVar("Space")


def reason_against(plan: Plan) -> str | None:
    """Return why the decode rule of a plan needs the composed path; None if it can be captured."""
    return reason(plan, DecodeBatch.objections) or reason(rule_of(plan), DecodeLayer.objections)


class DecodeBatch:
    """Batch of sequences that decode together: the buffers that their layers share, on the device.

    Args:
        table: int32 [batch, max_pages], physical pages of each sequence, enough for all tokens to come.
        lengths: tokens cached per sequence so far.
        page_size: tokens per page.
        budgets: budget of each sequence's decode rule; None where the sequence is dense.
        capacity: units that a list can hold; by default what ``budgets`` need.
        unit_size: tokens per unit of the lists; a page by default.
        block: unless 0, number of neighbouring rows that are consecutive tokens of one sequence, and the bits of a row
            do not depend on other rows (``kernels.block_attention``).

    Attributes:
        growth: int32 [batch], what a step adds to each length.
        sizes: how many sequences a step may have, which are the first ones then; by default all.
        ranked: most units of a list of which some are left out; None: as many as it holds.
        split_bytes: most bytes of the workspaces of dense sequences, and of reused lists; None: as many as they take.
        launches: workspaces of single launches, by kind and shape of a layer, then by number of sequences.
    """

    objections: ClassVar[Objections] = (  # to plans
        (lambda plan: (size := plan.page_size or 1) & (size - 1), "page_size={it.page_size} is not a power of two"),
        (lambda plan: rule_of(plan) is not None and (plan.page_size or 1) > MOST_TOKENS and MOST_TOKENS,
         "a page of {it.page_size} tokens is more than a multiprocessor can hold; the most is {found}"),
    )  # fmt: skip

    def __init__(
        self, table: Tensor, lengths: list[int], page_size: int, budgets: Sequence[Budget | None],
        capacity: int | None = None, unit_size: int | None = None, block: int = 0,
    ) -> None:  # fmt: skip
        self.table, self.page_size, self.unit_size, self.block = table, page_size, unit_size or page_size, block
        self.capacity = self.need(budgets) if capacity is None else capacity
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=table.device)
        self.growth = torch.ones_like(self.lengths)
        self.spans = torch.zeros(len(lengths), 4, dtype=torch.int32, device=table.device)
        self.budgets = torch.zeros(len(lengths), 5, dtype=torch.float64, device=table.device)
        self.set_budgets(budgets)
        self.sizes: Sequence[int] = (len(lengths),)
        self.ranked: int | None = None
        self.split_bytes: int | None = None
        self.launches: dict[tuple[Any, ...], dict[int, Any]] = {}
        self._spaces: dict[tuple[Any, ...], Any] = {}  # workspaces, which layers of the same shape share
        self._side: torch.cuda.Stream | None = None

    def need(self, budgets: Sequence[Budget | None]) -> int:
        """Return the most units that a list can hold under budgets."""
        max_units = self.table.shape[1] * self.page_size // self.unit_size
        needs = [list_capacity(budget, max_units, self.unit_size) for budget in budgets if budget is not None]
        return max(needs, default=0)

    def new_lists(self, num_rows: int) -> Lists:
        """Return memory for the lists of a layer, ``num_rows`` for each sequence."""
        shape, device = (len(self.table), num_rows), self.table.device
        units = torch.zeros(*shape, self.capacity, dtype=torch.int32, device=device)
        return units, torch.zeros(shape, dtype=torch.int32, device=device)

    def set_budgets(self, budgets: Sequence[Budget | None]) -> None:
        """Replace the budgets of the first sequences, without waiting for the device."""
        numbers = [_numbers(budget) for budget in budgets]
        pinned = torch.tensor(numbers, dtype=torch.float64, pin_memory=self.budgets.is_cuda)
        self.budgets[: len(numbers)].copy_(pinned, non_blocking=True)

    def space(self, make: Callable[..., Space], *arguments: Any, key: tuple[Any, ...]) -> Space:
        """Return a workspace that is kept: layers run one after the other, so one serves all of the same ``key``."""
        if (make, key) not in self._spaces:
            self._spaces[make, key] = make(*arguments)
        return self._spaces[make, key]

    def launch_space(
        self, kind: type, shapes: Callable[[int], tuple[SpaceShape, ...] | None], rows: int, key: tuple[Any, ...]
    ) -> Any:
        """Return the workspace of a single launch that attends ``rows`` sequences; None if it does not run.

        A CUDA graph may be captured for each of ``sizes``. Launches run one after the other, so they share memory; it
        never moves.

        Args:
            kind: a named tuple of tensors.
            shapes: number of sequences -> shapes of the tensors; None if the launch does not run.
            rows: number of them.
            key: names the layers that share the workspace.
        """
        if (kind, *key) not in self.launches:
            by_size = {size: found for size in self.sizes if (found := shapes(size)) is not None}
            spaces = shared_spaces(by_size, self.table.device)
            self.launches[(kind, *key)] = {size: kind(*tensors) for size, tensors in spaces.items()}
        return self.launches[(kind, *key)].get(rows)

    @contextmanager
    def fork(self) -> Iterator[AbstractContextManager[object]]:
        """Yield a context whose launches run beside those of this block, from its beginning to its end."""
        if not self.table.is_cuda:
            yield nullcontext()
            return
        if self._side is None:
            self._side = torch.cuda.Stream(self.table.device)
        main = torch.cuda.current_stream(self.table.device)
        self._side.wait_stream(main)
        yield torch.cuda.stream(self._side)
        main.wait_stream(self._side)

    def advance(self) -> None:
        """Add a token to every sequence: lengths and spans move on. Call before the layers of a step."""
        if self.capacity:
            spans_of(self.lengths, self.unit_size, self.budgets, self.spans, self.growth)
        else:
            self.lengths += self.growth


class DecodeLayer:
    """Attention of one layer, for queries whose own tokens are already stored.

    Args:
        shape: the layer.
        batch: the sequences.
        keys, values: [num_kv_heads, num_pages, page_size, head_dim].
        summary: [num_kv_heads, num_pages, width] of the decode method's kind; None if the layer is dense, or attends
            what ``memory`` lists.
        method: method of the decode rules.
        sink_logit: [num_query_heads].
        dense_below: int32 [batch], lengths below which each sequence is dense here; mixed steps read it.
        visible: int64 [batch], to which the visible tokens of each sequence's lists are added, step by step.
        estimated: int64 [batch], to which the shares of attention that are estimated are added, head by head
            (``kernels.sketch_attention``); None: they are not counted.
        memory: lists that the layer writes, its own by default. Without a summary, those of an anchor: a layer with as
            many KV heads that attends before this one, so that all of the batch are in the same step.
        heads: for each KV head, that of the anchor whose list it attends; its own by default.
    """

    objections: ClassVar[Objections] = (  # to rules of decode
        (lambda rule: not rule.method.summaries, "{it.name} does not rank pages by a summary"),
        (lambda rule: (count := len(rule.method.summaries)) > 1 and count,
         "{it.name} reads {found} kinds of page summary; the kernels score one"),
        (lambda rule: reason(rule, rule.method.not_captured), "{found}"),
        (lambda rule: rule.budget.mass is not None,
         "mass= chooses as many pages as the scores ask for; the kernels need a number"),
        (lambda rule: rule.budget.layer_budgets != "equal",
         "layer_budgets={it.budget.layer_budgets} gives layers lists of different lengths; kernels take one"),
        (lambda rule: rule.budget.head_budgets != "equal",
         "head_budgets={it.budget.head_budgets} gives heads lists of different lengths; kernels take one"),
        (lambda rule: rule.budget.window == 0,
         "window=0 lets the page being filled compete; the kernels always show it"),
        (lambda rule: isinstance(rule.method, Sketch) and rule.budget.window < rule.method.page_size,
         "window={it.budget.window} lets tokens of the page being filled compete, whose sketches are written when it "
         "is full; give window={it.method.page_size} or more"),
    )  # fmt: skip

    def __init__(
        self, shape: LayerShape, batch: DecodeBatch, keys: Tensor, values: Tensor, summary: Tensor | None = None,
        method: Method | None = None, sink_logit: Tensor | None = None, dense_below: Tensor | None = None,
        visible: Tensor | None = None, estimated: Tensor | None = None, memory: Lists | None = None,
        heads: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.shape, self.batch, self.summary, self.sink_logit = shape, batch, summary, sink_logit
        self.kv = PagedKV(keys, values, batch.table, batch.lengths)
        self.method = method if isinstance(method, CAPTURED) and (summary is not None or memory is not None) else None
        self.memory = memory
        self._heads: Tensor | None = None
        if tuple(heads) != tuple(range(len(heads))):
            self._heads = torch.tensor(heads, dtype=torch.int32, device=keys.device)
        if self.method is not None and self.memory is None:
            self.memory = batch.new_lists(self.method.num_selections(shape))
        self.dense_below = torch.zeros_like(batch.lengths) if dense_below is None else dense_below
        self.visible = torch.zeros_like(batch.lengths, dtype=torch.int64) if visible is None else visible
        self.estimated = estimated

    @property
    def lists(self) -> Lists | None:
        """The lists that each head attended in the last step."""
        return None if self.memory is None else self.lists_of(slice(None))

    def lists_of(self, rows: slice) -> Lists:
        """Return those of some sequences."""
        assert self.memory is not None
        units, counts = (each[rows] for each in self.memory)
        return (units, counts) if self._heads is None else (units[:, self._heads], counts[:, self._heads])

    @property
    def shares(self) -> bool:
        """Whether the query heads of a KV head share a list."""
        return self.memory is not None and self.memory[0].shape[1] == self.shape.num_kv_heads

    @property
    def estimates(self) -> bool:
        """Whether what the lists leave out is estimated."""
        return isinstance(self.method, Sketch) and self.method.rest and self.summary is not None

    def attend(self, queries: Tensor, mode: StepMode, early: bool = False, out: Tensor | None = None) -> Tensor:
        """Return attention of the first sequences, [batch or fewer, num_query_heads, head_dim] like ``queries``.

        Every token is visible if ``dense``. With ``early`` the launch may start while the kernel before still runs, see
        ``sifted_attention``. ``out`` is written, a new one by default.
        """
        if self.batch.block:
            return self._attend_blocks(queries, early)
        if mode == "dense" or self.method is None:
            return self._attend_dense(queries, 1 if mode == "mixed" else self.kv.batch, out)
        if mode == "sparse":
            return self._attend_sparse(queries, early, out)
        output, dense_below = torch.empty_like(queries) if out is None else out, self.dense_below[: len(queries)]
        with self.batch.fork() as side:
            self._attend_sparse(queries, early, output, dense_below)
            with side:
                self._attend_dense(queries, 1, output, dense_below)
        return output

    def _attend_sparse(
        self, queries: Tensor, early: bool, out: Tensor | None, dense_below: Tensor | None = None
    ) -> Tensor:
        method, summary, rows = self.method, self.summary, len(queries)
        assert method is not None
        assert self.memory is not None
        units, counts = (each[:rows] for each in self.memory)
        if summary is None:
            return self._attend_reused(queries, units, counts, early, out, dense_below)
        step = queries, self._first(rows), summary, self.batch.spans[:rows], units, counts
        shared: dict[str, Any] = {
            "visible": self.visible[:rows], "out": out, "dense_below": dense_below, "early": early, **self._logits,
        }  # fmt: skip
        group, capacity = self.shape.group_size, self.batch.capacity
        if isinstance(method, Sketch):
            space = self._launch_space(
                SketchSpace, rows, lambda kv: sketch_launch.single_launch_runs(queries, kv, capacity),
                lambda kv: SketchSpace.shapes(kv, group, capacity),
            )  # fmt: skip
            estimated = None if self.estimated is None else self.estimated[:rows]
            return sketch_attention(
                *step, bits=method.bits, rest=method.rest, estimated=estimated, space=space, **shared
            )
        kind = method.ranking
        space = self._launch_space(
            SiftSpace, rows, lambda kv: single_launch_runs(queries, kv, summary, units, kind),
            lambda kv: SiftSpace.shapes(kv, group),
        )  # fmt: skip
        return sifted_attention(*step, kind=kind, ranked=self.batch.ranked, space=space, **shared)

    def _attend_reused(
        self, queries: Tensor, units: Tensor, counts: Tensor, early: bool, out: Tensor | None,
        dense_below: Tensor | None,
    ) -> Tensor:  # fmt: skip
        unit_size, batch, num_lists = self.batch.unit_size, len(queries), units.shape[1]
        splits = split_count(self.kv, units.shape[2], self.kv.batch * num_lists, unit_size)
        space = self._split_space(splits, num_lists, "reused")  # dense sequences are attended at the same time
        return page_attention(
            queries, self._first(batch), units, counts, space=space, visible=self.visible[:batch],
            dense_below=dense_below, out=out, unit_size=unit_size, heads=self._heads, early=early, **self._logits,
        )  # fmt: skip

    def _attend_dense(
        self, queries: Tensor, rows: int, out: Tensor | None, dense_below: Tensor | None = None
    ) -> Tensor:
        """Attend all pages of dense sequences, cut so that ``rows`` of them fill the device.

        Mixed steps cut for one sequence: few sequences would leave the device idle, and many cost nothing more.
        """
        heads = self.kv.num_kv_heads
        space = self._split_space(split_count(self.kv, None, rows * heads), heads, "dense")
        return page_attention(
            queries, self._first(len(queries)), None, None, space=space, out=out, dense_below=dense_below,
            **self._logits,
        )  # fmt: skip

    def _attend_blocks(self, queries: Tensor, early: bool) -> Tensor:
        assert self.sink_logit is None, "no model with learned sinks is attended in blocks"
        kv, shape, size, parts = self.kv, self.shape, self.batch.block, None
        if kv.keys.is_cuda:
            parts = self.batch.space(new_parts, kv, size, shape.num_query_heads, key=shape[1:4])
        return block_attention(queries, kv, size, scale=shape.scale, softcap=shape.softcap, parts=parts, pdl=early)

    @property
    def _logits(self) -> dict[str, Any]:
        return {"scale": self.shape.scale, "softcap": self.shape.softcap, "sink_logit": self.sink_logit}

    def _first(self, rows: int) -> PagedKV:
        """Return the cache of the first sequences."""
        kv = self.kv
        return kv if rows == kv.batch else kv._replace(table=kv.table[:rows], lengths=kv.lengths[:rows])

    def _launch_space(
        self, kind: type, rows: int, runs: Callable[[PagedKV], bool],
        shapes: Callable[[PagedKV], tuple[SpaceShape, ...]],
    ) -> Any:  # fmt: skip
        def shapes_of(size: int) -> tuple[SpaceShape, ...] | None:
            kv = self._first(size)
            return shapes(kv) if runs(kv) else None

        return self.batch.launch_space(kind, shapes_of, rows, self.shape[1:4])

    def _split_space(self, splits: int, num_lists: int, use: str) -> SplitSpace | None:
        """Return the workspace of a launch, of fewer splits where so many take more than ``DecodeBatch.split_bytes``;
        launches of different ``use`` may run at once."""
        if not self.kv.keys.is_cuda:
            return None
        rows, group, dim = self.kv.batch * num_lists, self.shape.num_query_heads // num_lists, self.shape.head_dim
        if self.batch.split_bytes is not None:
            splits = min(splits, max(1, self.batch.split_bytes // (rows * 4 * group * (dim + 2))))
        arguments = (rows, splits, group, dim, self.kv.keys.device)
        return self.batch.space(SplitSpace.make, *arguments, key=(*arguments, use))


def page_spans(budget: Budget, lengths: Tensor, unit_size: int) -> Tensor:
    """Return the spans of sequences that share a budget, computed on the device (``kernels.page_spans``)."""
    budgets = torch.tensor([_numbers(budget)] * len(lengths), dtype=torch.float64, device=lengths.device)
    return spans_of(lengths, unit_size, budgets)


def _numbers(budget: Budget | None) -> tuple[float, ...]:
    """Return a budget as ``kernels.page_spans`` reads it; the smallest for a dense sequence, whose lists are not
    read."""
    if budget is None:
        return 0, 1, 1, 1.0, 0
    tokens = -1 if budget.tokens is None else min(budget.tokens, ALWAYS)
    share = 1.0 if budget.ratio is None else budget.ratio
    return budget.sinks, budget.window, tokens, share, min(budget.min_context, ALWAYS)


def list_capacity(budget: Budget, max_units: int, unit_size: int) -> int:
    """Return the most units that a sequence can see, for contexts of up to ``max_units`` units."""
    units = ceil(max(budget.limit(max_units * unit_size), budget.min_context) / unit_size)
    if budget.tokens is None:  # a ratio may come to less than sinks, window and one unit, which are visible anyway
        units = max(units + 1, ceil(budget.sinks / unit_size) + ceil(budget.window / unit_size) + 2)
    return min(units, max_units)


def unit_size_of(rules: Sequence[Rule | None], page_size: int) -> int:
    """Return the tokens per unit of rules, all of one method; a page if none selects."""
    return next((rule.method.unit_size for rule in rules if rule is not None), page_size)


def rule_of(plan: Plan) -> Rule | None:
    """Return the decode rule if it skips anything."""
    return None if plan.decode is None or plan.decode.method.traits.unbounded else plan.decode
