"""Attention of one layer under a plan: the order of events.

A chunk is stored and observed by the methods (``layer_cache``), cut into segments, and every segment is attended: to
everything, or to what the rule of its phase selects (``selection``). Stores attend; ``accounting`` counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from time import perf_counter

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.kernels.merge import with_sink_logit
from kvsift.kernels.triton_shim import runs_on_triton
from kvsift.layer.accounting import Tally
from kvsift.layer.layer_cache import LayerCache
from kvsift.layer.probe import probe
from kvsift.layer.segments import groups_of, steps_of
from kvsift.layer.selection import Selector, view_of, with_estimates
from kvsift.methods.base import Phase
from kvsift.plan.plan import Rule
from kvsift.stores.base import Segment
from kvsift.stores.parts import IN_PLACE_QUERIES, attend_verifying
from kvsift.types import Chunk, Exact, Part, Selection


class SparseAttention(LayerCache):
    """One attention layer of a running batch; arguments as for ``LayerCache``.

    Rows are attended one at a time, so that a row's answer cannot depend on its neighbours.

    Attributes:
        joins: segments of a prefill chunk are attended together; None: on a GPU.
    """

    joins: bool | None = None

    def attend(
        self, chunk: Chunk, decode_tokens: int = 0, sink_logit: Tensor | None = None, first_row: int = 0,
        exact: Exact = "",
    ) -> Tensor:  # fmt: skip
        """Store a chunk and attend it.

        Args:
            chunk: new tokens of every row.
            decode_tokens: how many tokens at the end of each row are generated ones; each is attended as if it had
                come alone. The others are prompt.
            sink_logit: [num_query_heads], a learned extra logit, if the model has one.
            first_row: row of the batch that the chunk's first row belongs to.
            exact: "dense": generated tokens are attended to everything, several in one pass where each gets the bits
                that it gets alone; "learning": the method learns from it (``Method.verified``).

        Returns:
            [batch, num_query_heads, num_new, head_dim]; padding yields 0.
        """
        self._preparation.wait()
        if self.stats.observer is not None:
            self.stats.observer.before_chunk(self.shape, chunk, decode_tokens)
        output: Tensor | None = None
        for row, length in enumerate(chunk.lengths):
            self.messages.begin(first_row + row, self.shape.layer)
            for start, stop, phase in steps_of(length, decode_tokens, IN_PLACE_QUERIES if exact else 1):
                now = exact if phase == "decode" else ""
                part = self._attend_tokens(first_row + row, chunk, row, slice(start, stop), phase, now)
                part = part if sink_logit is None else with_sink_logit(part, sink_logit)
                if part.output.shape == chunk.queries.shape:
                    output = part.output  # nothing to assemble
                    continue
                output = torch.zeros_like(chunk.queries) if output is None else output
                output[row, :, start:stop] = part.output[0]
        self._preparation.start(self._prepare)
        return torch.zeros_like(chunk.queries) if output is None else output

    def _attend_tokens(
        self, row: int, chunk: Chunk, chunk_row: int, tokens: slice, phase: Phase, exact: Exact
    ) -> Part:  # fmt: skip
        """Store and attend consecutive tokens of one phase."""
        queries, keys, values = (tensor[chunk_row, :, tokens] for tensor in chunk[:3])
        foresees = self.plan.decode is not None and self.plan.decode.method.traits.wants_hidden
        if chunk.foreseen is not None and foresees and phase == "decode":
            position = self.store.lengths[row]  # the query this layer would ask of the input of the layer below
            key = ("decode", position, position + 1)
            self.messages.put(row, self.shape.layer - 1, key, chunk.foreseen[chunk_row, :, tokens])
        if phase == "prefill":
            self._check_prompt(row)
        start, tally = self._append(row, queries, keys, values), self.stats.tally(self.shape.layer, phase)
        segment = Segment(queries.unsqueeze(0), start, start + queries.shape[1])
        rule = None if exact else self._rule(row, start, phase)
        if exact == "learning":
            parts = [self._verify(segment, row, tally)]
        elif rule is None:
            parts = [self._dense(segment, row, tally)]
        else:
            parts = self._by_rule(segment, row, rule, phase, tally)
        self._states.follow(row, segment.num_queries, phase, self.store.reader(row), self.messages, self.stats)
        if phase == "prefill":
            self._states.settle(row, self.store.reader(row), self.messages)
        tally.add_transfers(self.store)
        if len(parts) == 1:
            return parts[0]
        return Part(torch.cat([part.output for part in parts], 2), torch.cat([part.lse for part in parts], 2))

    def _rule(self, row: int, start: int, phase: Phase) -> Rule | None:
        """The rule of a phase as it is now for a row; None is dense."""
        if phase == "decode":
            return self.guards.rule(row, start, self.plan.decode, self.stats)
        self.guards.begin(row, start, self.plan.decode)
        return self.plan.prefill

    def _by_rule(self, segment: Segment, row: int, rule: Rule, phase: Phase, tally: Tally) -> list[Part]:
        """Attend a segment piece by piece, each dense or sparse as the rule says."""
        selector = Selector(self.shape, rule, phase, self._states.of(phase, row), row, self.messages, tally)
        if phase == "decode":
            if rule.is_dense(self.shape.layer, segment.start, segment.stop):
                return [self._dense(segment, row, tally)]
            return [self._sparse(row, segment, selector, None)]
        parts = []
        for group in groups_of(rule, self.shape.layer, segment.start, segment.stop, self.messages, row):
            queries = segment.queries[0, :, group.start - segment.start : group.stop - segment.start]
            if group.is_dense:
                parts += [self._dense(piece, row, tally) for piece in group.segments(queries)]
                continue
            selections: Iterable[Selection | None] = repeat(None)
            if self._attends_jointly(rule, queries):
                selections, part = selector.attend_jointly(queries, group, self.store)
                if part is not None:
                    parts.append(part)
                    continue
            pieces = zip(group.segments(queries), selections)
            parts += [self._sparse(row, piece, selector, chosen) for piece, chosen in pieces]
        return parts

    def _dense(self, segment: Segment, row: int, tally: Tally) -> Part:
        tally.add_dense(segment, self.store)
        self._observed(row, segment, (0, 0), None)
        return self.store.attend_all(row, segment)

    def _verify(self, segment: Segment, row: int, tally: Tally) -> Part:
        rule, store = self.plan.decode, self.store
        if rule is None or not rule.method.traits.drafts_only or not store.reader(row).in_place:
            return self._dense(segment, row, tally)
        tally.add_dense(segment, store)
        self._observed(row, segment, (0, 0), None)
        part, shares = attend_verifying(self.shape, segment, store.reader(row))
        rule.method.verified(self._states.of("decode", row), segment.queries, part, shares, segment.stop)
        return part

    def _sparse(self, row: int, segment: Segment, selector: Selector, selection: Selection | None) -> Part:
        view, tally = view_of(selector.rule, segment), selector.tally
        attended = self.store.attend(row, segment, view, selector.select_in(view, selection))
        part, chosen = attended.part, attended.selection
        if chosen is not None and chosen.for_above:  # what was attended is little beside everything
            return self._dense(segment, row, tally)
        tally.add_sparse(segment, self.store, view.spans[0], chosen, attended.visible)
        if chosen is not None and (chosen.extra or chosen.rest):
            visible_part, part = part, with_estimates(part, chosen)
            tally.add_estimated(visible_part, part)
        self._probe(segment, row, view.spans[0], chosen, selector)
        self._observed(row, segment, view.spans[0], chosen)
        return part

    def _attends_jointly(self, rule: Rule, queries: Tensor) -> bool:
        """Whether segments of a chunk are selected for and attended together."""
        traits, budget = rule.method.traits, rule.budget
        requested = runs_on_triton(queries) if self.joins is None else self.joins
        equal_lists = budget.mass is None and budget.head_budgets == "equal"
        plain = traits.selects and not traits.slides and not traits.repositions and not rule.evicts
        return requested and plain and budget.window > 0 and equal_lists

    def _observed(self, row: int, segment: Segment, spans: tuple[int, int], selection: Selection | None) -> None:
        if self.stats.observer is not None:
            self.stats.observer.after_segment(self.shape, row, segment, spans, selection)

    def _probe(
        self, segment: Segment, row: int, spans: tuple[int, int], selection: Selection | None, selector: Selector
    ) -> None:
        tally, guarded = selector.tally, selector.rule.budget.min_recovery is not None
        if selector.phase != "decode" or not self._is_due(row, segment.start, tally, guarded):
            return
        if self.store.num_stored(row) < self.store.lengths[row]:
            return  # what was missed is evicted
        started = perf_counter()
        reader = self.store.reader(row)
        keys = reader.keys_in_place() if reader.in_place else reader.keys()
        recall, recovery = probe(self.shape, segment.queries[0].to(keys.device), keys, spans, selection)
        tally.add_probe(recall, recovery)
        if guarded:
            self.guards.of(row).note(segment.start, self.shape.layer, recovery)
        self.stats.probe_s += perf_counter() - started

    def _is_due(self, row: int, position: int, tally: Tally, guarded: bool) -> bool:
        """Whether the sparse step at a position, which is counted, is to be probed."""
        every = self.stats.probe_every
        if guarded:
            return self.guards.of(row).due(position, every)
        return every > 0 and (tally.sparse_queries - 1) % every == 0

    def _check_prompt(self, row: int) -> None:
        """Refuse another prompt for a row of which something was evicted, unless prompts are read so."""
        evicted = self.store.lengths[row] - self.store.num_stored(row)
        if evicted and not self.plan.evicts_prompt:
            raise InputError(
                f"{evicted:,} tokens of this cache were dropped for good while it generated (evict=true), and another "
                "prompt would be read without them. Read everything into a new cache, or leave evict out: the same "
                "tokens are then hidden from generated ones only. Methods of both phases can read prompts so: "
                "both=METHOD:evict=true."
            )

    def attend_padding(self, row: int, queries: Tensor, length: int, sink_logit: Tensor | None = None) -> Tensor:
        """Attend the first ``length`` tokens of a row with a query of padding, which is neither stored nor counted.

        queries [num_query_heads, 1, head_dim] -> the same shape; 0 for no tokens.
        """
        self._preparation.wait()
        if not length:
            return torch.zeros_like(queries)
        part = self.store.attend_all(row, Segment(queries.unsqueeze(0), length - 1, length))
        return (part if sink_logit is None else with_sink_logit(part, sink_logit)).output[0]
