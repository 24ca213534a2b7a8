"""The one place where a method meets a store: one attention layer of a running batch, and the order of events."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby, pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.kernels.merge import merge, with_sink_logit
from kvsift.kernels.triton_shim import runs_on_triton
from kvsift.methods.base import Asked, Phase
from kvsift.placement.device import RowReader
from kvsift.placement.evicting import EvictingStore
from kvsift.placement.offload import OffloadStore
from kvsift.placement.split import SplitStore
from kvsift.runtime.allocation import layer_plan
from kvsift.runtime.attend import Segment, past_lse
from kvsift.runtime.beside import beside
from kvsift.runtime.by_store import attend_everything, attend_visible
from kvsift.runtime.counted import CountedReader
from kvsift.runtime.evicting import evicts, refuse_prompt
from kvsift.runtime.moved import check_rope
from kvsift.runtime.places import Place, Placement, reason_against
from kvsift.runtime.plan import Plan, Rule
from kvsift.runtime.probe import probe
from kvsift.runtime.relay import Relay
from kvsift.runtime.segments import attend_segments, is_plain
from kvsift.runtime.states import States
from kvsift.runtime.stats import RunStats, Tally
from kvsift.types import Chunk, LayerShape, Limit, Part, Rest, Selection

DEFAULT_PAGE_SIZE = 16
__all__ = ["DEFAULT_PAGE_SIZE", "Placement", "SparseAttention", "reason_against"]


class SparseAttention:
    """Attention of one layer under a plan: stores what comes, asks the methods, attends what they chose, counts.

    Rows are answered one at a time, so that a row's answer cannot depend on its neighbours.

    Args:
        shape: the layer.
        plan: rules by phase.
        num_rows: sequences in the batch.
        like: a tensor with the device and dtype of the keys.
        stats: where to count.
        reserve: tokens a row is expected to reach.
        relay: of all layers of the model, for methods that pass something up; without one this layer is alone.
        placement: where KV lives (``places.Place``).
    """

    def __init__(
        self, shape: LayerShape, plan: Plan, num_rows: int, like: Tensor, stats: RunStats, reserve: int = 0,
        relay: Relay | None = None, placement: Placement = "device",
    ) -> None:  # fmt: skip
        if (reason := reason_against(placement, plan, like.is_cuda)) is not None:
            raise InputError(reason)
        plan = _in_layer(plan, shape)
        self.shape = shape
        self.stats = stats
        self.relay = Relay() if relay is None else relay
        page_size = plan.page_size or DEFAULT_PAGE_SIZE
        if plan.evicts_prompt and evicts(plan, shape.layer):
            reserve = 0  # not even the prompt will be there as a whole
        self.store = Place.of(placement).new_store(shape, num_rows, page_size, like, plan.summaries, reserve)
        if evicts(plan, shape.layer):
            self.store = EvictingStore.over(self.store)
        self.plan = plan
        self.joins: bool | None = None  # segments of a prefill chunk are answered together; None: on a GPU
        self._prepares_in: ThreadPoolExecutor | None = None  # once the next chunk is attended
        self._preparing: Future[None] | None = None
        self._states = States(plan, shape, num_rows)

    def attend(
        self, chunk: Chunk, decode_tokens: int = 0, sink_logit: Tensor | None = None, first_row: int = 0
    ) -> Tensor:
        """Store a chunk and attend it.

        Args:
            chunk: new tokens of every row.
            decode_tokens: how many tokens at the end of each row are generated ones; each is answered as if it had
                come alone. The others are prompt.
            sink_logit: [num_query_heads], a learned extra logit, if the model has one.
            first_row: row of the batch that the chunk's first row belongs to.

        Returns:
            [batch, num_query_heads, num_new, head_dim]; padding yields 0.
        """
        self._join()
        if self.stats.watch is not None:
            self.stats.watch.fed(self.shape, chunk, decode_tokens)
        output = self._attend(chunk, decode_tokens, sink_logit, first_row)
        if self._prepares_in is not None:
            self._prepares_in, self._preparing = None, beside(self._prepare, self._prepares_in)
        return output

    def _attend(self, chunk: Chunk, decode_tokens: int, sink_logit: Tensor | None, first_row: int) -> Tensor:
        alone = len(chunk.lengths) == 1 and chunk.lengths[0] == chunk.queries.shape[2]
        output: Tensor | None = None
        for row, length in enumerate(chunk.lengths):
            self.relay.enter(first_row + row, self.shape.layer)
            prompt = max(length - decode_tokens, 0)
            steps: list[tuple[int, int, Phase]] = [(0, prompt, "prefill")] if prompt else []
            steps += [(token, token + 1, "decode") for token in range(prompt, length)]
            for first, last, phase in steps:
                tokens = slice(first, last)
                queries, keys, values = (tensor[row, :, tokens] for tensor in chunk[:3])
                if chunk.foreseen is not None and phase == "decode":
                    self._foresee(first_row + row, chunk.foreseen[row, :, tokens])
                part = self._step(first_row + row, queries, keys, values, phase)
                self._states.follow(
                    first_row + row, last - first, phase, self.store.row(first_row + row), self.relay, self.stats
                )
                self._count_copied(phase)
                if sink_logit is not None:
                    part = with_sink_logit(part, sink_logit)
                if alone and len(steps) == 1:
                    return part.output  # nothing to put together
                output = torch.zeros_like(chunk.queries) if output is None else output
                output[row, :, tokens] = part.output[0]
        return torch.zeros_like(chunk.queries) if output is None else output

    def attend_stored(self, row: int, queries: Tensor, length: int, sink_logit: Tensor | None = None) -> Tensor:
        """Attend the first ``length`` tokens of a row with a query of padding, which is neither stored nor counted.

        queries [num_query_heads, 1, head_dim] -> the same shape; 0 for no tokens.
        """
        self._join()
        if not length:
            return torch.zeros_like(queries)
        part = attend_everything(self.shape, Segment(queries.unsqueeze(0), length - 1, length), self.store, row)
        return (part if sink_logit is None else with_sink_logit(part, sink_logit)).output[0]

    def stored(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens of a row, each [num_kv_heads, tokens, head_dim], where the store has them.

        Raises:
            InputError: if some were dropped for good.
        """
        self._join()
        if isinstance(self.store, EvictingStore) and self.store.has_dropped(row):
            raise InputError(
                f"layer {self.shape.layer} has dropped tokens for good (evict=true), so not all of its keys and values "
                "can be read. Leave evict=true out to keep them."
            )
        reader = self.store.row(row)
        return reader.keys(), reader.values()

    def take(self, chunk: Chunk) -> None:
        """Store the tokens of a prompt and let the methods see them, without an answer."""
        self._join()
        for row, length in enumerate(chunk.lengths):
            self.relay.enter(row, self.shape.layer)
            self._take(row, *(tensor[row, :, :length] for tensor in chunk[:3]))
            self._states.follow(row, length, "prefill", self.store.row(row), self.relay, self.stats)

    def prepare(self) -> None:
        """Let the method of decode build what it needs over what is stored."""
        if not self._join():
            self._prepare()

    def prepare_after_next(self, thread: ThreadPoolExecutor) -> None:
        """Do that in a thread as soon as the next chunk is attended, while the layers above go on; whoever needs this
        layer next waits for it."""
        self._prepares_in = thread

    @property
    def is_apart(self) -> bool:
        """Whether KV is in the memory of a host that is not the device."""
        return isinstance(self.store, SplitStore) and self.store.device.type != "cpu"

    def _join(self) -> bool:
        """Wait for what is being prepared; whether anything was."""
        preparing, self._preparing = self._preparing, None
        if preparing is None:
            return False
        preparing.result()
        return True

    def _prepare(self) -> None:
        for row in range(self.store.num_rows):
            self._states.prepare(row, self.store.row(row), self.relay)

    def describe(self) -> list[dict[str, Any]]:
        """What the method of decode says about every row."""
        return self._states.describe()

    def replan(self, plan: Plan) -> None:
        """Go on with another plan over what is stored. Methods of new rules start from the stored keys."""
        self._join()
        plan = _in_layer(plan, self.shape)
        if plan == self.plan:
            return
        self.store.repage(plan.page_size or self.store.page_size, plan.summaries)
        if evicts(plan, self.shape.layer) and not isinstance(self.store, EvictingStore):
            self.store = EvictingStore.over(self.store)
        self.plan = plan
        self._states, new = self._states.under(plan, self.store.num_rows)
        for row in range(self.store.num_rows):
            if self.store.lengths[row]:
                reader = self.store.row(row)
                self._states.observe(row, None, reader.keys(), reader.values(), 0, new)

    def fork(self, sources: Sequence[int]) -> None:
        """Row i becomes a copy of row ``sources[i]``."""
        self._join()
        self.store.fork(sources)
        self.relay.forget()
        self._states.fork(sources)

    def crop(self, row: int, length: int) -> None:
        """Forget the tokens of a row from position ``length`` on."""
        self._join()
        self.store.crop(row, length)
        self.relay.forget()
        self._states.crop(row, length)

    def can_crop(self, row: int, length: int) -> bool:
        """Whether no token was dropped for good that ``crop`` would need."""
        return not isinstance(self.store, EvictingStore) or self.store.can_crop(row, length)

    def check_crop(self, row: int, length: int) -> None:
        """Refuse what ``crop`` could not do.

        Raises:
            InputError: if tokens were dropped for good that would be needed again.
        """
        if isinstance(self.store, EvictingStore):
            self.store.check_crop(row, length)

    def mark(self) -> None:
        """This length may be come back to: states that forget remember it, and so does a store that drops."""
        self._states.mark()
        if isinstance(self.store, EvictingStore):
            self.store.mark()

    def _foresee(self, row: int, queries: Tensor) -> None:
        """What the layer below passes up about the next token of a row: the query that this layer would ask of its
        input."""
        start = self.store.lengths[row]
        self.relay.leave(row, self.shape.layer - 1, ("decode", start, start + 1), queries)

    def _step(self, row: int, queries: Tensor, keys: Tensor, values: Tensor, phase: Phase) -> Part:
        if phase == "prefill":
            refuse_prompt(self.plan, self.store, row)
        start = self._take(row, queries, keys, values)
        segment = Segment(queries.unsqueeze(0), start, start + queries.shape[1])
        rule, tally = self.plan.rule(phase), self.stats.tally(self.shape.layer, phase)
        if rule is None:
            return self._dense(segment, row, tally)
        parts = []
        for dense, run in groupby(_pieces(rule, self.shape.layer, segment, phase), lambda piece: piece[1]):
            pieces = [piece for piece, _ in run]
            if dense:
                parts += [self._dense(piece, row, tally) for piece in pieces]
            elif phase == "prefill" and self._joins(rule, queries):
                their = segment.queries[0, :, pieces[0].start - start : pieces[-1].stop - start]
                parts += self._sparse_joined(row, rule, their, pieces, self.store.row(row), tally)
            else:
                parts += [self._sparse(row, rule, piece, tally, phase) for piece in pieces]
        if len(parts) == 1:
            return parts[0]
        return Part(torch.cat([part.output for part in parts], 2), torch.cat([part.lse for part in parts], 2))

    def _take(self, row: int, queries: Tensor, keys: Tensor, values: Tensor) -> int:
        """Store and observe new tokens, the first of which stands at the position that is returned."""
        start = self.store.lengths[row]
        self.store.append(row, keys, values)
        self._states.observe(row, queries, keys, values, start)
        return start

    def _dense(self, segment: Segment, row: int, tally: Tally) -> Part:
        self._count(tally, segment)
        self._tell(row, segment, (0, 0), None)
        context = _context_tokens(segment)
        tally.visible_tokens = tally.visible_tokens + context  # never in place: inference tensors would refuse it
        tally.kv_bytes_read += self._kv_bytes(segment.stop)
        return attend_everything(self.shape, segment, self.store, row)

    def _joins(self, rule: Rule, queries: Tensor) -> bool:
        """Whether segments of a chunk are chosen and attended together."""
        method, budget = rule.method, rule.budget
        wanted = runs_on_triton(queries) if self.joins is None else self.joins
        alike = budget.mass is None and budget.head_budgets == "equal"  # all lists of a segment are as long
        plain = method.selects and not method.slides and not method.moves and not rule.evicts
        return wanted and plain and budget.window > 0 and alike

    def _sparse_joined(
        self, row: int, rule: Rule, queries: Tensor, segments: Sequence[Segment], reader: RowReader, tally: Tally
    ) -> list[Part]:
        started = perf_counter()
        method, budget = rule.method, rule.budget

        def counted(first: Segment, last: Segment) -> CountedReader:
            return CountedReader(reader, self.relay, (row, self.shape.layer, ("prefill", first.start, last.stop)))

        asked = []
        for segment in segments:
            candidates = budget.candidates(segment.start, method.unit_size)
            limit = Limit(min(budget.units(segment.start, method.unit_size), candidates.count))
            asked.append(Asked(segment.queries[0], segment.start, candidates, limit, counted(segment, segment)))
        whole = counted(segments[0], segments[-1])
        selections = method.select_segments(self._states["prefill"][row], self.shape, queries, asked, whole)
        tally.index_bytes_read += whole.bytes_read + sum(each.reader.bytes_read for each in asked)  # type: ignore[attr-defined]
        tally.select_s += perf_counter() - started
        if not all(is_plain(each) and each.rest is None and not each.for_above for each in selections):
            each = zip(segments, selections)
            return [self._sparse(row, rule, piece, tally, "prefill", chosen) for piece, chosen in each]
        spans = [budget.always(segment.start, method.unit_size) for segment in segments]
        part, seen = attend_segments(self.shape, queries, segments, spans, selections, reader.paged())
        for segment, (sinks_stop, window_start), selection, of_list in zip(segments, spans, selections, seen):
            count = segment.stop - segment.start
            own = _context_tokens(segment) - count * (window_start - sinks_stop)
            self._count(tally, segment)
            tally.sparse_queries += count
            tally.visible_tokens = tally.visible_tokens + own + of_list * count
            tally.kv_bytes_read += self._kv_bytes(sinks_stop + segment.stop - window_start)
            tally.kv_bytes_read += self._listed_bytes(selection)
        return [part]

    def _sparse(
        self, row: int, rule: Rule, segment: Segment, tally: Tally, phase: Phase, selection: Selection | None = None
    ) -> Part:
        method, budget = rule.method, rule.budget
        queries = range(segment.start, segment.stop if method.slides else segment.start + 1)
        spans = [budget.always(start, method.unit_size, fill=not method.selects) for start in queries]
        sinks_stop, window_start = spans[0]
        whole = budget.window > 0  # else the unit being filled competes, of which not every token is there

        def select(asking: Segment, reader: RowReader) -> Selection | None:
            if not method.selects:
                return None
            return selection or self._select(row, rule, asking, spans[0], reader, tally, phase)

        part, chosen, visible = attend_visible(
            self.shape, segment, self.store, row, spans, select, whole, method, rule.evicts
        )
        if chosen is not None and chosen.for_above:  # what was attended is little beside everything
            return self._dense(segment, row, tally)
        if chosen is not None and chosen.rest is not None:
            part = _with_rest(part, chosen.rest)
        self._count(tally, segment)
        tally.sparse_queries += segment.stop - segment.start
        tally.visible_tokens = tally.visible_tokens + visible
        tally.kv_bytes_read += self._kv_bytes(sinks_stop + max(segment.stop - window_start, 0))
        tally.kv_bytes_read += 0 if chosen is None else self._listed_bytes(chosen)
        self._probe(segment, row, spans[0], chosen, tally, phase)
        self._tell(row, segment, spans[0], chosen)
        return part

    def _tell(self, row: int, segment: Segment, spans: tuple[int, int], selection: Selection | None) -> None:
        if self.stats.watch is not None:
            self.stats.watch.answered(self.shape, row, segment, spans, selection)

    def _select(
        self, row: int, rule: Rule, segment: Segment, spans: tuple[int, int], reader: RowReader, tally: Tally,
        phase: Phase,
    ) -> Selection:  # fmt: skip
        started = perf_counter()
        counted = CountedReader(reader, self.relay, (row, self.shape.layer, (phase, segment.start, segment.stop)))
        method, budget = rule.method, rule.budget
        candidates = budget.candidates(segment.start, method.unit_size)
        units = min(budget.units(segment.start, method.unit_size), candidates.count)
        adaptive = budget.head_budgets == "adaptive"
        always = None if budget.mass is None and not adaptive else past_lse(self.shape, segment, reader, spans)
        limit = Limit(units, budget.mass, always, adaptive)
        selection = method.select(
            self._states[phase][row], self.shape, segment.queries[0], segment.start, candidates, limit, counted
        )
        tally.index_bytes_read += counted.bytes_read
        tally.select_s += perf_counter() - started
        return selection

    def _probe(
        self, segment: Segment, row: int, spans: tuple[int, int], selection: Selection | None, tally: Tally,
        phase: Phase,
    ) -> None:  # fmt: skip
        every = self.stats.probe_every
        if isinstance(self.store, EvictingStore) and self.store.has_dropped(row):
            return  # what was missed is gone
        if phase != "decode" or every == 0 or (tally.sparse_queries - 1) % every != 0:
            return
        started = perf_counter()
        keys = self.store.row(row).keys()
        recall, recovery = probe(self.shape, segment.queries[0].to(keys.device), keys, spans, selection)
        tally.probes, tally.recall, tally.recovery = tally.probes + 1, tally.recall + recall, tally.recovery + recovery
        self.stats.probe_s += perf_counter() - started

    def _count(self, tally: Tally, segment: Segment) -> None:
        tally.queries += segment.stop - segment.start
        tally.context_tokens += _context_tokens(segment)
        tally.kv_bytes_dense += self._kv_bytes(segment.stop)

    def _count_copied(self, phase: Phase) -> None:
        if not isinstance(self.store, SplitStore):
            return
        tally = self.stats.tally(self.shape.layer, phase)
        tally.kv_bytes_copied += self.store.take_copied()
        if isinstance(self.store, OffloadStore):
            wanted, found = self.store.cache.take_counts()
            tally.pieces_wanted, tally.pieces_found = tally.pieces_wanted + wanted, tally.pieces_found + found

    def _listed_bytes(self, selection: Selection) -> int:
        num_heads, count = max(self.shape.num_kv_heads, selection.units.shape[0]), selection.units.shape[1]
        return self._kv_bytes(count * selection.unit_size) * num_heads // self.shape.num_kv_heads

    def _kv_bytes(self, num_tokens: int) -> int:
        return num_tokens * self.store.token_bytes


def _in_layer(plan: Plan, shape: LayerShape) -> Plan:
    """The plan as it is in one layer.

    Raises:
        InputError: if it cannot run there.
    """
    check_rope(plan, shape.rope)
    return layer_plan(plan, shape)


def _with_rest(part: Part, rest: Rest) -> Part:
    """Attention over what is visible, and what a method says of the rest: a part whose weight is its share."""
    value, share = rest.value.to(part.output), rest.share.to(part.lse.device)
    return merge(part, Part(value, part.lse + torch.logit(share)))


def _context_tokens(segment: Segment) -> int:
    num_queries = segment.stop - segment.start
    return num_queries * segment.start + num_queries * (num_queries + 1) // 2


def _pieces(rule: Rule, layer: int, segment: Segment, phase: Phase) -> list[tuple[Segment, bool]]:
    """The chunk cut at multiples of the method's segment size, with whether each piece is dense; dense neighbours
    stay together. Cutting at absolute positions makes the answer independent of how the prompt was chunked."""
    size = rule.method.segment_size
    cuts = [segment.start, *range((segment.start // size + 1) * size, segment.stop, size), segment.stop]
    if phase == "decode":
        cuts = [segment.start, segment.stop]
    runs: list[tuple[int, int, bool]] = []
    for start, stop in pairwise(cuts):
        dense = rule.is_dense(layer, start, stop)
        if dense and runs and runs[-1][2]:
            runs[-1] = (runs[-1][0], stop, True)
        else:
            runs.append((start, stop, dense))
    return [
        (Segment(segment.queries[:, :, start - segment.start : stop - segment.start], start, stop), dense)
        for start, stop, dense in runs
    ]
