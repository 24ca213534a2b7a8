"""Attention of one layer under a plan: the order of events.

A chunk is stored and observed by the methods (``layer_cache``), cut into segments, and every segment is attended: to
everything, or to what the rule of its phase selects (``selection``). Stores attend; ``accounting`` counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvsift.errors import EvictedTokens
from kvsift.kernels.merge import with_sink_logit
from kvsift.kernels.triton_shim import runs_on_triton
from kvsift.layer.accounting import Tally
from kvsift.layer.layer_cache import LayerCache
from kvsift.layer.probe import probe
from kvsift.layer.segments import groups_of
from kvsift.layer.selection import Selector, view_of, with_estimates
from kvsift.methods.base import Phase
from kvsift.plan.plan import Rule
from kvsift.stores.base import Segment
from kvsift.stores.parts import IN_PLACE_QUERIES, attend_verifying
from kvsift.types import Chunk, Exact, Part, Selection


def steps_of(length: int, decode_tokens: int, together: int = 1) -> list[tuple[int, int, Phase]]:
    """(start, stop, phase) of the prompt in a sequence of ``length`` new tokens, and of the generated ones, each alone
    or so many ``together``."""
    prompt = max(length - decode_tokens, 0)
    steps: list[tuple[int, int, Phase]] = [(0, prompt, "prefill")] if prompt else []
    return [*steps, *((token, min(token + together, length), "decode") for token in range(prompt, length, together))]


class SparseAttention(LayerCache):
    """One attention layer of a running batch; arguments as for ``LayerCache``.

    Sequences are attended one at a time, so that a sequence's answer cannot depend on its neighbours.

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
            chunk: new tokens of every sequence.
            decode_tokens: how many tokens at the end of each sequence are generated ones; each is attended as if it had
                come alone. The others are prompt.
            sink_logit: [num_query_heads], a learned extra logit, if the model has one.
            first_row: row of the batch that the chunk's first row belongs to.
            exact: "dense": generated tokens are attended to everything, several in one pass where each gets the bits
                that it gets alone; "learning": the method learns from it (``Method.verified``).

        Returns:
            [batch, num_query_heads, num_new, head_dim]; padding yields 0.
        """
        if self._preparing is not None:
            self._wait()
        if self.stats.observer is not None:
            self.stats.observer.before_chunk(self.shape, chunk, decode_tokens)
        output: Tensor | None = None
        for chunk_row, length in enumerate(chunk.lengths):
            row = first_row + chunk_row
            self.messages.begin(row, self.shape.layer)
            for start, stop, phase in steps_of(length, decode_tokens, IN_PLACE_QUERIES if exact else 1):
                whole = (start, stop) == (0, chunk.queries.shape[2])
                place: Any = chunk_row if whole else (chunk_row, slice(None), slice(start, stop))
                queries, keys, values = chunk.queries[place], chunk.keys[place], chunk.values[place]
                if phase == "decode":
                    foreseen = None if chunk.foreseen is None else chunk.foreseen[place]
                    part = self._attend_generated(row, queries, keys, values, foreseen, exact)
                else:
                    part = self._attend_prompt(row, queries, keys, values)
                part = part if sink_logit is None else with_sink_logit(part, sink_logit)
                if part.output.shape == chunk.queries.shape:
                    output = part.output  # nothing to assemble
                    continue
                output = torch.zeros_like(chunk.queries) if output is None else output
                output[chunk_row, :, start:stop] = part.output[0]
        if self._preparer is not None:
            self._start_preparing()
        return torch.zeros_like(chunk.queries) if output is None else output

    def attend_again(self, queries: Tensor) -> Tensor:
        """Attend everything for other queries of the tokens that were stored last, which are not counted: [batch,
        num_query_heads, num_new, head_dim], as ``queries``."""
        outputs = []
        for row, length in enumerate(self.store.lengths):
            segment = Segment(queries[row : row + 1], length - queries.shape[2], length)
            outputs.append(self.store.attend_all(row, segment).output)
        return torch.cat(outputs)

    def _attend_generated(
        self, row: int, queries: Tensor, keys: Tensor, values: Tensor, foreseen: Tensor | None, exact: Exact
    ) -> Part:
        """Store and attend generated tokens, of which there is one unless ``exact``, by the rule of decode."""
        rule, layer = self.plan.decode, self.shape.layer
        if foreseen is not None and rule is not None and rule.traits.wants_hidden:
            position = self.store.lengths[row]  # the query this layer would ask of the input of the layer below
            self.messages.put(row, layer - 1, ("decode", position, position + 1), foreseen)
        start, tally = self.store.lengths[row], self.stats.tally(layer, "decode")
        self.store.append(row, keys, values)
        self._states.observe(row, queries, keys, values, start)
        segment = Segment(queries.unsqueeze(0), start, start + queries.shape[1])
        if exact:
            rule = None
        elif rule is not None and rule.budget.min_recovery is not None:
            rule = self.guards.rule(row, start, rule, self.stats)
        if rule is None or rule.is_dense(self.number, start, segment.stop):
            part = self._dense(segment, row, tally, learns=exact == "learning")
        else:
            part = self._sparse(row, segment, self._selector(row, rule, "decode", tally), None)
        self._states.follow(row, queries.shape[1], "decode", self.store, self.messages, self.stats)
        if self.store.in_host_memory:
            tally.add_transfers(self.store)
        return part

    def _attend_prompt(self, row: int, queries: Tensor, keys: Tensor, values: Tensor) -> Part:
        """Store and attend tokens of a prompt by the rule of prefill, each piece dense or sparse as the rule says."""
        self._check_prompt(row)
        start, tally = self._append(row, queries, keys, values), self.stats.tally(self.shape.layer, "prefill")
        self.guards.begin(row, start, self.plan.decode)
        segment, rule = Segment(queries.unsqueeze(0), start, start + queries.shape[1]), self.plan.prefill
        parts = [self._dense(segment, row, tally)] if rule is None else self._in_groups(segment, row, rule, tally)
        self._states.follow(row, segment.num_queries, "prefill", self.store, self.messages, self.stats)
        self._states.settle(row, self.store, self.messages)
        tally.add_transfers(self.store)
        if len(parts) == 1:
            return parts[0]
        return Part(torch.cat([part.output for part in parts], 2), torch.cat([part.lse for part in parts], 2))

    def _selector(self, row: int, rule: Rule, phase: Phase, tally: Tally) -> Selector:
        return Selector(self.shape, rule, phase, self._states.of(phase, row), row, self.messages, tally)

    def _in_groups(self, segment: Segment, row: int, rule: Rule, tally: Tally) -> list[Part]:
        selector, parts = self._selector(row, rule, "prefill", tally), []
        for group in groups_of(rule, self.number, segment.start, segment.stop, self.messages, row):
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

    def _dense(self, segment: Segment, row: int, tally: Tally, learns: bool = False) -> Part:
        """Attend everything; ``learns``: the method of decode learns from it, if it drafts alone."""
        tally.add_dense(segment, self.store)
        if self.stats.observer is not None:
            self.stats.observer.after_segment(self.shape, row, segment, (0, 0), None)
        rule = self.plan.decode if learns else None
        if rule is None or not rule.traits.drafts_only or not (reader := self.store.reader(row)).in_place:
            return self.store.attend_all(row, segment)
        part, shares = attend_verifying(self.shape, segment, reader)
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
            part, share = with_estimates(part, chosen)
            tally.add_estimated(share, segment.num_queries)
        if selector.phase == "decode":
            self._probe_if_due(segment, row, view.spans[0], chosen, selector)
        if self.stats.observer is not None:
            self.stats.observer.after_segment(self.shape, row, segment, view.spans[0], chosen)
        return part

    def _attends_jointly(self, rule: Rule, queries: Tensor) -> bool:
        """Whether segments of a chunk are selected for and attended together."""
        traits, budget = rule.traits, rule.budget
        requested = runs_on_triton(queries) if self.joins is None else self.joins
        equal_lists = budget.mass is None and budget.head_budgets == "equal"
        plain = traits.selects and not traits.slides and not traits.repositions and not rule.evicts
        return requested and plain and budget.window > 0 and equal_lists

    def _probe_if_due(
        self, segment: Segment, row: int, spans: tuple[int, int], selection: Selection | None, selector: Selector
    ) -> None:
        """Compare a sparse step, which is counted, with exact attention every Nth step."""
        tally, every = selector.tally, self.stats.probe_every
        guarded = selector.rule.budget.min_recovery is not None
        if not guarded and (every <= 0 or (tally.sparse_queries - 1) % every):
            return
        if guarded and not self.guards.of(row).due(segment.start, every):
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

    def _check_prompt(self, row: int) -> None:
        """Refuse another prompt for a sequence of which something was evicted, unless the plan evicts in prefill."""
        evicted = self.store.lengths[row] - self.store.num_stored(row)
        if evicted and not self.plan.evicts_prompt:
            raise EvictedTokens(
                f"{evicted:,} tokens of this cache were dropped for good while it generated (evict=true), and another "
                "prompt would be read without them. Read everything into a new cache, or leave evict out: the same "
                "tokens are then hidden from generated ones only. Methods of both phases can read prompts so: "
                "both=METHOD:evict=true."
            )

    def attend_padding(self, row: int, queries: Tensor, length: int, sink_logit: Tensor | None = None) -> Tensor:
        """Attend the first ``length`` tokens of a sequence with a query of padding, which is neither stored nor
        counted.

        queries [num_query_heads, 1, head_dim] -> the same shape; 0 for no tokens.
        """
        self._wait()
        if not length:
            return torch.zeros_like(queries)
        part = self.store.attend_all(row, Segment(queries.unsqueeze(0), length - 1, length))
        return (part if sink_logit is None else with_sink_logit(part, sink_logit)).output[0]
