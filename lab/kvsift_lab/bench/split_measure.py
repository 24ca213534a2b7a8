"""Decoding with KV in host memory: milliseconds per token by index, and overlap of host and device.

Weights, keys and values are random, so quality is not measured, and a graph built from them would have no structure.
The bench searches a random graph of the same size instead, as far as a real one is searched: the cost depends on
that alone. One graph, and one IVF index, serve all layers; both are far larger than a cache.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from kvsift import native
from kvsift.errors import InputError
from kvsift.indexes.base import Index
from kvsift.indexes.graph import GraphIndex
from kvsift.indexes.ivf import IVFIndex
from kvsift.methods.indexed_keys import IndexedSpan
from kvsift.models.decoder_prefill import DecoderPrefill
from kvsift.models.decoder_step import DecoderStep
from kvsift.models.transformers import SparseCache, make_cache
from kvsift.models.transformers_load import choose_device
from kvsift.models.transformers_random import random_model
from kvsift.plan.placement import Placement
from kvsift.plan.syntax import parse_plan
from kvsift_lab.bench import machine
from kvsift_lab.bench.bench import Bench, first_line
from kvsift_lab.bench.split import CAPTURED, SplitRecipe
from kvsift_lab.bench.split_captured import captured_text, measure_captured
from kvsift_lab.bench.split_memory import require_host_memory
from kvsift_lab.bench.timeline import timeline
from kvsift_lab.bench.timing import digits

FILLED_TOKENS = 32768  # at a time
WARM_UP_TOKENS = 2  # the first ones allocate
DEGREE = 32


def point_text(point: dict[str, Any]) -> str:
    """Render all kinds of a context, one per line."""
    lines = [f"{point['context']:,} tokens"]
    for variant in point["variants"]:
        text = variant.get("reason")
        if text is None:
            milliseconds, gib = 1e3 * median(variant["samples_s"]), variant["kv_bytes_on_device"] / (1 << 30)
            rest = captured_text(variant) if variant["name"] in CAPTURED else _overlap(variant)
            text = f"{milliseconds:8.1f} ms per token, {gib:.2f} GiB of KV on the device{rest}"
        lines.append(f"  {variant['name']:<13} {text}")
    return "\n".join(lines)


def _overlap(variant: dict[str, Any]) -> str:
    """Busy times of host and device, and hits in the device cache, where these were measured."""
    text = ""
    if "both_s" in variant:
        host, device, both = (1e3 * variant[key] for key in ("host_s", "device_s", "both_s"))
        text += f"; host {host:.1f} ms, device {device:.1f} ms, both at once {both:.2f} ms"
    if variant["device_cache_hits"] is not None:
        text += f"; {100 * variant['device_cache_hits']:.0f} % of the selected tokens were on the device"
    return text


def groups(recipe: SplitRecipe) -> Iterator[tuple[Placement, tuple[str, ...]]]:
    """Return the kinds of a recipe by placement; those of one share a cache."""
    placements = {
        "split": {"host_values": recipe.host_values},
        "offload": {"host_values": recipe.host_values},
        "device": {},
    }
    of_kind = {"offload": "offload", "dense": "device", **dict.fromkeys(CAPTURED, "captured")}
    for name, knobs in placements.items():
        if kinds := tuple(kind for kind in recipe.kinds if of_kind.get(kind, "split") == name):
            yield Placement(name, **knobs), kinds
    for kind in recipe.kinds:
        if kind in CAPTURED:
            yield Placement(CAPTURED[kind]), (kind,)


@dataclass(frozen=True)
class SplitBench(Bench):
    """Decoding of a recipe by a model."""

    recipe: SplitRecipe
    model: Any
    kind = "split"

    @classmethod
    def of(cls, recipe: SplitRecipe, dtype: torch.dtype = torch.bfloat16) -> SplitBench:
        if not native.available():
            raise InputError(native.why_missing())
        device = choose_device(recipe.device)
        for context in recipe.contexts:
            for place, kinds in groups(recipe):
                if device.type == "cpu" or place.in_host_memory:
                    require_host_memory(recipe.shape, recipe.layers, context, place, kinds, DEGREE)
        return cls(recipe, random_model(recipe.shape, device, dtype, layers=recipe.layers))

    def environment(self) -> dict[str, Any]:
        threads = {"host_threads": torch.get_num_threads(), "level": native.level()}
        return threads | machine.environment(self.model.device)

    def points(self) -> Sequence[int]:
        return sorted(self.recipe.contexts)

    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        return point_text(point)

    def measure(self, point: int) -> dict[str, Any]:
        variants: list[dict[str, Any]] = []
        for place, kinds in groups(self.recipe):
            try:
                variants += self._placed(point, place, kinds)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                variants += [{"name": kind, "reason": first_line(error)} for kind in kinds]
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        of_kind = {variant["name"]: variant for variant in variants if "tokens" in variant}
        if len(of_kind) == len(CAPTURED):
            of_kind["sketch"]["same_tokens"] = of_kind["sketch"]["tokens"] == of_kind["sketch_device"]["tokens"]
        return {"variants": variants}

    def _placed(self, context: int, place: Placement, kinds: Sequence[str]) -> list[dict[str, Any]]:
        plan = parse_plan(self.recipe.plan(kinds[0]))
        if kinds[0] in CAPTURED:
            measured = measure_captured(self.model, plan, context, place, max(2, self.recipe.tokens))
            return [{"name": kinds[0], "plan": str(plan), **measured}]
        started, step = perf_counter(), DecoderPrefill(DecoderStep(self.model))
        cache = make_cache(self.model, plan, probe_every=0, reserve=context + 256, placement=place)
        _fill(cache, self.model, step, context)
        fill_s = perf_counter() - started
        return [self._variant(step, cache, kind, fill_s) for kind in kinds]

    def _variant(self, step: DecoderPrefill, cache: SparseCache, kind: str, fill_s: float) -> dict[str, Any]:
        token, started = torch.tensor([5], device=self.model.device), perf_counter()
        cache.replan("dense")  # an unchanged plan would keep the index of the previous kind
        cache.replan(self.recipe.plan(kind))
        cache.stats.clear()
        try:
            if kind in ("graph", "ivf"):
                self._share_index(cache, kind)
            else:
                cache.prepare()
        except InputError as error:  # faiss may be missing; other kinds are measured
            return {"name": kind, "reason": first_line(error)}
        build_s = perf_counter() - started
        seconds = []
        for _ in range(WARM_UP_TOKENS + self.recipe.tokens):
            started = perf_counter()
            step(token, cache, "decode").argmax().item()
            seconds.append(perf_counter() - started)
        busy = timeline(lambda: step(token, cache, "decode").argmax().item(), self.model.device)
        phase = cache.stats.report()["phases"]["decode"]
        return {
            "name": kind, "plan": self.recipe.plan(kind), "samples_s": digits(seconds[WARM_UP_TOKENS:]),
            "fill_s": fill_s, "build_s": build_s, "kv_bytes": cache.num_bytes,
            "kv_bytes_on_device": cache.num_device_bytes, "visible_tokens": phase["visible_tokens"],
            "bytes_read": phase["kv_bytes_to_select"], "bytes_copied": phase["kv_bytes_copied"],
            "device_cache_hits": phase["device_cache_hits"], **busy,
        }  # fmt: skip

    def _share_index(self, cache: SparseCache, kind: str) -> None:
        """Replace the indexes of all layers by one."""
        attention = cache.attentions[0]
        length, rule = attention.store.lengths[0], cache.run.plan.decode
        assert rule is not None
        candidates = rule.budget.candidates(length, 1)
        keys = attention.store.reader(0).keys(candidates.first, candidates.stop)
        index: Index
        if kind == "ivf":
            index = IVFIndex.build(keys)
        else:
            beam = max(1, int(self.recipe.scanned * keys.shape[1] / DEGREE))  # each expanded key has DEGREE links
            index = GraphIndex.random(keys, degree=DEGREE, beam=beam)
        for layer in cache.attentions:
            state = layer.state("decode", 0)
            state.spans = [IndexedSpan(index.fork(), candidates.first, candidates.stop, length, "shared by all layers")]


def _fill(cache: SparseCache, model: Any, step: DecoderPrefill, context: int) -> None:
    """Append random tokens up to a context."""
    step(torch.tensor([5], device=model.device), cache, "prefill")
    for layer in cache.layers:
        store, shape = layer.attention.store, layer.attention.shape
        for start in range(1, context, FILLED_TOKENS):
            size = shape.num_kv_heads, min(FILLED_TOKENS, context - start), shape.head_dim
            store.append(0, *(torch.randn(size, device=model.device).to(model.dtype) for _ in range(2)))
        store.crop(0, context)  # drops the copy of the newest tokens that a store may keep
        layer.columns = context
