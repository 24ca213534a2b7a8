"""Sparse prefill over vLLM's blocks: prompts of a step are attended sequence by sequence, as ``layer.sparse_attention``
does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kvsift.kernels.merge import with_sink_logit
from kvsift.kernels.segment_attention import Span, segment_attention
from kvsift.layer.accounting import Tally
from kvsift.layer.layer_messages import LayerMessages
from kvsift.layer.segments import SegmentGroup, groups_of
from kvsift.layer.selection import Selector
from kvsift.methods.quoka import QuoKA
from kvsift.plan.plan import Rule
from kvsift.stores.base import Store
from kvsift.stores.reader import RowReader
from kvsift.types import LayerShape, Part
from kvsift.vllm.gpu_decode import LayerPages

SCORE_BYTES = 1 << 30  # of the segments that are selected for at once; groups cost the host more than the device


def together(rule: Rule, shape: LayerShape, length: int) -> int:
    """Return how many segments of a context of ``length`` tokens are selected for at once."""
    lists = shape.num_query_heads if _scores_each_head(rule) else shape.num_kv_heads
    return max(1, SCORE_BYTES // (4 * lists * -(-length // rule.method.unit_size)))


def _scores_each_head(rule: Rule) -> bool:
    return isinstance(rule.method, QuoKA) and rule.method.mode == "max_of_mean_exact"


def workspace_bytes(rule: Rule, shape: LayerShape, max_length: int, max_new: int, element: int) -> int:
    """Return the most bytes that a layer needs besides its cache to attend a chunk of ``max_new`` tokens: scores with
    their maxima and lists of the segments that are selected for at once, and their output."""
    segments = min(together(rule, shape, max_length), -(-max_new // rule.method.segment_size) + 1)
    units, listed = max_length // rule.method.unit_size, min(rule.budget.limit(max_length), max_length)
    scores = 4 * units * shape.num_query_heads if _scores_each_head(rule) else 0
    by_segment = scores + shape.num_kv_heads * (5 * units + 32 * listed)
    return segments * by_segment + shape.num_query_heads * shape.head_dim * element * max_new


@dataclass
class PromptRow:
    """A sequence of a step that is prefilled by a rule.

    Attributes:
        row: row of the step.
        tokens: its new tokens, among those of the step.
        start: position of the first of them.
        blocks: int32 [max_blocks], of vLLM's cache.
    """

    row: int
    tokens: slice
    start: int
    rule: Rule
    blocks: Tensor
    _pages: Tensor | None = None

    @property
    def stop(self) -> int:
        return self.start + self.tokens.stop - self.tokens.start

    @property
    def is_dense(self) -> bool:
        """Whether every new token sees its whole context, in all layers."""
        last = (self.stop - 1) // self.rule.method.segment_size * self.rule.method.segment_size
        return self.rule.is_dense(-1, max(self.start, last), self.stop)

    def pages(self, layer: LayerPages) -> Tensor:
        """Return the numbers of its pages, int32 [num_pages]; all layers of a step have the same."""
        if self._pages is None:
            page = torch.arange(-(-self.stop // layer.pages.page_size), device=self.blocks.device)
            block = self.blocks[page // layer.pages.per_block]
            self._pages = (block * layer.pages.step + page % layer.pages.per_block).to(torch.int32)
        return self._pages


class _BlockPool(NamedTuple):
    """What ``RowReader`` asks of a pool."""

    keys: Tensor
    values: Tensor
    page_size: int
    summaries: dict[str, Tensor]

    @property
    def by_page(self) -> bool:
        """Whether numbers are in 8 bits, as ``LayerPool`` may have them."""
        return False

    @property
    def as_read(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


class _Table(NamedTuple):
    """What ``RowReader`` asks of a table."""

    pages: Tensor

    def page_ids(self, row: int) -> Tensor:
        return self.pages

    def pages_on(self, row: int, device: torch.device) -> Tensor:
        return self.pages

    def slots_on(self, row: int, page_size: int, device: torch.device) -> Tensor:
        return (self.pages.long().unsqueeze(1) * page_size + torch.arange(page_size, device=device)).flatten()

    def run_start(self, row: int, *_: int) -> None:
        """No two pages are known to be neighbours: asking the device would make the host wait."""


class BlockRow(RowReader):
    """One sequence of a layer of vLLM's cache, which also passes for a store that holds it alone.

    Args:
        shape: the layer.
        layer: its keys, values and summaries.
        kind: kind of the summaries.
        pages: int32 [num_pages] of the sequence.
        length: tokens cached.
    """

    def __init__(self, shape: LayerShape, layer: LayerPages, kind: str, pages: Tensor, length: int) -> None:
        summaries = {} if layer.rows is None else {kind: layer.rows}
        pool = _BlockPool(layer.keys, layer.values, layer.pages.page_size, summaries)
        super().__init__(cast(Any, pool), cast(Any, _Table(pages)), 0, length)
        self.shape = shape
        self.token_bytes = 2 * shape.num_kv_heads * shape.head_dim * layer.keys.element_size()

    def reader(self, row: int) -> BlockRow:
        """Itself."""
        return self


def attend_prompt(
    row: PromptRow, shape: LayerShape, layer: LayerPages, kind: str, queries: Tensor, messages: LayerMessages,
    tally: Tally, sink_logit: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Attend the new tokens of a prompt, whose keys and values are stored.

    Args:
        row: row of the step.
        shape: the layer.
        layer: its cache.
        kind: kind of its summaries.
        queries: [num_new, num_query_heads, head_dim].
        messages: between the layers of the model.
        tally: counters of prefill.
        sink_logit: [num_query_heads], a learned extra logit.
        out: like ``queries``, written.
    """
    messages.begin(row.row, shape.layer)
    heads = queries.transpose(0, 1)
    stored = BlockRow(shape, layer, kind, row.pages(layer), row.stop)
    store = cast(Store, stored)
    selector = Selector(shape, row.rule, "prefill", None, row.row, messages, tally)
    most = together(row.rule, shape, row.stop)
    for group in groups_of(row.rule, shape.layer, row.start, row.stop, messages, row.row, most):
        tokens = slice(group.start - row.start, group.stop - row.start)
        part: Part | None
        if group.is_dense:
            part = _attend_dense(shape, group, heads[:, tokens], stored)
            tally.add_group(group, store)
        else:
            _, part = selector.attend_jointly(heads[:, tokens], group, store)
        assert part is not None, "settings.read_plan lets no methods in whose selections are more than lists"
        part = part if sink_logit is None else with_sink_logit(part, sink_logit)
        out[tokens] = part.output[0].transpose(0, 1)
    tally.visible_tokens = float(tally.visible_tokens)  # else whoever reads it later waits for a step that decodes


def compile_ahead(
    rule: Rule, shape: LayerShape, layer: LayerPages, kind: str, max_length: int, dtype: torch.dtype
) -> None:
    """Compile the kernels that prefill by a rule, for queries of ``dtype``; else the first prompt waits."""
    size, budget, device = rule.method.segment_size, rule.budget, layer.keys.device
    start = 2 * size + -(-(max(budget.limit(2 * size), budget.min_context) + budget.window) // size) * size
    last = max_length // size * size - 2 * size
    if last < start:
        return
    # products are compiled for powers of two of segments, up to 16 of them
    chunks = [(start, number * size) for number in (4, 8, 16)]
    starts = {start << doubled for doubled in range((last // start).bit_length())} | {last}
    for start in starts:  # the choice depends on the number of candidates: by powers of two, and whether 16 divides it
        starts_by_kind = {
            budget.candidates(at, rule.method.unit_size).count % 16 == 0: at
            for at in range(start + 1, start + 1 + 16 * rule.method.unit_size)
        }
        chunks += [(start, 2 * size), *((at, size - at % size) for at in starts_by_kind.values())]
    for start, count in chunks:
        count = min(count, max_length - start)
        queries = torch.zeros(count, shape.num_query_heads, shape.head_dim, dtype=dtype, device=device)
        blocks = torch.zeros(-(-max_length // layer.pages.block_size), dtype=torch.int32, device=device)
        row = PromptRow(0, slice(0, count), start, rule, blocks)
        attend_prompt(row, shape, layer, kind, queries, LayerMessages(), Tally(), None, torch.empty_like(queries))


def _attend_dense(shape: LayerShape, group: SegmentGroup, queries: Tensor, row: BlockRow) -> Part:
    slots = torch.empty(1, shape.num_kv_heads, 0, dtype=torch.int32, device=queries.device)
    span = Span(0, group.num_queries, 0)
    return segment_attention(queries, row.paged(), group.start, [span], slots, None, shape.scale, shape.softcap)
