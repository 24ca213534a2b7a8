"""A transformers cache made of kvsift's layers, and the run that counts what they read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from kvsift.errors import NothingSkipped
from kvsift.methods.base import Phase
from kvsift.models.transformers_layer import SparseLayer
from kvsift.models.transformers_run import Run
from kvsift.runtime.beside import new_thread
from kvsift.runtime.moved import check_rope
from kvsift.runtime.plan import PHASES, Plan
from kvsift.runtime.sequence import SparseAttention
from kvsift.runtime.spec import parse_plan
from kvsift.runtime.stats import RunStats, SharedStats

PlanSpec = str | Mapping[str, Any] | Plan | None


class SparseRun(Run):
    """The run of an explicit cache, as its user sees it: the plan, the counters and their report."""

    def report(self) -> dict[str, Any]:
        """Plan and counters, ready for JSON."""
        return {"plan": str(self.plan), **self.stats.report()}


class SparseBlock:
    """A ``kvsift.sparse`` block, as its user sees it: the plan, and what all caches of the block have counted.

    Args:
        run: settings of the caches to come; each gets a run of its own.

    Attributes:
        plan: rules by phase.
        stats: counters, summed over the caches.
    """

    def __init__(self, run: SparseRun) -> None:
        self.plan = run.plan
        self.stats = SharedStats(run.stats.probe_every)
        self._run = run

    def open(self) -> SparseRun:
        """The run of another cache."""
        run = self._run.fresh()
        run.block_stats, run.stats = self.stats, self.stats.open(run)
        return run

    def report(self) -> dict[str, Any]:
        """Plan and counters, ready for JSON."""
        return {"plan": str(self.plan), **self.stats.report()}

    def check(self, strict: bool = False) -> None:
        """Warn if the model was not run under the plan, or a phase that should have been sparse read everything.

        Raises:
            NothingSkipped: instead of a warning, when ``strict``.
        """
        messages = [self.plan.skipped_nothing(phase) for phase in PHASES if self._skipped_nothing(phase)]
        if not self.stats.opened:
            messages = [
                f"the model did not run under the plan {self.plan}: the block of kvsift.sparse has seen no query. Call "
                "the model inside the block. A cache that was made outside keeps its own plan and counts for itself."
            ]
        for message in messages:
            if strict:
                raise NothingSkipped(message)
            warnings.warn(message, stacklevel=4)

    def _skipped_nothing(self, phase: Phase) -> bool:
        rule = self.plan.rule(phase)
        return rule is not None and not rule.method.unbounded and self.stats.skipped_nothing(phase)


class SparseCache(DynamicCache):
    """A transformers cache whose full-attention layers are kvsift's; sliding and linear layers stay as they are."""

    run: SparseRun

    def __init__(self, config: Any, run: SparseRun) -> None:
        super().__init__(config=config.get_text_config(decoder=True))
        self._mark: tuple[int, dict[int, Any]] = (0, {})
        take_layers(self, run, config)

    @property
    def stats(self) -> RunStats:
        return self.run.stats

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for keys, values and summaries."""
        layers = (layer.attention for layer in self.layers if isinstance(layer, SparseLayer))
        return sum(attention.store.num_bytes for attention in layers if attention is not None)

    @property
    def num_device_bytes(self) -> int:
        """Those of them that are on the device of the model, and copies there of what is in host memory."""
        layers = (layer.attention for layer in self.layers if isinstance(layer, SparseLayer))
        return sum(attention.store.num_device_bytes for attention in layers if attention is not None)

    @property
    def rotation(self) -> int | None:
        """Rotation of the keys, where RoPE depends on the length (``transformers_pinning``); None: not decided."""
        return next((layer.rotation for layer in self.layers if isinstance(layer, SparseLayer)), None)

    def pin(self, rotation: int | None) -> None:
        """Decide it before the first pass does."""
        for layer in self.layers:
            if isinstance(layer, SparseLayer):
                layer.rotation = rotation

    @property
    def attentions(self) -> list[SparseAttention]:
        """Of every layer, where all of them are kvsift's and have seen a token."""
        found = [layer.attention for layer in self.layers if isinstance(layer, SparseLayer)]
        return [attention for attention in found if attention is not None] if len(found) == len(self.layers) else []

    def prepare(self) -> None:
        """Let decode build what it needs over what is cached."""
        for layer in self.layers:
            if isinstance(layer, SparseLayer) and layer.attention is not None:
                layer.attention.prepare()

    def prepare_after_next(self) -> None:
        """Let every layer whose KV is apart from the device do that as soon as the next chunk is attended, the last of
        a prompt, while the layers above read it. Layers that have seen no token yet are left to ``prepare``."""
        thread = new_thread()
        for layer in self.layers:
            if isinstance(layer, SparseLayer) and layer.attention is not None and layer.attention.is_apart:
                layer.attention.prepare_after_next(thread)

    def describe(self) -> dict[int, list[dict[str, Any]]]:
        """What the method of decode says, for every layer and row."""
        found = {layer.layer: layer.attention.describe() for layer in self.layers if getattr(layer, "attention", None)}
        return {layer: rows for layer, rows in found.items() if any(rows)}

    def turn_to(self, row: int, stats: RunStats) -> None:
        """Feed one row of a ragged batch from now on, and count for it."""
        self.run.row, self.run.stats = row, stats
        for layer in self.layers:
            layer.turn_to(row)

    def advance(self, row: int, written: int, kept: int, stale_from: int | None = None) -> None:
        """A captured loop has written a row up to ``written`` tokens, of which the first ``kept`` count, and no
        summaries from position ``stale_from`` on."""
        for layer in self.layers:
            layer.attention.store.advance(row, written, stale_from)
            layer.attention.crop(row, kept)
            layer.columns = kept

    def clear(self, rows: Sequence[int]) -> None:
        """Forget all tokens and keep pages for rows of these lengths; what was allocated stays."""
        for layer in self.layers:
            layer.columns = 0
            layer.attention.store.clear()
            layer.attention.store.reserve_rows(rows)

    def mark(self) -> None:
        """Remember this point for ``rewind``. Sliding and linear layers, which forget, are copied; they are small."""
        others = {i: deepcopy(layer) for i, layer in enumerate(self.layers) if not isinstance(layer, SparseLayer)}
        self._mark = self.get_seq_length(), others
        for layer in self.layers:
            if isinstance(layer, SparseLayer) and layer.attention is not None:
                layer.attention.mark()

    @property
    def can_rewind(self) -> bool:
        """Whether nothing was dropped for good since the marked point that is needed to go back there."""
        sparse = (layer.attention for layer in self.layers if isinstance(layer, SparseLayer))
        return all(attention is None or attention.can_crop(0, self._mark[0]) for attention in sparse)

    def rewind(self) -> None:
        """Go back to the marked point; what was cached after it is forgotten.

        Raises:
            InputError: if something was dropped for good to make room for it.
        """
        columns, others = self._mark
        for layer in self.layers:
            if isinstance(layer, SparseLayer) and layer.attention is not None:
                layer.attention.check_crop(0, columns)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, SparseLayer):
                layer.crop(columns - layer.columns)
            else:
                self.layers[index] = deepcopy(others[index])

    def replan(self, plan: PlanSpec) -> None:
        """Go on with another plan over what is cached; counters start anew."""
        wanted = parse_plan(plan)
        check_rope(wanted, self.run.rope, self.run.no_rope)
        wanted.check_layers(self.run.peers)
        self.run.plan = wanted
        self.run.stats.clear()
        for layer in self.layers:
            if isinstance(layer, SparseLayer) and layer.attention is not None:
                layer.attention.replan(self.run.plan)


def take_layers(cache: Cache, run: SparseRun, config: Any) -> None:
    """Put kvsift's layers where the cache has stock full-attention ones over text; the run is this cache's alone.

    Raises:
        InputError: for a plan that names a layer which is not there.
    """
    over_images = getattr(config.get_text_config(decoder=True), "cross_attention_layers", None) or ()
    run.peers = tuple(
        index
        for index, layer in enumerate(cache.layers)
        if type(layer) in (DynamicLayer, SparseLayer) and index not in over_images
    )
    run.plan.check_layers(run.peers)
    cache.run = run
    cache.layers = [
        SparseLayer(run, index) if type(layer) is DynamicLayer and index in run.peers else layer
        for index, layer in enumerate(cache.layers)
    ]
