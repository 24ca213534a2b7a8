"""Decoding with KV in host memory: milliseconds per token by index, and whether host and device work at the same time.

Weights, keys and values are random, so nothing is said about quality, and a graph built from them would know nothing.
So the walk goes over a random graph of the same size, as far as a real one scans: what it costs depends on that alone.
One graph, and one IVF index, serve all layers; both are far larger than a cache.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

from kvsift import native
from kvsift.errors import InputError, unknown
from kvsift.indexes.base import Index
from kvsift.indexes.graph import GraphIndex
from kvsift.indexes.ivf import IVFIndex
from kvsift.methods.retrieval_attention import Part
from kvsift.models.decoder_prefill import DecoderPrefill
from kvsift.models.decoder_step import DecoderStep
from kvsift.models.transformers import SparseCache, make_cache
from kvsift.models.transformers_random import random_model
from kvsift.placement.split import SplitStore
from kvsift.runtime.sequence import Placement
from kvsift.runtime.spec import parse_plan

FILLED_TOKENS = 32768  # at a time
KINDS = ("flat", "flat_int8", "graph", "ivf", "quest", "dense")
DEGREE = 32


@dataclass(frozen=True)
class Recipe:
    """Everything a result depends on.

    Attributes:
        shape: of the model, see ``transformers_random``.
        contexts: cached tokens.
        kinds: an index of ``retrieval_attention``; "quest", whose pages the host ranks and attends; "dense", with KV on
            the device, for comparison.
        top: keys per query head that an index finds.
        scanned: share of the keys that the walk over the graph scores.
        tokens: timed, of each kind.
    """

    shape: str
    contexts: tuple[int, ...]
    kinds: tuple[str, ...] = KINDS
    top: int = 100
    scanned: float = 0.02
    tokens: int = 8

    def __post_init__(self) -> None:
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
        if kind == "quest":
            return "quest:budget=1024:dense_layers=none"
        index = "flat" if kind in ("graph", "ivf") else kind
        return f"retrieval_attention:index={index}:budget={640 + self.top}:dense_layers=none"


def head(recipe: Recipe) -> dict[str, Any]:
    """What a result file begins with."""
    return {"kind": "split", "recipe": asdict(recipe), "host_threads": torch.get_num_threads(), "level": native.level()}


def run(recipe: Recipe, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Iterator[dict[str, Any]]:
    """Context by context as they are measured."""
    model = random_model(recipe.shape, device, dtype)
    step = DecoderPrefill(DecoderStep(model))
    for context in sorted(recipe.contexts):
        variants: list[dict[str, Any]] = []
        kinds = [kind for kind in recipe.kinds if kind != "dense"]
        for placement, here in (("split", kinds), ("device", [kind for kind in recipe.kinds if kind == "dense"])):
            if not here:
                continue
            try:
                variants += _measured(recipe, model, step, context, placement, here)  # type: ignore[arg-type]
            except (torch.OutOfMemoryError, RuntimeError) as error:
                variants += [{"name": kind, "reason": str(error).splitlines()[0][:200]} for kind in here]
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        yield {"context": context, "variants": variants}


def _measured(
    recipe: Recipe, model: Any, step: DecoderPrefill, context: int, placement: Placement, kinds: list[str]
) -> list[dict[str, Any]]:
    started = perf_counter()
    cache = make_cache(
        model, parse_plan(recipe.plan(kinds[0])), probe_every=0, reserve=context + 256, placement=placement
    )
    with torch.inference_mode():
        _fill(cache, model, step, context)
        return _variants(recipe, model, step, cache, kinds, perf_counter() - started)


def _variants(
    recipe: Recipe, model: Any, step: DecoderPrefill, cache: SparseCache, kinds: list[str], fill_s: float
) -> list[dict[str, Any]]:
    token = torch.tensor([5], device=model.device)
    found = []
    for kind in kinds:
        started = perf_counter()
        cache.replan(recipe.plan(kind))
        if kind in ("graph", "ivf"):
            _share_index(recipe, cache, kind)
        else:
            cache.prepare()
        build_s = perf_counter() - started
        seconds = []
        for number in range(recipe.tokens + 2):  # the first ones allocate
            started = perf_counter()
            step(token, cache, "decode").argmax().item()
            if number >= 2:
                seconds.append(float(f"{perf_counter() - started:.5g}"))
        timeline = _timeline(lambda: step(token, cache, "decode").argmax().item(), model.device)
        stores = [attention.store for attention in cache.attentions]
        apart = [store.num_device_bytes for store in stores if isinstance(store, SplitStore)]
        phase = cache.stats.report()["phases"]["decode"]
        found.append({
            "name": kind, "plan": recipe.plan(kind), "samples_s": seconds, "fill_s": fill_s, "build_s": build_s,
            "kv_bytes": cache.num_bytes, "kv_bytes_on_device": sum(apart) if apart else cache.num_bytes,
            "visible_tokens": phase["visible_tokens"], "bytes_read": phase["kv_bytes_to_select"], **timeline,
        })  # fmt: skip
    return found


def _fill(cache: SparseCache, model: Any, step: DecoderPrefill, context: int) -> None:
    """Random tokens, until there are so many."""
    step(torch.tensor([5], device=model.device), cache, "prefill")
    for layer in cache.layers:
        store, shape = layer.attention.store, layer.attention.shape
        for start in range(1, context, FILLED_TOKENS):
            size = shape.num_kv_heads, min(FILLED_TOKENS, context - start), shape.head_dim
            store.append(0, *(torch.randn(size, device=model.device).to(model.dtype) for _ in range(2)))
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


def _timeline(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Of one token: seconds of device kernels, of host attention, and of both at the same time."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
    host, kernels = [], []
    for event in recorded.events():
        span = (event.time_range.start, event.time_range.end)
        if event.name == "kvsift host attention" and event.device_type == torch.autograd.DeviceType.CPU:
            host.append(span)
        elif event.device_type == torch.autograd.DeviceType.CUDA and "kvsift" not in event.name:
            kernels.append(span)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in host for b in kernels)
    begun = min((span[0] for span in host + kernels), default=0.0)
    first = sorted([("host", *span) for span in host[:3]] + [("device", *span) for span in kernels], key=lambda s: s[1])
    until = max((span[1] for span in host[:3]), default=0.0)
    return {
        "host_s": sum(b - a for a, b in host) / 1e6,
        "device_s": sum(b - a for a, b in kernels) / 1e6,
        "both_s": both / 1e6,
        "timeline_us": [[who, round(a - begun, 1), round(b - begun, 1)] for who, a, b in first if a <= until][:80],
    }
