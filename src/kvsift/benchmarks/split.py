"""Decoding with KV in host memory: milliseconds per token by index, and whether host and device work at the same time.

Weights, keys and values are random, so nothing is said about quality, and a graph built from them would know nothing.
So the walk goes over a random graph of the same size, as far as a real one scans: what it costs depends on that alone.
One graph, and one IVF index, serve all layers; both are far larger than a cache.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

from kvsift import native
from kvsift.benchmarks.split_memory import require_host_memory
from kvsift.benchmarks.timeline import timeline
from kvsift.errors import InputError, unknown
from kvsift.indexes.base import Index
from kvsift.indexes.graph import GraphIndex
from kvsift.indexes.ivf import IVFIndex
from kvsift.methods.retrieval_attention import Part
from kvsift.models.decoder_prefill import DecoderPrefill
from kvsift.models.decoder_step import DecoderStep
from kvsift.models.transformers import SparseCache, make_cache
from kvsift.models.transformers_random import SHAPES, random_model
from kvsift.placement.split import HostValues, SplitStore
from kvsift.runtime.places import APART, Place, PlaceName
from kvsift.runtime.spec import parse_plan

FILLED_TOKENS = 32768  # at a time
KINDS = ("flat", "flat_int8", "graph", "ivf", "quest", "offload", "dense")
DEGREE = 32


@dataclass(frozen=True)
class Recipe:
    """Everything a result depends on.

    Attributes:
        shape: of the model, see ``transformers_random``.
        contexts: cached tokens.
        kinds: an index of ``retrieval_attention``; "quest", whose pages the host ranks and attends; "offload", the same
            pages ranked and attended by the device, which has them brought; "dense", with KV on the device, for
            comparison.
        top: keys per query head that an index finds.
        scanned: share of the keys that the walk over the graph scores.
        tokens: timed, of each kind.
        layers: of the model; None is all that the shape has.
        host_values: see ``places.Place``.
    """

    shape: str
    contexts: tuple[int, ...]
    kinds: tuple[str, ...] = KINDS
    top: int = 100
    scanned: float = 0.02
    tokens: int = 8
    layers: int | None = None
    host_values: HostValues = "model"

    def __post_init__(self) -> None:
        Place("split", self.host_values)
        if self.layers is not None and not self.layers > 0:
            raise InputError(f"layers={self.layers} must be 1 or more.")
        if self.shape not in SHAPES:
            raise unknown("shape", self.shape, SHAPES)
        if not self.contexts:
            raise InputError("there is nothing to measure: name at least one context.")
        for kind in self.kinds:
            if kind not in KINDS:
                raise unknown("kind", kind, KINDS)
        if not 0 < self.scanned < 1:
            raise InputError(f"scanned={self.scanned} must be a share of the keys, between 0 and 1.")

    def plan(self, kind: str) -> str:
        """What is run."""
        if kind == "dense":
            return "dense"
        if kind in ("quest", "offload"):
            return "quest:budget=1024:dense_layers=none"
        index = "flat" if kind in ("graph", "ivf") else kind  # theirs takes its place
        return f"retrieval_attention:index={index}:audit=0:budget={640 + self.top}:dense_layers=none"

    def placed(self, name: PlaceName) -> tuple[str, ...]:
        """The kinds that run with their KV there."""
        where = {"offload": "offload", "dense": "device"}
        return tuple(kind for kind in self.kinds if where.get(kind, "split") == name)

    def place(self, name: PlaceName) -> Place:
        """Where that is."""
        return Place(name, self.host_values) if name in APART else Place(name)

    def check(self, device: torch.device) -> None:
        """Refuse contexts that do not fit the host, before anything is made.

        Raises:
            InputError: with what would help.
        """
        places: tuple[PlaceName, ...] = ("split", "offload", "device") if device.type == "cpu" else ("split", "offload")
        for context in self.contexts:
            for name in places:
                if kinds := self.placed(name):
                    require_host_memory(self.shape, self.layers, context, self.place(name), kinds, DEGREE)


def head(recipe: Recipe) -> dict[str, Any]:
    """What a result file begins with."""
    return {"kind": "split", "recipe": asdict(recipe), "host_threads": torch.get_num_threads(), "level": native.level()}


def run(recipe: Recipe, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Iterator[dict[str, Any]]:
    """Context by context as they are measured.

    Raises:
        InputError: if one of them does not fit the host.
    """
    recipe.check(device)
    model = random_model(recipe.shape, device, dtype, layers=recipe.layers)
    step = DecoderPrefill(DecoderStep(model))
    for context in sorted(recipe.contexts):
        variants: list[dict[str, Any]] = []
        names: tuple[PlaceName, ...] = ("split", "offload", "device")
        for name in names:
            kinds = recipe.placed(name)
            if not kinds:
                continue
            try:
                variants += _measured(recipe, model, step, context, recipe.place(name), kinds)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                variants += [_failed(kind, error) for kind in kinds]
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        yield {"context": context, "variants": variants}


def _measured(
    recipe: Recipe, model: Any, step: DecoderPrefill, context: int, place: Place, kinds: tuple[str, ...]
) -> list[dict[str, Any]]:
    started = perf_counter()
    cache = make_cache(model, parse_plan(recipe.plan(kinds[0])), probe_every=0, reserve=context + 256, placement=place)
    with torch.inference_mode():
        _fill(cache, model, step, context)
        return _variants(recipe, model, step, cache, kinds, perf_counter() - started)


def _variants(
    recipe: Recipe, model: Any, step: DecoderPrefill, cache: SparseCache, kinds: tuple[str, ...], fill_s: float
) -> list[dict[str, Any]]:
    token = torch.tensor([5], device=model.device)
    found = []
    for kind in kinds:
        started = perf_counter()
        cache.replan("dense")  # an unchanged plan would keep the index of the kind before
        cache.replan(recipe.plan(kind))
        cache.stats.clear()
        try:
            if kind in ("graph", "ivf"):
                _share_index(recipe, cache, kind)
            else:
                cache.prepare()
        except InputError as error:  # faiss is not installed, say; the others go on
            found.append(_failed(kind, error))
            continue
        build_s = perf_counter() - started
        seconds = []
        for number in range(recipe.tokens + 2):  # the first ones allocate
            started = perf_counter()
            step(token, cache, "decode").argmax().item()
            if number >= 2:
                seconds.append(float(f"{perf_counter() - started:.5g}"))
        busy = timeline(lambda: step(token, cache, "decode").argmax().item(), model.device)
        phase = cache.stats.report()["phases"]["decode"]
        found.append({
            "name": kind, "plan": recipe.plan(kind), "samples_s": seconds, "fill_s": fill_s, "build_s": build_s,
            "kv_bytes": cache.num_bytes, "kv_bytes_on_device": cache.num_device_bytes,
            "visible_tokens": phase["visible_tokens"], "bytes_read": phase["kv_bytes_to_select"],
            "bytes_copied": phase["kv_bytes_copied"], "device_cache_hits": phase["device_cache_hits"], **busy,
        })  # fmt: skip
    return found


def _failed(kind: str, error: Exception) -> dict[str, Any]:
    return {"name": kind, "reason": str(error).splitlines()[0][:200]}


def _fill(cache: SparseCache, model: Any, step: DecoderPrefill, context: int) -> None:
    """Random tokens, until there are so many."""
    step(torch.tensor([5], device=model.device), cache, "prefill")
    for layer in cache.layers:
        store, shape = layer.attention.store, layer.attention.shape
        for start in range(1, context, FILLED_TOKENS):
            size = shape.num_kv_heads, min(FILLED_TOKENS, context - start), shape.head_dim
            store.append(0, *(torch.randn(size, device=model.device).to(model.dtype) for _ in range(2)))
        if isinstance(store, SplitStore):
            store.forget_fresh()
        layer.columns = context


def _share_index(recipe: Recipe, cache: SparseCache, kind: str) -> None:
    """One index for all layers, in place of theirs."""
    attention = cache.attentions[0]
    length, rule = attention.store.lengths[0], cache.run.plan.decode
    assert rule is not None
    candidates = rule.budget.candidates(length, 1)
    keys = attention.store.row(0).keys(candidates.first, candidates.stop)
    index: Index
    if kind == "ivf":
        index = IVFIndex.build(keys)
    else:
        beam = max(1, int(recipe.scanned * keys.shape[1] / DEGREE))  # a key that is expanded has so many links
        index = GraphIndex.random(keys, degree=DEGREE, beam=beam)
    for each in cache.attentions:
        state = each._states["decode"][0]
        state.parts = [Part(index.fork(), candidates.first, candidates.stop, length, "shared by all layers")]
