"""Selection for the segments of one sequence, within a rule's budget, and the reader that counts what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, logit
from torch.nn.functional import pad

from kvsift import native
from kvsift.kernels.list_slots import list_slots
from kvsift.kernels.merge import merge
from kvsift.kernels.segment_attention import segment_attention
from kvsift.layer.accounting import Tally
from kvsift.layer.layer_messages import LayerMessages
from kvsift.layer.segments import SegmentGroup
from kvsift.methods.base import Phase
from kvsift.methods.segment_batch import SegmentRequests, SegmentSelections
from kvsift.native.shapes import HeadRows, PooledRows
from kvsift.plan.plan import Rule
from kvsift.stores.base import Segment, Select, Store, View
from kvsift.stores.parts import past_lse
from kvsift.stores.reader import RowReader
from kvsift.types import LayerShape, Limit, Part, Selection


def view_of(rule: Rule, segment: Segment) -> View:
    """What a segment may see under a rule besides its selection."""
    method, budget, traits, unit_size = rule.method, rule.budget, rule.traits, rule.unit_size
    positions = range(segment.start, segment.stop if traits.slides else segment.start + 1)
    return View(
        [budget.always(position, unit_size, fill=not traits.selects) for position in positions],
        whole_units=budget.window > 0,  # else the unit being filled competes, and not every token of it is stored
        from_summaries=bool(method.summaries),
        reposition=method.reposition if traits.repositions else None,
        evict=rule.evicts,
    )


def with_estimates(part: Part, selection: Selection) -> tuple[Part, float | Tensor]:
    """Attention over what is visible, and a method's estimate of what is not; with the share of the estimate, a mean
    over heads, summed over queries."""
    visible, extra = part, selection.extra
    if extra is not None and selection.rest is None and native.takes_estimate(part, extra):
        return native.merge_estimate(part, extra)
    if extra is not None:
        part = merge(part, Part(extra.output.to(part.output.device), extra.lse.to(part.lse.device)))
    if selection.rest is not None:  # a part whose weight is its share
        value, share = selection.rest.value.to(part.output), selection.rest.share.to(part.lse.device)
        part = merge(part, Part(value, part.lse + logit(share)))
    negative_shares = torch.expm1(visible.lse - part.lse)  # [1, num_query_heads, num_queries]
    return part, -negative_shares.sum() / negative_shares.shape[1]


class CountingReader:
    """A ``KVReader``: what a method may read, with the bytes that it read to select.

    Args:
        reader: reader of the sequence.
        messages: between the layers.
        address: (row, layer, key) of these queries' messages.
    """

    def __init__(self, reader: RowReader, messages: LayerMessages, address: tuple[int, int, Any]) -> None:
        self._reader, self._messages, self._address = reader, messages, address
        self.bytes_read = 0

    @property
    def length(self) -> int:
        return self._reader.length

    def keys(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[num_kv_heads, stop - start, head_dim]; everything by default."""
        return self.counted(self._reader.keys(start, stop))

    def values(self, start: int, stop: int) -> Tensor:
        """[num_kv_heads, stop - start, head_dim]"""
        return self.counted(self._reader.values(start, stop))

    def in_place(self, stop: int) -> tuple[HeadRows, HeadRows]:
        """Keys and values of the first tokens, where they are in host memory; ``count_bytes`` counts what is read."""
        return self._reader.keys_in_place(stop), self._reader.values_in_place(stop)

    def paged_keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """As ``keys``, where they are stored; with the page of each logical one."""
        keys, _, table = self._reader.paged()
        self.bytes_read += (stop - start) * len(keys) * keys.shape[3] * keys.element_size()
        return keys, table

    def borrow(self, start: int, stop: int) -> Tensor:
        """Keys that are read in part: ``count_bytes`` counts what was read."""
        return self._reader.keys(start, stop)

    def borrow_in_place(self, start: int, stop: int) -> HeadRows:
        """As ``borrow``, without a copy where the compiled core reads them."""
        return self._reader.borrow_in_place(start, stop)

    def count_bytes(self, num_bytes: int) -> None:
        """Count bytes of borrowed keys that were read to select."""
        self.bytes_read += num_bytes

    def summary(self, kind: str, units: slice | Tensor) -> Tensor:
        """[num_heads, number of units, width]"""
        return self.counted(self._reader.summary(kind, units))

    def summary_in_place(self, kind: str, units: slice) -> HeadRows:
        """As ``summary``, without a copy where the compiled core reads it."""
        rows = self._reader.summary_in_place(kind, units)
        self.bytes_read += prod(rows.shape) * (rows.pool if isinstance(rows, PooledRows) else rows).element_size()
        return rows

    def keys_of(self, pages: Tensor) -> Tensor:
        """[num_heads, count * page_size, head_dim]"""
        return self.counted(self._reader.keys_of(pages))

    def from_below(self) -> Tensor | None:
        """The method's message for these queries from the nearest layer below where it selected."""
        return self._received(*self._address)

    def from_layer(self, layer: int) -> Tensor | None:
        """The message that the method kept for these queries in a layer below."""
        row, own, key = self._address
        return self._received(row, own, (key, layer))

    def pass_up(self, message: Tensor, keep: bool = False) -> None:
        """Send a message to the layers above; a kept one is addressed by its layer (``from_layer``)."""
        row, own, key = self._address
        self._messages.put(row, own, (key, own) if keep else key, message)

    def _received(self, row: int, layer: int, key: Any) -> Tensor | None:
        message: Tensor | None = self._messages.get(row, layer, key)
        return None if message is None else self.counted(message)

    def counted(self, remembered: Tensor) -> Tensor:
        """Count a tensor of the method's own memory as read, and return it."""
        self.bytes_read += remembered.numel() * remembered.element_size()
        return remembered


@dataclass(frozen=True)
class Selector:
    """Selects for one sequence in one layer and phase; bytes and seconds go to the tally.

    Attributes:
        state: the method's memory of the sequence.
    """

    shape: LayerShape
    rule: Rule
    phase: Phase
    state: Any
    row: int
    messages: LayerMessages
    tally: Tally

    def select_in(self, view: View, given: Selection | None = None) -> Select:
        """A function that a store calls with queries and a reader; ``given`` if the selection is made already."""
        if given is not None or not self.rule.traits.selects:
            return lambda segment, reader: given
        return partial(self._select, view.spans[0])

    def _select(self, spans: tuple[int, int], segment: Segment, reader: RowReader) -> Selection:
        started, rule, budget = perf_counter(), self.rule, self.rule.budget
        counting = self._counting(reader, segment.start, segment.stop)
        room = budget.room(segment.start, rule.unit_size)
        adaptive = budget.head_budgets == "adaptive"
        weighed = rule.traits.weighs_past or budget.mass is not None or adaptive
        always = past_lse(self.shape, segment, reader, spans) if weighed else None
        limit = Limit(min(room.units, room.candidates.count), budget.mass, always, adaptive)
        selection = rule.method.select(
            self.state, self.shape, segment.queries[0], segment.start, room.candidates, limit, counting
        )
        self.tally.index_bytes_read += counting.bytes_read
        self.tally.select_s += perf_counter() - started
        return selection

    def attend_jointly(
        self, queries: Tensor, group: SegmentGroup, store: Store
    ) -> tuple[Sequence[Selection], Part | None]:
        """Select for sparse segments in one call, and attend them in one launch.

        queries [num_query_heads, num_queries, head_dim] of all segments. The part is None, and nothing is counted as
        attended, if a selection is more than a list of units.
        """
        started, choices, reader = perf_counter(), group.choices, store.reader(self.row)
        readers = [self._counting(reader, group.start, group.stop)]

        def reader_of(start: int, stop: int) -> CountingReader:
            readers.append(self._counting(reader, start, stop))
            return readers[-1]

        requests = SegmentRequests(choices, queries, reader_of)
        selections = self.rule.method.select_segments(self.state, self.shape, queries, requests, readers[0])
        self.tally.index_bytes_read += sum(counting.bytes_read for counting in readers)
        self.tally.select_s += perf_counter() - started
        if isinstance(selections, SegmentSelections):
            units, counts = selections.lists, selections.counts
            selected: float | Tensor = choices.total
            listed = choices.total
        elif all(map(is_plain, selections)):
            units, counts = list_units(choices.first, selections)
            listed = sum(selection.units.shape[1] for selection in selections)
            full = all(selection.full for selection in selections)
            selected = listed if full else (counts - choices.first).double().mean(1).sum()
        else:
            return selections, None
        size, num_kv_heads = choices.unit_size, self.shape.num_kv_heads
        read = listed * size * max(units.shape[1], num_kv_heads) // num_kv_heads
        self.tally.add_group(group, store, selected * size * choices.num_queries, read)
        shape, rows = self.shape, reader.paged()
        slots, counts = list_slots(units, counts, size, rows, max(num_kv_heads, units.shape[1]))
        return selections, segment_attention(
            queries, rows, group.start, group.spans, slots, counts, shape.scale, shape.softcap
        )

    def _counting(self, reader: RowReader, start: int, stop: int) -> CountingReader:
        return CountingReader(reader, self.messages, (self.row, self.shape.layer, (self.phase, start, stop)))


def is_plain(selection: Selection) -> bool:
    """Whether a selection is nothing but a list of units."""
    return selection.log_weight is selection.extra is selection.rest is None and not selection.for_above


def list_units(sink_units: int, selections: Sequence[Selection]) -> tuple[Tensor, Tensor]:
    """Return units int32 [num_segments, num_heads, capacity] of plain selections, behind ``sink_units`` units of sinks,
    and how many of a list count, int32 [num_segments, num_heads]."""
    most, device = max(selection.units.shape[1] for selection in selections), selections[0].units.device
    units = torch.stack([pad(each.units, (0, most - each.units.shape[1]), value=-1) for each in selections])
    sinks = torch.arange(sink_units, device=device).expand(*units.shape[:2], -1)
    return torch.cat([sinks, units], 2).to(torch.int32), ((units >= 0).sum(2) + sink_units).to(torch.int32)
