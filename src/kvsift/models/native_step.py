"""A decode step on a CPU as one call of the compiled core, from the embedding to the logits (csrc/step.hpp), and a
verification of drafts.

``FusedModel`` composes the same step of calls for each product, rotation and attention, and is its specification: the
core runs the same functions in both, so that logits, keys, summaries and selections have the same bits. What the step
does not take, by ``NativeStep.of_weights``, ``of_caches`` and ``of_rules``, stays composed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvsift.errors import NotFinite
from kvsift.kernels.sketch import SKETCHES
from kvsift.layer.accounting import Tally, TokenView
from kvsift.layer.probe import probe
from kvsift.methods.base import Phase
from kvsift.methods.quest import Quest
from kvsift.methods.sketch import Sketch
from kvsift.methods.streaming_llm import StreamingLLM
from kvsift.models.fused_step import FusedStep
from kvsift.models.hf.cache import SparseCache
from kvsift.models.projection import Projection
from kvsift.native.loader import core, num_threads
from kvsift.native.packed import BLOCK, PackedMatrix
from kvsift.native.shapes import LARGEST_HEAD_DIM, NOT_FINITE, ROW_DTYPES
from kvsift.native.sketch_format import SketchLayout, sketch_layout
from kvsift.plan.budget import Budget
from kvsift.plan.capabilities import reason
from kvsift.plan.plan import Plan, Rule
from kvsift.stores.paged import HostStore, PagedStore, note_tokens
from kvsift.threads import yield_to_others
from kvsift.types import Candidates, Objections, Selection

BOUNDS = "minmax"  # the kind of page summary by which the step ranks pages; SKETCHES are those by which it ranks tokens
Angles = Callable[[int, int], tuple[Tensor, Tensor]]


class NativeStep:
    """The weights of a model as the core reads them, and its sequences.

    Args:
        step: has the weights, against which ``of_weights`` has nothing.
        angles: first position, number of positions -> cosines and sines, each [positions, head_dim].
    """

    of_weights: ClassVar[Objections] = (  # to decoder steps
        (lambda step: step.dtype not in ROW_DTYPES, "its weights are {it.dtype}"),
        (lambda step: not all(each.in_core for each in _projections(step)),
         "the core does not multiply with its weights"),
        (lambda step: len({tensor.dtype for tensor in _tensors(step)}) > 1, "its weights have several dtypes"),
        (lambda step: any(layer.gate_up.bias is not None for layer in step.layers), "its gates have biases"),
        (lambda step: not all(tensor.is_cpu and tensor.is_contiguous() for tensor in _tensors(step)),
         "its weights are not in one piece of host memory"),
        (lambda step: ((width := _head_dim(step)) % 8 or width > LARGEST_HEAD_DIM) and width,
         "its heads have {found} channels"),
        (lambda step: any(layer.output.parts for layer in step.layers) and (width := _head_dim(step)) % BLOCK and width,
         "its heads have {found} channels, and packed weights take blocks of 32"),
    )  # fmt: skip
    of_caches: ClassVar[Objections] = (
        (lambda cache: not cache.attentions or len(cache.attentions) < len(cache.layers), "some layer has no token"),
        (lambda cache: any(type(each.store) not in (PagedStore, HostStore) or not each.store.pool.on_host
                           for each in cache.attentions),
         "its keys and values are not in pages that the core reads"),
        (lambda cache: any(each.store.num_rows != 1 or each.table is not cache.run.table for each in cache.attentions),
         "its layers do not share the page table of one sequence"),
        (lambda cache: any(layer.valid is not None for layer in cache.layers), "it has padding"),
        (lambda cache: any(each.watches for each in cache.attentions), "{it.run.plan} observes each token"),
        (lambda cache: {*cache.attentions[0].store.kinds} - {BOUNDS, *SKETCHES},
         "{it.run.plan} reads summaries of kind {found}"),
        (lambda cache: (layout := _layout(cache)) is not None and not layout.is_read_by_core and layout,
         "the core does not read rows of {found}"),
        (lambda cache: any((shape := each.shape).softcap is not None or shape.scale != shape.head_dim**-0.5
                           for each in cache.attentions),
         "its logits are scaled or capped"),
        (lambda cache: reason(cache.run.plan.decode, NativeStep.of_rules), "{found}"),
    )  # fmt: skip
    of_rules: ClassVar[Objections] = (  # of decode
        (lambda rule: not rule.traits.unbounded and type(rule.method) not in (Quest, Sketch, StreamingLLM),
         "{it.name} ranks neither pages by their extremes nor tokens by their sketches"),
        (lambda rule: rule.traits.repositions, "positions=cache numbers tokens anew"),
        (lambda rule: getattr(rule.method, "prefilter", 0), "prefilter={found} ranks blocks first"),
        (lambda rule: getattr(rule.method, "anchors", None), "layers reuse selections of others by {found}"),
        (lambda rule: type(rule.method) is Sketch and 0 < rule.budget.window < rule.method.page_size - 1,
         "window={it.budget.window} lets tokens of the page being filled compete, pages having {it.method.page_size}"),
        (lambda rule: type(rule.budget) is not Budget or rule.budget.layer_budgets != "equal",
         "layers have budgets of their own"),
        (lambda rule: rule.budget.mass is not None or rule.budget.head_budgets != "equal",
         "lists of heads have different lengths"),
        (lambda rule: rule.budget.window == 0, "window=0 lets the page being filled compete"),
        (lambda rule: rule.evicts, "{it.name} drops tokens for good"),
    )  # fmt: skip

    def __init__(self, step: FusedStep, angles: Angles) -> None:
        self._dtype, self._angles = step.dtype, angles
        self._num_embedded, self._num_logits = step.embedding.shape[0], step.head.num_out
        self._weights = step  # whose addresses the core has
        self._sequences: WeakKeyDictionary[SparseCache, NativeSequence] = WeakKeyDictionary()
        self._refused: WeakKeyDictionary[SparseCache, Plan] = WeakKeyDictionary()  # under which it is not taken
        heads, head_dim = (step.num_query_heads, step.num_kv_heads), _head_dim(step)
        whole = step.embedding
        if isinstance(whole, PackedMatrix):
            embedding = core.Matrix([whole.core], 0)
        else:
            embedding = core.Matrix(whole.data_ptr(), 0, *whole.shape)
        self._decoder = core.Decoder(
            self._dtype == torch.bfloat16, *heads, head_dim, head_dim**-0.5, embedding,
            *_norm(step.norm), _matrix(step.head),
        )  # fmt: skip
        for layer in step.layers:
            matrices = map(_matrix, (layer.qkv, layer.output, layer.gate_up, layer.down))
            self._decoder.add_layer(
                *matrices, *_norm(layer.before_attention), *_norm(layer.before_mlp), _address(layer.q_norm),
                _address(layer.k_norm), layer.head_eps,
            )  # fmt: skip

    def __call__(self, tokens: Tensor, caches: Sequence[SparseCache]) -> Tensor | None:
        """Store and attend one generated token of each sequence, or an equal number of each if they are attended to
        everything (``SparseRun.exact``); logits [tokens, vocabulary]. None, with nothing done, if the step does not
        take all of them, or not now.

        Raises:
            InputError: if queries that are to rank pages are not finite.
        """
        ids, count, ready = tokens.tolist(), len(tokens) // len(caches), list[NativeSequence]()
        if not all(0 <= token < self._num_embedded for token in ids):
            return None  # a head may have more tokens than the embedding
        for cache in caches:
            sequence = self._sequences.get(cache)
            if sequence is None or not sequence.is_current:
                sequence = self._begin(cache)
            if sequence is None or not sequence.takes_next(count):
                return None
            ready.append(sequence)
        yield_to_others(len(ids))
        logits = torch.empty(len(ids), self._num_logits, dtype=self._dtype)
        pools = [pool for sequence in ready for pool in sequence.pools]
        for pool in pools:
            pool.lock.acquire()
        try:
            for number, sequence in enumerate(ready):
                own = ids[number * count : (number + 1) * count]
                sequence.begin(own, *self._angles(sequence.start, count))
            select_s, estimated = core.step(
                self._decoder, [each.core for each in ready], num_threads(None), logits.data_ptr()
            )
        finally:
            for pool in pools:
                pool.lock.release()
        if select_s < 0:
            raise NotFinite(NOT_FINITE)
        for sequence, shares in zip(ready, estimated):
            sequence.finish(count, select_s / len(ready), shares)
        return logits

    def _begin(self, cache: SparseCache) -> NativeSequence | None:
        """The sequence of a cache, unless there are objections to it under its plan."""
        if self._refused.get(cache) is cache.run.plan:
            return None
        if reason(cache, self.of_caches):
            if cache.attentions:  # else it may be taken once it has tokens
                self._refused[cache] = cache.run.plan
            return None
        self._sequences[cache] = NativeSequence(cache, self._dtype)
        return self._sequences[cache]


class NativeSequence:
    """The sequence of a cache, to which there are no objections.

    Attributes:
        run: state of the cache.
        core: what the compiled core knows of it.
        pools: pools of its layers.
        start: position of the next token, once that has been asked for.
    """

    def __init__(self, cache: SparseCache, dtype: torch.dtype) -> None:
        self.run, self._plan, self._dtype = cache.run, cache.run.plan, dtype
        self._layers: list[Any] = list(cache.layers)
        self._attentions = cache.attentions
        self._stores: list[PagedStore] = [each.store for each in self._attentions]  # type: ignore[misc]
        self.pools = [store.pool for store in self._stores]
        self._keys: list[tuple[int, Phase]] = [(each.shape.layer, "decode") for each in self._attentions]
        self._guarded = cache.run.plan.is_guarded
        self._sparse = _sparse(cache, dtype)
        self._moves = -1
        self._of_step: tuple[Tensor, ...] = ()  # whose addresses the core has
        self.core = core.DecodeSequence(self._stores[0].page_size, self.pools[0].coded_keys)
        self._sketch = next((kind for kind in self._stores[0].kinds if kind in SKETCHES), "")
        if layout := _layout(cache):
            self.core.keep_sketches(core.SketchFormat(*layout.numbers))
        self.start = 0
        self._view: TokenView | None = None  # of the next token; None: everything
        self._probed: list[int] = []  # layers in which it is compared with exact attention, by their place
        self._record: tuple[Tensor, Tensor] | None = None  # its queries and selections in all layers, to be probed

    @property
    def is_current(self) -> bool:
        """Whether the cache is still that which this was made of."""
        attention, store = self._layers[0].attention, self._stores[0]
        is_same = attention is self._attentions[0] and attention.store is store and store.pool is self.pools[0]
        return is_same and self.run.plan is self._plan and self._layers[0].valid is None

    def takes_next(self, count: int) -> bool:
        """Whether so many next tokens can be attended in a step without Python, for which they get their pages. What
        others want to see of a step is composed, and so are several tokens of which each selects."""
        first, store = self._attentions[0], self._stores[0]
        stats, self.start, self._view, self._probed = first.stats, store.lengths[0], None, []
        if stats.observer is not None or (count > 1 and not self.run.exact):
            return False
        num_pages = -(-(self.start + count) // store.page_size)
        if num_pages > -(-self.start // store.page_size):
            store.table.grow(0, num_pages, -(-store.reserve // store.page_size))
        rule = None if self.run.exact else self._plan.decode
        if self._guarded and rule is not None:
            rule = first.guards.rule(0, self.start, rule, stats)
        if rule is not None and self._sparse is not None:
            self._view = self._view_under(rule, self._sparse)
            if self._view is not None and stats.probe_every > 0:
                self._probed = self._due(self._view.layers)
        return True

    def _view_under(self, rule: Rule, sparse: TokenView) -> TokenView | None:
        """What the next token sees in sparse layers, as ``layer.selection`` computes it; None: everything, as
        ``Rule.is_dense`` says."""
        budget, stop = rule.budget, self.start + 1
        if stop < budget.min_context:
            return None
        if not rule.traits.selects:
            if stop <= budget.limit(stop):
                return None
            sinks_stop, window_start = budget.always(self.start, rule.unit_size, fill=True)
            return sparse._replace(sinks_stop=sinks_stop, window_start=window_start)
        room = budget.room(self.start, rule.unit_size)
        candidates, num_units = room.candidates, room.units
        if num_units >= candidates.count:
            return None
        per_page = self._stores[0].page_size // candidates.unit_size
        pages = -(-(candidates.first + candidates.count) // per_page) - candidates.first // per_page
        return sparse._replace(
            sinks_stop=room.sinks_stop, window_start=room.window_start, candidates=candidates, num_units=num_units,
            bytes_read=pages * sparse.bytes_read,
        )  # fmt: skip

    def _due(self, sparse: Sequence[int]) -> list[int]:
        """The sparse layers in which the next token is probed, as ``layer.sparse_attention`` probes it."""
        first = self._attentions[0]
        tallies, every = first.stats.tallies, first.stats.probe_every
        if self._guarded:
            return list(sparse) if first.guards.of(0).due(self.start, every) else []
        counted = [tallies.get(self._keys[index]) for index in sparse]
        return [index for index, tally in zip(sparse, counted) if tally is None or tally.sparse_queries % every == 0]

    def begin(self, tokens: list[int], cos: Tensor, sin: Tensor) -> None:
        """Tell the core what it does next; the locks of the pools are held, and no pool of the step grows any more."""
        table, moves = self._stores[0].table, 0
        needed = table.pool.num_pages
        for pool in self.pools:
            if needed > pool.keys.shape[1]:
                pool.fit()
            moves += pool.moves
        if moves != self._moves:
            self._point()
            self._moves = moves
        cos, sin, runs = cos.to(self._dtype).contiguous(), sin.to(self._dtype).contiguous(), table.slot_runs(0, 1)
        self._of_step = cos, sin, runs
        self.core.begin(
            tokens, self.start, cos.data_ptr(), sin.data_ptr(), runs.data_ptr(), len(runs), self.pools[0].keys.shape[1]
        )
        if (view := self._view) is not None:
            self.core.select(
                view.layers, view.sinks_stop, view.window_start, view.candidates.first, view.candidates.count,
                view.num_units, view.num_selections, view.by_sketches, view.rest,
            )  # fmt: skip
            self._record = None
            if self._probed:
                shape, layers = self._attentions[0].shape, len(self._layers)
                self._record = (
                    torch.empty(layers, shape.num_query_heads, shape.head_dim, dtype=self._dtype),
                    torch.empty(layers, view.num_selections, view.num_units, dtype=torch.int64),
                )
                self.core.record(*map(_address, self._record))

    def _point(self) -> None:
        """Tell the core where the pools are: they stay there while their locks are held, and ``moves`` is the same."""
        self.core.clear()
        for store, pool in zip(self._stores, self.pools):
            summaries = [pool.summaries[kind] if kind in store.kinds else None for kind in (BOUNDS, self._sketch)]
            rows = [(_address(each), 0 if each is None else each.stride(0)) for each in summaries]
            self.core.add_layer(pool.keys.data_ptr(), pool.values.data_ptr(), pool.keys.stride(0), *rows[0], *rows[1])

    def finish(self, count: int, select_s: float, estimated: Sequence[float]) -> None:
        """Record that the core has stored and attended so many tokens."""
        stats, stop = self._attentions[0].stats, self.start + count
        note_tokens(self._stores, stop)
        for layer in self._layers:
            layer.columns = stop
        tallies = stats.count_step(
            self._keys, self.start, stop, self._stores[0].token_bytes, self._view, select_s, estimated
        )
        if self._probed:
            self._probe(tallies)

    def _probe(self, tallies: Sequence[Tally]) -> None:
        """Compare the token, which is counted, with exact attention."""
        started, stats, view = perf_counter(), self._attentions[0].stats, self._view
        assert self._record is not None
        assert view is not None
        queries, chosen = self._record
        spans, candidates = (view.sinks_stop, view.window_start), view.candidates
        for index in self._probed:
            attention = self._attentions[index]
            selection = Selection(chosen[index] + candidates.first, candidates.unit_size)
            keys = attention.store.reader(0).keys_in_place()
            recall, recovery = probe(attention.shape, queries[index].unsqueeze(1), keys, spans, selection)
            tallies[index].add_probe(recall, recovery)
            if self._guarded:
                attention.guards.of(0).note(self.start, attention.shape.layer, recovery)
        self._record = None
        stats.probe_s += perf_counter() - started


def _sparse(cache: SparseCache, dtype: torch.dtype) -> TokenView | None:
    """What is the same for all tokens of what they see in sparse layers, with the bytes of the summary of one page;
    None: the plan of the cache has no such layers in decode."""
    rule, shape = cache.run.plan.decode, cache.attentions[0].shape
    if rule is None or rule.traits.unbounded:
        return None
    method, none = rule.method, Candidates(0, 0, rule.unit_size)
    layers = [i for i in range(len(cache.attentions)) if i not in rule.budget.dense_layers]
    if not layers:
        return None
    if isinstance(method, StreamingLLM):
        return TokenView(0, 0, none, 0, shape.num_kv_heads, tuple(layers))
    assert isinstance(method, Quest | Sketch)
    num_selections, width, by_sketches = method.num_selections(shape), 2 * shape.head_dim * dtype.itemsize, False
    if isinstance(method, Sketch):
        width, by_sketches = sketch_layout(method.bits, shape.head_dim, method.page_size).width, True
    return TokenView(
        0, 0, none, 0, num_selections, tuple(layers), width * shape.num_kv_heads, num_selections // shape.num_kv_heads,
        by_sketches, isinstance(method, Sketch) and method.rest,
    )  # fmt: skip


def _layout(cache: SparseCache) -> SketchLayout | None:
    """The layout of the sketches that a cache maintains."""
    store = cache.attentions[0].store
    bits = next((SKETCHES[kind] for kind in store.kinds if kind in SKETCHES), None)
    return None if bits is None else sketch_layout(bits, store.shape.head_dim, store.page_size)


def _head_dim(step: FusedStep) -> int:
    return step.layers[0].qkv.num_out // (step.num_query_heads + 2 * step.num_kv_heads)


def _projections(step: FusedStep) -> list[Projection]:
    layers = [each for layer in step.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return [*layers, step.head]


def _tensors(step: FusedStep) -> list[Tensor]:
    """All weights of a step that are not packed."""
    norms = [
        tensor
        for layer in step.layers
        for tensor in (layer.before_attention[0], layer.before_mlp[0], layer.q_norm, layer.k_norm)
    ]
    found = [
        None if isinstance(step.embedding, PackedMatrix) else step.embedding,
        step.norm[0],
        *norms,
        *(each for own in _projections(step) for each in (own.weight, own.bias)),
    ]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def _matrix(projection: Projection) -> Any:
    if projection.parts:
        return core.Matrix([part.core for part in projection.parts], _address(projection.bias))
    weight = projection.weight
    assert isinstance(weight, Tensor)
    return core.Matrix(weight.data_ptr(), _address(projection.bias), *weight.shape)


def _norm(norm: tuple[Tensor, float]) -> tuple[int, float]:
    return norm[0].data_ptr(), norm[1]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
