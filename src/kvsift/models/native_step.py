"""A decode step on a CPU as one call of the compiled core, from the embedding to the logits (csrc/step.hpp), and a
verification of drafts.

``ForwardPass`` composes the same step of calls for each product, rotation and attention, and is its specification: the
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
from kvsift.models.decoder import Decoder
from kvsift.models.hf.cache import SparseCache
from kvsift.models.hf.layer import SparseLayer
from kvsift.models.hf.window import Window, is_window
from kvsift.models.projection import GatedMLP, Projection
from kvsift.native.loader import core, num_threads
from kvsift.native.packed import PACKED_INS, PackedMatrix
from kvsift.native.product import NO_NORM, numbers_of
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
        angles: first position, number of positions -> cosines and sines, each [ropes, positions, rotary_dim].
    """

    of_weights: ClassVar[Objections] = (  # to decoder steps
        (lambda step: step.dtype not in ROW_DTYPES, "its weights are {it.dtype}"),
        (lambda step: not all(each.in_core for each in step.products),
         "the core does not multiply with its weights"),
        (lambda step: len({tensor.dtype for tensor in _tensors(step)}) > 1, "its weights have several dtypes"),
        (lambda step: any(isinstance(mlp := layer.mlp, GatedMLP) and mlp.gate_up.bias is not None
                          for layer in step.layers),
         "its gates have biases"),
        (lambda step: not all(tensor.is_cpu and tensor.is_contiguous() for tensor in _tensors(step)),
         "its weights are not in one piece of host memory"),
        (lambda step: step.head_dim % 8 or step.head_dim > LARGEST_HEAD_DIM, "its heads have {it.head_dim} channels"),
        (lambda step: any(layer.output.parts for layer in step.layers) and step.head_dim % PACKED_INS,
         "its heads have {it.head_dim} channels, and packed weights take blocks of 32"),
    )  # fmt: skip
    of_caches: ClassVar[Objections] = (
        (lambda cache: not has_tokens(cache), "some layer has no token"),
        (lambda cache: len({layer.sliding_window for layer in cache.layers if not isinstance(layer, SparseLayer)}) > 1,
         "its layers have windows of different lengths"),
        (lambda cache: any(not isinstance(store := each.store, PagedStore)
                           or type(store) not in (PagedStore, HostStore) or not store.pool.on_host
                           for each in cache.attentions),
         "its keys and values are not in pages that the core reads"),
        (lambda cache: any(each.store.num_rows != 1 or each.table is not cache.run.table
                           for each in cache.attentions),
         "its layers do not share the page table of one sequence"),
        (lambda cache: any(layer.valid is not None for layer in _sparse_layers(cache)), "it has padding"),
        (lambda cache: any(each.watches for each in cache.attentions), "{it.run.plan} observes each token"),
        (lambda cache: {*cache.attentions[0].store.kinds} - {BOUNDS, *SKETCHES},
         "{it.run.plan} reads summaries of kind {found}"),
        (lambda cache: (layout := _layout(cache)) is not None and not layout.is_read_by_core and layout,
         "the core does not read rows of {found}"),
        (lambda cache: cache.run.plan.decode is not None and type(cache.run.plan.decode.method) is Sketch
         and cache.attentions[0].shape.softcap,
         "its logits are capped at {found}, which the core does not do to those of sketches"),
        (lambda cache: reason(cache.run.plan.decode, NativeStep.of_rules), "{found}"),
    )  # fmt: skip
    of_drafts: ClassVar[Objections] = (  # to their verification
        (lambda cache: not all(isinstance(layer, SparseLayer) for layer in cache.layers),
         "its layers with sliding windows are not verified by the core"),
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

    def __init__(self, step: Decoder, angles: Angles) -> None:
        self._dtype, self._angles = step.dtype, angles
        self._num_embedded, self._num_logits = step.embedding.shape[0], step.head.num_out
        self._weights = step  # whose addresses the core has
        self._sequences: WeakKeyDictionary[SparseCache, NativeSequence] = WeakKeyDictionary()
        self._refused: WeakKeyDictionary[SparseCache, Plan] = WeakKeyDictionary()  # under which it is not taken
        whole, scale = step.embedding, 1.0 if step.embedding_scale is None else step.embedding_scale
        if isinstance(whole, PackedMatrix):
            embedding = core.Matrix([whole.core], 0)
        else:
            embedding = core.Matrix(whole.data_ptr(), 0, *whole.shape)
        gelu = {layer.mlp.gelu for layer in step.layers if isinstance(layer.mlp, GatedMLP)} == {True}
        self._decoder = decoder = core.Decoder(
            self._dtype == torch.bfloat16, step.num_query_heads, step.num_kv_heads, step.head_dim, step.rotary_dim,
            step.scale, step.softcap or 0.0, embedding, scale, *numbers_of(step.norm), _matrix(step.head), gelu,
        )  # fmt: skip
        for layer in step.layers:
            of_heads = [None if weight is None else (weight, layer.head_eps, step.norm_offset)
                        for weight in (layer.q_norm, layer.k_norm)]  # fmt: skip
            norms = layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp, *of_heads
            numbers = [NO_NORM if norm is None else numbers_of(norm) for norm in norms]
            decoder.add_layer(_matrix(layer.qkv), _matrix(layer.output), *numbers, layer.rope)
            if isinstance(layer.mlp, GatedMLP):
                decoder.set_mlp(*map(_matrix, layer.mlp.products))
            else:
                gate_up, down = ([*map(_matrix, each)] for each in (layer.mlp.gate_up, layer.mlp.down))
                bias, shared = layer.mlp.bias, layer.mlp.shared
                decoder.set_experts(_matrix(layer.mlp.router), gate_up, down, *layer.mlp.routing, _address(bias))
                if shared is not None:
                    decoder.set_mlp(*map(_matrix, shared.products))

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
            if sequence is None or not sequence.is_current(cache):
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
                scales = []
                if self._weights.scales_queries:
                    scales = self._weights.query_scales(sequence.start, count).tolist()
                sequence.begin(own, *self._angles(sequence.start, count), scales)
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
        return logits if self._weights.logit_cap is None else self._weights.capped(logits)

    def _begin(self, cache: SparseCache) -> NativeSequence | None:
        """The sequence of a cache, unless there are objections to it under its plan."""
        if self._refused.get(cache) is cache.run.plan:
            return None
        if reason(cache, self.of_caches):
            if has_tokens(cache):  # else it may be taken once it has tokens
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
        self._layers, self._attentions = _sparse_layers(cache), cache.attentions
        self._places = [layer.layer for layer in self._layers]  # in the model
        self._windows = [
            (place, layer) for place, layer in enumerate(cache.layers) if not isinstance(layer, SparseLayer)
        ]
        self._window = Window([layer for _, layer in self._windows]) if self._windows else None
        self._num_layers = len(cache.layers)
        self._stores: list[PagedStore] = [each.store for each in self._attentions]  # type: ignore[misc]
        self.pools = [store.pool for store in self._stores]
        self._keys: list[tuple[int, Phase]] = [(each.shape.layer, "decode") for each in self._attentions]
        self._guarded = cache.run.plan.is_guarded
        self._sparse = _sparse(cache, dtype)
        self._sparse_places = [self._places[index] for index in ([] if self._sparse is None else self._sparse.layers)]
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

    def is_current(self, cache: SparseCache) -> bool:
        """Whether its cache is still that which this was made of."""
        if self._windows and any(cache.layers[place] is not layer for place, layer in self._windows):
            return False
        attention, store = self._layers[0].attention, self._stores[0]
        is_same = attention is self._attentions[0] and attention.store is store and store.pool is self.pools[0]
        return is_same and self.run.plan is self._plan and self._layers[0].valid is None

    def takes_next(self, count: int) -> bool:
        """Whether so many next tokens can be attended in a step without Python, for which they get their pages. What
        others want to see of a step is composed, and so are several tokens of which each selects."""
        first, store = self._attentions[0], self._stores[0]
        stats, self.start, self._view, self._probed = first.stats, store.lengths[0], None, []
        if stats.observer is not None or (count > 1 and (not self.run.exact or self._window is not None)):
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

    def begin(self, tokens: list[int], cos: Tensor, sin: Tensor, query_scales: list[float]) -> None:
        """Tell the core what it does next; the locks of the pools are held, and no pool of the step grows any more."""
        table, moves = self._stores[0].table, 0
        needed = table.pool.num_pages
        for pool in self.pools:
            if needed > pool.keys.shape[1]:
                pool.fit()
            moves += pool.moves
        has_moved = self._window is not None and self._window.make_room()
        if moves != self._moves or has_moved:
            self._point()
            self._moves = moves
        cos, sin, runs = cos.to(self._dtype).contiguous(), sin.to(self._dtype).contiguous(), table.slot_runs(0, 1)
        self._of_step = cos, sin, runs
        self.core.begin(
            tokens, self.start, cos.data_ptr(), sin.data_ptr(), query_scales, runs.data_ptr(), len(runs),
            self.pools[0].keys.shape[1], *((0, 0) if self._window is None else self._window.seen()),
        )  # fmt: skip
        if (view := self._view) is not None:
            self.core.select(
                self._sparse_places, view.sinks_stop, view.window_start,
                view.candidates.first, view.candidates.count, view.num_units, view.num_selections, view.by_sketches,
                view.rest,
            )  # fmt: skip
            self._record = None
            if self._probed:
                shape, layers = self._attentions[0].shape, self._num_layers
                self._record = (
                    torch.empty(layers, shape.num_query_heads, shape.head_dim, dtype=self._dtype),
                    torch.empty(layers, view.num_selections, view.num_units, dtype=torch.int64),
                )
                self.core.record(*map(_address, self._record))

    def _point(self) -> None:
        """Tell the core where the pools are: they stay there while their locks are held, and ``moves`` is the same."""
        self.core.clear()
        windows = {} if self._window is None else dict(zip((place for place, _ in self._windows), self._window.rooms))
        full = iter(zip(self._stores, self.pools))
        for place in range(self._num_layers):
            if place in windows:
                keys, values = windows[place]
                self.core.add_window(keys.data_ptr(), values.data_ptr(), keys.stride(0))
                continue
            store, pool = next(full)
            summaries = [pool.summaries[kind] if kind in store.kinds else None for kind in (BOUNDS, self._sketch)]
            rows = [(_address(each), 0 if each is None else each.stride(0)) for each in summaries]
            self.core.add_layer(pool.keys.data_ptr(), pool.values.data_ptr(), pool.keys.stride(0), *rows[0], *rows[1])

    def finish(self, count: int, select_s: float, estimated: Sequence[float]) -> None:
        """Record that the core has stored and attended so many tokens."""
        stats, stop = self._attentions[0].stats, self.start + count
        note_tokens(self._stores, stop)
        for layer in self._layers:
            layer.columns = stop
        if self._window is not None:
            self._window.finish()
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
            attention, place = self._attentions[index], self._places[index]
            selection = Selection(chosen[place] + candidates.first, candidates.unit_size)
            keys = attention.store.reader(0).keys_in_place()
            recall, recovery = probe(attention.shape, queries[place].unsqueeze(1), keys, spans, selection)
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


def has_tokens(cache: SparseCache) -> bool:
    """Whether each layer of a cache has tokens, in pages, as at least one layer, or in a window."""
    windows = [layer for layer in cache.layers if not isinstance(layer, SparseLayer)]
    count = len(cache.attentions)
    return count > 0 and count + len(windows) == len(cache.layers) and all(map(is_window, windows))


def _sparse_layers(cache: SparseCache) -> list[SparseLayer]:
    return [layer for layer in cache.layers if isinstance(layer, SparseLayer)]


def _tensors(step: Decoder) -> list[Tensor]:
    """All weights of a step that are not packed."""
    norms = [norm and norm[0] for layer in step.layers for norm in (
        layer.before_attention, layer.before_mlp, layer.after_attention, layer.after_mlp
    )]  # fmt: skip
    found = [
        None if isinstance(step.embedding, PackedMatrix) else step.embedding,
        step.norm[0],
        *norms,
        *(weight for layer in step.layers for weight in (layer.q_norm, layer.k_norm)),
        *(each for own in step.products for each in (own.weight, own.bias)),
    ]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def _matrix(projection: Projection) -> Any:
    if projection.parts:
        return core.Matrix([part.core for part in projection.parts], _address(projection.bias))
    weight = projection.weight
    assert isinstance(weight, Tensor)
    return core.Matrix(weight.data_ptr(), _address(projection.bias), *weight.shape)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
