"""A transformers cache of kvsift's layers, and a block in which every fresh cache is one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

from kvsift.errors import NothingSkipped
from kvsift.layer.accounting import RunStats, SharedStats
from kvsift.layer.sparse_attention import SparseAttention
from kvsift.methods.base import Phase
from kvsift.models.hf.layer import HybridLayer, SparseLayer
from kvsift.models.hf.run import SparseRun
from kvsift.models.hf.state_snapshot import NO_TOKENS, StateSnapshot, state_names
from kvsift.plan.capabilities import NO_PROBES, NO_ROPE, UNKNOWN_ROPE, PlanCase, check
from kvsift.plan.plan import PHASES
from kvsift.plan.syntax import PlanSpec, parse_plan
from kvsift.stores.background import new_thread
from kvsift.stores.page_table import PageTable
from kvsift.types import LayerShape

FULL = DynamicLayer, LinearAttentionAndFullAttentionLayer  # layers of transformers that keep every token


class SparseBlock:
    """A ``kvsift.sparse`` block: the plan, and the counters of all its caches.

    Args:
        run: settings of the caches; each cache gets a run of its own.

    Attributes:
        plan: rules by phase.
        stats: counters, summed over the caches.
    """

    def __init__(self, run: SparseRun) -> None:
        self.plan = run.plan
        self.stats = SharedStats(run.stats.probe_every)
        self._run = run

    def open(self) -> SparseRun:
        """Return the run of another cache."""
        run = self._run.fresh()
        run.block_stats, run.stats = self.stats, self.stats.open(run)
        return run

    def report(self) -> dict[str, Any]:
        """Return the plan and the counters, ready for JSON."""
        return {"plan": str(self.plan), **self.stats.report()}

    def check(self, strict: bool = False) -> None:
        """Warn if the model did not run under the plan, or a sparse phase skipped nothing.

        Raises:
            NothingSkipped: instead of a warning, when ``strict``.
        """
        messages = [self.plan.skipped_nothing(phase) for phase in PHASES if self._skipped_nothing(phase)]
        if not self.stats.opened:
            messages = [
                f"the model did not run under the plan {self.plan}: the block of kvsift.sparse attended no query. "
                "Call the model inside the block. A cache made outside of it keeps its own plan and its own counters."
            ]
        for message in messages:
            if strict:
                raise NothingSkipped(message)
            warnings.warn(message, stacklevel=4)

    def _skipped_nothing(self, phase: Phase) -> bool:
        rule = self.plan.rule(phase)
        return rule is not None and not rule.method.traits.unbounded and self.stats.skipped_nothing(phase)


class SparseCache(DynamicCache):
    """A transformers cache whose full attention is kvsift's; sliding layers and recurrent states stay as they are."""

    run: SparseRun

    def __init__(self, config: Any, run: SparseRun) -> None:
        super().__init__(config=config.get_text_config(decoder=True))
        self._mark = NO_TOKENS
        take_layers(self, run, config)

    @property
    def stats(self) -> RunStats:
        return self.run.stats

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for keys, values and summaries."""
        return sum(attention.store.num_bytes for attention in self.attentions)

    @property
    def num_device_bytes(self) -> int:
        """The part of ``num_bytes`` on the model's device, and copies there of tokens in host memory."""
        return sum(attention.store.num_device_bytes for attention in self.attentions)

    @property
    def rotation(self) -> int | None:
        """Rotation of the keys, where RoPE depends on the length (``models.hf.pinning``); None: the first pass sets
        it."""
        return next((layer.rotation for layer in self._own_layers), None)

    @rotation.setter
    def rotation(self, rotation: int | None) -> None:
        for layer in self._own_layers:
            layer.rotation = rotation

    @property
    def _own_layers(self) -> list[SparseLayer]:
        return [layer for layer in self.layers if isinstance(layer, SparseLayer)]

    @property
    def attentions(self) -> list[SparseAttention]:
        """The attention of kvsift's layers, in their order; those without a token have none."""
        return [layer.attention for layer in self._own_layers if layer.attention is not None]

    @property
    def table(self) -> PageTable:
        """Pages of the sequences, in all layers; made when the first layer needs them."""
        assert self.run.table is not None, "no layer has seen a token"
        return self.run.table

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.attentions[0].store.page_size

    def reserve_rows(self, lengths: Sequence[int]) -> None:
        """Reserve pages for sequences of these lengths: up to them, no pool moves."""
        for attention in self.attentions:
            attention.store.reserve_rows(lengths)

    def prepare(self) -> None:
        """Build what decode needs over the cached tokens."""
        for attention in self.attentions:
            attention.prepare()

    def prepare_after_next(self) -> None:
        """Prepare each layer with KV in host memory in the background once it has attended the next chunk, the last of
        a prompt, while the layers above attend it. Layers without a token are left to ``prepare``."""
        thread = new_thread()
        for attention in self.attentions:
            if attention.store.is_remote:
                attention.prepare_after_next(thread)

    def describe(self) -> dict[int, list[dict[str, Any]]]:
        """Return the decode method's description of its index, for every layer and sequence."""
        rows_of_layer = {attention.shape.layer: attention.describe() for attention in self.attentions}
        return {layer: rows for layer, rows in rows_of_layer.items() if any(rows)}

    def advance(self, row: int, written: int, kept: int, stale_from: int | None = None) -> None:
        """Record that captured steps have written a sequence up to ``written`` tokens, without summaries from position
        ``stale_from`` on, and keep the first ``kept`` tokens."""
        for layer in self._own_layers:
            assert layer.attention is not None
            layer.attention.store.advance(row, written, stale_from)
            layer.attention.crop(row, kept)
            layer.columns = kept

    def sealed(self, length: int) -> list[dict[Phase, Any]]:
        """What methods remember of the first ``length`` tokens of the only sequence, by layer, for ``adopt``; empty if
        that is nothing."""
        layers = [attention.sealed(length) for attention in self.attentions]
        return layers if any(layers) else []

    def adopt(
        self, shapes: Sequence[LayerShape], like: Tensor, state: StateSnapshot, stale: bool, chunk_size: int,
        sealed: Sequence[Mapping[Phase, Any]] = (),
    ) -> None:  # fmt: skip
        """Begin an empty cache of one sequence with tokens that others have prefilled; its table has their pages.

        Args:
            shapes: shapes of kvsift's layers.
            like: a tensor with the device and dtype of the keys.
            state: a snapshot of a cache with these tokens, as many as full pages have.
            stale: some of the pages lack summaries that the plan needs.
            chunk_size: tokens that were read in one pass.
            sealed: what methods keep of a cache that has prefilled the tokens under the same plan.
        """
        assert not state.length or {*state.layers} == {i for i, layer in enumerate(self.layers) if state_names(layer)}
        for shape, own in zip(shapes, sealed or [{}] * len(shapes), strict=True):
            self.layers[shape.layer].adopt(shape, like, state.length, stale, chunk_size, own)
        state.restore(self.layers)

    def take_states(self, states: Mapping[int, Any]) -> None:
        """Have these layers, which are not kvsift's, by index."""
        for index, layer in states.items():
            self.layers[index] = layer

    def begin_at_mark(self, other: SparseCache) -> None:
        """Begin an empty cache of one sequence as a copy of another one at its checkpoint, under the same plan. Its
        table shares the full pages; a page that is not full is copied."""
        length = other._mark.length
        self.table.adopt(0, other.table.runs_between(0, 0, -(-length // other.page_size)))
        own = list(zip(self._own_layers, other._own_layers, strict=True))
        for layer, source in own:
            layer.open_like(source)
        for layer, source in own:
            layer.begin_as(source, length)
        other._mark.restore(self.layers)

    def restart_stats(self) -> None:
        """Count from zero; whoever has the counters so far keeps them as they are."""
        self.run.stats = RunStats(self.stats.probe_every)
        for attention in self.attentions:
            attention.stats = self.run.stats

    @cached_property
    def has_states(self) -> bool:
        """Whether some layer keeps what belongs to one length of the sequence, such as a window (``StateSnapshot``)."""
        return any(map(state_names, self.layers))

    def snapshot(self, length: int) -> StateSnapshot | None:
        """A snapshot of the first ``length`` tokens of the only sequence; None where that has passed."""
        if length != self.get_seq_length() and self.has_states:
            return None
        return StateSnapshot.of(self.layers if self.has_states else (), length, self.attentions[0].like.device)

    @property
    def can_undo(self) -> bool:
        """Whether ``undo`` can be called: all layers are kvsift's, and have their tokens in pages."""
        return all(isinstance(layer, SparseLayer) for layer in self.layers) and not self.has_states

    def undo(self, length: int) -> None:
        """Keep the first ``length`` tokens, after a pass that was interrupted in some layer."""
        for layer in self.layers:
            layer.undo(length)

    def return_to(self, state: StateSnapshot) -> None:
        """As ``undo``, to a snapshot of the sequence; layers may keep what belongs to one length."""
        for layer in self._own_layers:
            layer.undo(state.length)
        state.restore(self.layers)

    def mark(self) -> None:
        """Set a checkpoint for ``rewind``."""
        state = self.snapshot(self.get_seq_length())
        assert state is not None
        self._mark = state
        for attention in self.attentions:
            attention.checkpoint()

    @property
    def num_marked_bytes(self) -> int:
        """Bytes of host memory that the checkpoint takes."""
        return self._mark.num_bytes

    @property
    def can_rewind(self) -> bool:
        """Whether the checkpoint can be restored: no token before it was evicted."""
        return all(attention.store.can_crop(0, self._mark.length) for attention in self.attentions)

    def rewind(self) -> None:
        """Restore the checkpoint; tokens after it are removed.

        Raises:
            InputError: if tokens before it were evicted.
        """
        for attention in self.attentions:
            attention.store.check_crop(0, self._mark.length)
        self.return_to(self._mark)

    def replan(self, plan: PlanSpec) -> None:
        """Continue with another plan over the cached tokens; counters are reset."""
        new_plan = parse_plan(plan)
        rope = self.run.rope or self.run.no_rope or UNKNOWN_ROPE
        check(PlanCase(new_plan, probe_every=self.stats.probe_every, rope=rope), NO_ROPE, NO_PROBES)
        new_plan.check_layers(self.run.peers)
        self.run.plan = new_plan
        self.run.stats.clear()
        attentions = self.attentions
        paged = [attention for attention in attentions if attention.table is not None]
        for attention in paged:
            attention.replan(new_plan)
        self.run.table = next((attention.table for attention in paged if attention.table is not None), None)
        for attention in attentions:
            if attention not in paged:  # it had pages of its own, and shares those of the others if it may
                attention.replan(new_plan, self.run.table_of(attention.store.num_rows))


def take_layers(cache: Cache, run: SparseRun, config: Any) -> None:
    """Replace the full-attention layers over text of a cache by kvsift's. The run belongs to this cache alone.

    Raises:
        InputError: for a plan that names a layer which the model lacks.
    """
    over_images = getattr(config.get_text_config(decoder=True), "cross_attention_layers", None) or ()
    run.peers = tuple(
        index
        for index, layer in enumerate(cache.layers)
        if type(layer) in (*FULL, SparseLayer, HybridLayer) and index not in over_images
    )
    run.plan.check_layers(run.peers)
    cache.run = run
    for index in run.peers:
        layer = cache.layers[index]
        if type(layer) is DynamicLayer:
            cache.layers[index] = SparseLayer(run, index)
        elif type(layer) is LinearAttentionAndFullAttentionLayer:
            cache.layers[index] = HybridLayer(run, index, layer.number_of_states)
