"""The one place where a method meets a store: one attention layer of a running batch, and the order of events."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby, pairwise
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from kvsift.errors import InputError, unknown
from kvsift.kernels.merge import with_sink_logit
from kvsift.kernels.triton_shim import runs_on_triton
from kvsift.methods.base import Asked, Phase
from kvsift.placement.device import DeviceStore, RowReader
from kvsift.placement.split import SplitStore
from kvsift.runtime.attend import Segment, attend_dense, attend_sparse, past_lse
from kvsift.runtime.counted import CountedReader
from kvsift.runtime.plan import PHASES, Plan, Rule
from kvsift.runtime.probe import probe
from kvsift.runtime.relay import Relay
from kvsift.runtime.segments import attend_segments, is_plain
from kvsift.runtime.split import attend_dense_split, attend_sparse_split
from kvsift.runtime.stats import RunStats, Tally
from kvsift.types import Chunk, LayerShape, Limit, Part, Selection

DEFAULT_PAGE_SIZE = 16
Placement = Literal["device", "split"]
PLACEMENTS: tuple[Placement, ...] = ("device", "split")


def reason_against(placement: str, plan: Plan) -> str | None:
    """Why a plan cannot run with its KV there; None if it can.

    Raises:
        InputError: if there is no such placement.
    """
    if placement not in PLACEMENTS:
        raise unknown("placement", str(placement), PLACEMENTS)
    if placement == "split" and plan.prefill is not None and not plan.prefill.method.unbounded:
        return (
            f"prefill={plan.prefill} needs its KV on the device: with placement=split prefill is dense. Leave the "
            "prefill rule out, or the placement."
        )
    return None


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
        placement: where KV lives: on the "device" of the model, or "split", in host memory, where methods then choose.
    """

    def __init__(
        self, shape: LayerShape, plan: Plan, num_rows: int, like: Tensor, stats: RunStats, reserve: int = 0,
        relay: Relay | None = None, placement: Placement = "device",
    ) -> None:  # fmt: skip
        if (reason := reason_against(placement, plan)) is not None:
            raise InputError(reason)
        self.shape = shape
        self.stats = stats
        self.relay = Relay() if relay is None else relay
        store = DeviceStore if placement == "device" else SplitStore
        self.store = store(shape, num_rows, plan.page_size or DEFAULT_PAGE_SIZE, like, plan.summaries, reserve)
        self.plan = plan
        self.joins: bool | None = None  # segments of a prefill chunk are answered together; None: on a GPU
        self._states = self._new_states(plan, num_rows)

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
                part = self._step(first_row + row, queries, keys, values, phase)
                if sink_logit is not None:
                    part = with_sink_logit(part, sink_logit)
                if alone and len(steps) == 1:
                    return part.output  # nothing to put together
                output = torch.zeros_like(chunk.queries) if output is None else output
                output[row, :, tokens] = part.output[0]
        return torch.zeros_like(chunk.queries) if output is None else output

    def prepare(self) -> None:
        """Let the method of decode build what it needs over what is stored."""
        rule = self.plan.decode
        if rule is None:
            return
        for row, length in enumerate(self.store.lengths):
            if length and not rule.is_dense(self.shape.layer, length, length + 1):
                candidates = rule.budget.candidates(length, rule.method.unit_size)
                limit = Limit(min(rule.budget.units(length, rule.method.unit_size), candidates.count))
                place = row, self.shape.layer, ("decode", length, length)
                reader = CountedReader(self.store.row(row), self.relay, place)
                rule.method.prepare(self._states["decode"][row], self.shape, candidates, reader, limit)

    def describe(self) -> list[dict[str, Any]]:
        """What the method of decode says about every row."""
        rule = self.plan.decode
        return [] if rule is None else [rule.method.describe(state) for state in self._states["decode"]]

    def replan(self, plan: Plan) -> None:
        """Go on with another plan over what is stored. Methods of new rules start from the stored keys."""
        self.store.repage(plan.page_size or self.store.page_size, plan.summaries)
        kept = {phase: states for phase, states in self._states.items() if plan.rule(phase) == self.plan.rule(phase)}
        self.plan = plan
        self._states = self._new_states(plan, self.store.num_rows) | kept
        for row in range(self.store.num_rows):
            if self.store.lengths[row]:
                reader = self.store.row(row)
                self._observe(row, None, reader.keys(), reader.values(), 0, self._states.keys() - kept.keys())

    def fork(self, sources: Sequence[int]) -> None:
        """Row i becomes a copy of row ``sources[i]``."""
        self.store.fork(sources)
        self.relay.forget()
        for phase, states in self._states.items():
            self._states[phase] = [None if states[source] is None else states[source].fork() for source in sources]

    def crop(self, row: int, length: int) -> None:
        """Forget the tokens of a row from position ``length`` on."""
        self.store.crop(row, length)
        self.relay.forget()
        for states in self._states.values():
            if states[row] is not None:
                states[row].crop(length)

    def _new_states(self, plan: Plan, num_rows: int) -> dict[Phase, list[Any]]:
        return {
            phase: [rule.method.new_state(self.shape) for _ in range(num_rows)]
            for phase in PHASES
            if (rule := plan.rule(phase)) is not None
        }

    def _step(self, row: int, queries: Tensor, keys: Tensor, values: Tensor, phase: Phase) -> Part:
        start = self.store.lengths[row]
        self.store.append(row, keys, values)
        self._observe(row, queries, keys, values, start)
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

    def _observe(
        self, row: int, queries: Tensor | None, keys: Tensor, values: Tensor, start: int,
        phases: Collection[Phase] = PHASES,
    ) -> None:  # fmt: skip
        for phase, states in self._states.items():
            rule = self.plan.rule(phase)
            if rule is not None and phase in phases:
                rule.method.observe(states[row], self.shape, queries, keys, values, start)

    def _dense(self, segment: Segment, row: int, tally: Tally) -> Part:
        self._count(tally, segment)
        context = _context_tokens(segment)
        tally.visible_tokens = tally.visible_tokens + context  # never in place: inference tensors would refuse it
        tally.kv_bytes_read += self._kv_bytes(segment.stop)
        if isinstance(self.store, SplitStore):
            return attend_dense_split(self.shape, segment, self.store, row)
        return attend_dense(self.shape, segment, self.store.row(row))

    def _joins(self, rule: Rule, queries: Tensor) -> bool:
        """Whether segments of a chunk are chosen and attended together."""
        method, budget = rule.method, rule.budget
        wanted = runs_on_triton(queries) if self.joins is None else self.joins
        return wanted and method.selects and not method.slides and budget.window > 0 and budget.mass is None

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
        if not all(map(is_plain, selections)):
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

        def select(asking: Segment) -> Selection | None:
            if not method.selects:
                return None
            return selection or self._select(row, rule, asking, spans[0], self.store.row(row), tally, phase)

        if isinstance(self.store, SplitStore):
            part, chosen, visible = attend_sparse_split(self.shape, segment, self.store, row, spans[0], select, whole)
        else:
            chosen = select(segment)
            part, visible = attend_sparse(self.shape, segment, self.store.row(row), spans, chosen, whole)
        self._count(tally, segment)
        tally.sparse_queries += segment.stop - segment.start
        tally.visible_tokens = tally.visible_tokens + visible
        tally.kv_bytes_read += self._kv_bytes(sinks_stop + max(segment.stop - window_start, 0))
        tally.kv_bytes_read += 0 if chosen is None else self._listed_bytes(chosen)
        self._probe(segment, row, spans[0], chosen, tally, phase)
        return part

    def _select(
        self, row: int, rule: Rule, segment: Segment, spans: tuple[int, int], reader: RowReader, tally: Tally,
        phase: Phase,
    ) -> Selection:  # fmt: skip
        started = perf_counter()
        counted = CountedReader(reader, self.relay, (row, self.shape.layer, (phase, segment.start, segment.stop)))
        method, budget = rule.method, rule.budget
        candidates = budget.candidates(segment.start, method.unit_size)
        units = min(budget.units(segment.start, method.unit_size), candidates.count)
        always = None if budget.mass is None else past_lse(self.shape, segment, reader, spans)
        limit = Limit(units, budget.mass, always)
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

    def _listed_bytes(self, selection: Selection) -> int:
        num_heads, count = max(self.shape.num_kv_heads, selection.units.shape[0]), selection.units.shape[1]
        return self._kv_bytes(count * selection.unit_size) * num_heads // self.shape.num_kv_heads

    def _kv_bytes(self, num_tokens: int) -> int:
        per_token = 2 * self.shape.num_kv_heads * self.shape.head_dim * self.store.keys.element_size()
        return num_tokens * per_token


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
