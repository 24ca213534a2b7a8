"""A decode step on a CPU as one call of the compiled core, from the embedding to the logits (csrc/step.hpp).

``FusedModel`` composes the same step of calls for each product, rotation and attention, and is its specification: the
core runs the same functions in both, so that logits, keys, summaries and selections have the same bits. What the step
does not take, by the ``objections`` below, stays composed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.layer.accounting import TokenView, count_token
from kvsift.methods.base import Phase
from kvsift.methods.quest import Quest
from kvsift.models.decoder_step import DecoderStep
from kvsift.models.hf.cache import SparseCache
from kvsift.models.projection import Projection
from kvsift.native.loader import core, num_threads
from kvsift.native.packed import BLOCK, PackedMatrix
from kvsift.native.shapes import LARGEST_HEAD_DIM, NOT_FINITE, ROW_DTYPES
from kvsift.plan.budget import Budget
from kvsift.plan.capabilities import reason
from kvsift.plan.plan import Plan, Rule
from kvsift.stores.paged import HostStore, PagedStore, note_token
from kvsift.types import Objections

BOUNDS = "minmax"  # the kind of page summary that the step maintains and ranks by
Angles = Callable[[int], tuple[Tensor, Tensor]]


class NativeStep:
    """The weights of a model as the core reads them, and its sequences.

    Args:
        step: has the weights; there are no ``of_weights`` to it.
        angles: position -> cosines and sines, each [1, head_dim].
    """

    of_weights: ClassVar[Objections] = (  # to decoder steps
        (lambda step: step.dtype not in ROW_DTYPES, "its weights are {it.dtype}"),
        (lambda step: len({tensor.dtype for tensor in _tensors(step)}) > 1, "its weights have several dtypes"),
        (lambda step: not all(each.in_core for each in _projections(step)),
         "the core does not multiply with its weights"),
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
         "its keys and values are not in pages in host memory"),
        (lambda cache: any(each.store.num_rows != 1 or each.table is not cache.run.table for each in cache.attentions),
         "its layers have not one table of one sequence"),
        (lambda cache: any(layer.valid is not None for layer in cache.layers), "it has padding"),
        (lambda cache: any(each.watches for each in cache.attentions), "{it.run.plan} observes each token"),
        (lambda cache: {*cache.attentions[0].store.kinds} - {BOUNDS}, "{it.run.plan} reads summaries of kind {found}"),
        (lambda cache: any((shape := each.shape).softcap is not None or shape.scale != shape.head_dim**-0.5
                           for each in cache.attentions),
         "its logits are scaled or capped"),
        (lambda cache: reason(cache.run.plan.decode, NativeStep.of_rules), "{found}"),
    )  # fmt: skip
    of_rules: ClassVar[Objections] = (  # of decode
        (lambda rule: not rule.method.traits.unbounded and type(rule.method) is not Quest,
         "{it.name} does not rank pages by their extremes"),
        (lambda rule: getattr(rule.method, "prefilter", 0), "prefilter={found} ranks blocks first"),
        (lambda rule: type(rule.budget) is not Budget or rule.budget.layer_budgets != "equal",
         "layers have budgets of their own"),
        (lambda rule: rule.budget.mass is not None or rule.budget.head_budgets != "equal",
         "lists of heads have different lengths"),
        (lambda rule: rule.budget.window == 0, "window=0 lets the page being filled compete"),
        (lambda rule: rule.budget.min_recovery is not None, "min_recovery= is checked by probes"),
        (lambda rule: rule.evicts, "{it.name} drops tokens for good"),
    )  # fmt: skip

    def __init__(self, step: DecoderStep, angles: Angles) -> None:
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
        """Store and attend one generated token of each sequence; logits [sequences, vocabulary]. None, and nothing is
        done: the step takes some of them not, or not now.

        Raises:
            InputError: if queries that are to rank pages are not finite.
        """
        ids, sequences = tokens.tolist(), [self._sequence(cache) for cache in caches]
        if not all(sequences) or not all(0 <= token < self._num_embedded for token in ids):
            return None  # a head may have more tokens than the embedding
        ready: list[NativeSequence] = [sequence for sequence in sequences if sequence is not None]
        logits = torch.empty(len(caches), self._num_logits, dtype=self._dtype)
        for sequence in ready:
            sequence.grow()
        pools = [pool for sequence in ready for pool in sequence.pools]
        for pool in pools:
            pool.lock.acquire()
        try:
            for sequence, token in zip(ready, ids):
                sequence.begin(token, *self._angles(sequence.start))
            select_s = core.step(self._decoder, [each.core for each in ready], num_threads(None), logits.data_ptr())
        finally:
            for pool in pools:
                pool.lock.release()
        if select_s < 0:
            raise InputError(NOT_FINITE)
        for sequence in ready:
            sequence.finish(select_s / len(ready))
        return logits

    def _sequence(self, cache: SparseCache) -> NativeSequence | None:
        """The sequence of a cache, if the step takes its next token."""
        sequence = self._sequences.get(cache)
        if sequence is None or not sequence.is_current:
            if self._refused.get(cache) is cache.run.plan:
                return None
            if reason(cache, self.of_caches):
                if cache.attentions:  # else it may be taken once it has tokens
                    self._refused[cache] = cache.run.plan
                return None
            sequence = self._sequences[cache] = NativeSequence(cache, self._dtype)
        return sequence if sequence.takes_next() else None


class NativeSequence:
    """The sequence of a cache, to which there are no objections.

    Attributes:
        run: of the cache.
        core: what the compiled core knows of it.
        pools: of its layers.
        start: position of the next token, once that has been asked for.
    """

    def __init__(self, cache: SparseCache, dtype: torch.dtype) -> None:
        self.run, self._plan, self._dtype = cache.run, cache.run.plan, dtype
        self._layers: list[Any] = list(cache.layers)
        self._attentions = cache.attentions
        self._stores: list[PagedStore] = [each.store for each in self._attentions]  # type: ignore[misc]
        self.pools = [store.pool for store in self._stores]
        self._keys: list[tuple[int, Phase]] = [(each.shape.layer, "decode") for each in self._attentions]
        self._moves = -1
        self._of_step: tuple[Tensor, ...] = ()  # whose addresses the core has
        self.core = core.DecodeSequence(self._stores[0].page_size)
        self.start = 0
        self._view: TokenView | None = None  # of the next token; None: everything

    @property
    def is_current(self) -> bool:
        """Whether the cache is still that which this was made of."""
        attention, store = self._layers[0].attention, self._stores[0]
        is_same = attention is self._attentions[0] and attention.store is store and store.pool is self.pools[0]
        return is_same and self.run.plan is self._plan and self._layers[0].valid is None

    def takes_next(self) -> bool:
        """Whether the next token can be attended without Python: what others want to see of it is composed."""
        stats, self.start, self._view = self._attentions[0].stats, self._stores[0].lengths[0], None
        if self.run.exact or stats.observer is not None:
            return False
        rule, tallies, every = self._plan.decode, stats.tallies, stats.probe_every
        if rule is None or rule.is_dense(-1, self.start, self.start + 1):  # in a layer that the plan does not name
            return True
        dense = rule.budget.dense_layers
        sparse = [index for index, key in enumerate(self._keys) if key[0] not in dense]
        if every > 0:
            for index in sparse:
                tally = tallies.get(self._keys[index])
                if tally is None or tally.sparse_queries % every == 0:
                    return False  # it is probed
        if sparse:
            self._view = _view(rule, self._attentions[0].shape, self.start, sparse)
        return True

    def grow(self) -> None:
        """Give the sequence the page of its next token."""
        store = self._stores[0]
        store.table.grow(0, self.start // store.page_size + 1, -(-store.reserve // store.page_size))

    def begin(self, token: int, cos: Tensor, sin: Tensor) -> None:
        """Tell the core what it does next; the locks of the pools are held."""
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
            token, self.start, cos.data_ptr(), sin.data_ptr(), runs.data_ptr(), len(runs), self.pools[0].keys.shape[1]
        )
        if (view := self._view) is not None:
            self.core.select(
                view.layers, view.sinks_stop, view.window_start, view.candidates.first, view.candidates.count,
                view.num_units, view.num_selections,
            )  # fmt: skip

    def _point(self) -> None:
        """Tell the core where the pools are: they stay there while their locks are held, and ``moves`` is the same."""
        self.core.clear()
        for store, pool in zip(self._stores, self.pools):
            rows = pool.summaries[BOUNDS] if BOUNDS in store.kinds else None
            strides = pool.keys.stride(0), 0 if rows is None else rows.stride(0)
            self.core.add_layer(pool.keys.data_ptr(), pool.values.data_ptr(), strides[0], _address(rows), strides[1])

    def finish(self, select_s: float) -> None:
        """Record that the core has stored and attended the token."""
        stats, stop = self._attentions[0].stats, self.start + 1
        note_token(self._stores, stop)
        for layer in self._layers:
            layer.columns = stop
        tallies = stats.tallies
        try:
            counted = [tallies[key] for key in self._keys]
        except KeyError:
            counted = [stats.tally(layer, "decode") for layer, _ in self._keys]
        count_token(counted, stop, self._stores[0].token_bytes, self._dtype.itemsize, self._view, select_s)


def _view(rule: Rule, shape: Any, start: int, layers: Sequence[int]) -> TokenView:
    """What a token at ``start`` sees in sparse layers, as ``layer.selection`` computes it."""
    room, method = rule.budget.room(start, rule.unit_size), rule.method
    assert isinstance(method, Quest)
    num_units, num_selections = min(room.units, room.candidates.count), method.num_selections(shape)
    read = room.candidates.count * shape.num_kv_heads * 2 * shape.head_dim  # numbers of summaries
    return TokenView(
        room.sinks_stop,
        room.window_start,
        room.candidates,
        num_units,
        num_selections,
        tuple(layers),
        read,
        num_selections // shape.num_kv_heads,
    )


def _head_dim(step: DecoderStep) -> int:
    return step.layers[0].qkv.num_out // (step.num_query_heads + 2 * step.num_kv_heads)


def _projections(step: DecoderStep) -> list[Projection]:
    layers = [each for layer in step.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return [*layers, step.head]


def _tensors(step: DecoderStep) -> list[Tensor]:
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
    return [tensor for tensor in found if tensor is not None]


def _matrix(projection: Projection) -> Any:
    if projection.parts:
        return core.Matrix([part.core for part in projection.parts], _address(projection.bias))
    weight = projection.weight
    assert weight is not None
    return core.Matrix(weight.data_ptr(), _address(projection.bias), *weight.shape)


def _norm(norm: tuple[Tensor, float]) -> tuple[int, float]:
    return norm[0].data_ptr(), norm[1]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
