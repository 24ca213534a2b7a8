"""Decoding with KV in host memory: milliseconds per token by index, overlap of host and device, and captured steps.

Weights, keys and values are random, so quality is not measured, and a graph built from them would have no structure.
The bench searches a random graph of the same size instead, as far as a real one is searched: the cost depends on
that alone. One graph, and one IVF index, serve all layers; both are far larger than a cache. Captured steps by sketches
decode over the same random numbers in host memory and beside the model, so both must decode the same tokens.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvsift import native
from kvsift.engine.memory import GIB, RUNTIME_BYTES, available_bytes
from kvsift.errors import InputError, MissingPackage, NotEnoughMemory
from kvsift.indexes.base import Index
from kvsift.indexes.faiss_index import IVFIndex
from kvsift.indexes.graph import GraphIndex
from kvsift.indexes.graph_build import NUM_ENTRIES
from kvsift.methods.common.indexed_keys import IndexedSpan
from kvsift.models.forward_pass import ForwardPass
from kvsift.models.fused_step import FusedStep
from kvsift.models.hf.model_directory import choose_device
from kvsift.models.hf.sparse import SparseCache, make_cache
from kvsift.plan.placement import Placement
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import parse_plan
from kvsift.stores.kv_pool import KVPool
from kvsift.stores.page_table import PageTable
from kvsift.stores.split import SplitStore
from kvsift.stores.transfers import mapped
from kvsift_lab.bench import machine
from kvsift_lab.bench.bench import Bench, first_line
from kvsift_lab.bench.decode_case import SPARE_PAGES, DecodeCase, decode, reserved, weight_bytes
from kvsift_lab.bench.random_models import SHAPES, random_model
from kvsift_lab.bench.split import CAPTURED, SplitRecipe, point_text
from kvsift_lab.bench.timeline import timeline
from kvsift_lab.bench.timing import gpu_seconds, synchronize
from kvsift_lab.numbers import digits

DTYPE = torch.bfloat16
FILLED_TOKENS = 32768  # at a time
WARM_UP_TOKENS = 2  # the first ones allocate
DEGREE = 32
FAISS_COPIES = 2  # of one layer's keys in float32, while an IVF index is built
CHUNK = 8192  # tokens of the prompt that are prefilled, as the engine does it on a GPU
GATHERED = 1 << 16  # tokens of a key each, from all over the pool
ROUNDS = 5


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
    def of(cls, recipe: SplitRecipe, dtype: torch.dtype = DTYPE) -> SplitBench:
        if not native.available():
            raise MissingPackage(native.why_missing())
        device = choose_device(recipe.device)
        for context in recipe.contexts:
            for place, kinds in groups(recipe):
                if device.type == "cpu" or place.in_host_memory:
                    require_host_memory(recipe.shape, recipe.layers, context, place, kinds)
        return cls(recipe, random_model(recipe.shape, device, dtype, layers=recipe.layers))

    def environment(self) -> dict[str, Any]:
        threads = {"host_threads": torch.get_num_threads(), "level": native.level()}
        return threads | machine.environment(self.model.device)

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
        started, step = perf_counter(), ForwardPass(FusedStep(self.model))
        cache = make_cache(self.model, plan, probe_every=0, reserve=context + 256, placement=place)
        fill(cache, self.model, context)
        fill_s = perf_counter() - started
        return [self._variant(step, cache, kind, fill_s) for kind in kinds]

    def _variant(self, step: ForwardPass, cache: SparseCache, kind: str, fill_s: float) -> dict[str, Any]:
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
            step.decode(token, [cache]).argmax().item()
            seconds.append(perf_counter() - started)
        busy = timeline(lambda: step.decode(token, [cache]).argmax().item(), self.model.device)
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
            index = random_graph(keys, beam)
        for layer in cache.attentions:
            state = layer.state("decode", 0)
            state.spans = [IndexedSpan(index.fork(), candidates.first, candidates.stop, length, "shared by all layers")]


def random_graph(keys: Tensor, beam: int) -> GraphIndex:
    """Return a graph of random links, to time a walk; its recall is low."""
    generator, n = torch.Generator().manual_seed(0), keys.shape[1]
    neighbours = torch.randint(0, n, (len(keys), n, DEGREE), generator=generator, dtype=torch.int32)
    entries = torch.randint(0, n, (len(keys), NUM_ENTRIES), generator=generator, dtype=torch.int32)
    seconds = {"knn_seconds": 0.0, "build_seconds": 0.0}
    return GraphIndex(neighbours, entries, [0] * len(keys), [beam] * len(keys), seconds)


def fill(cache: SparseCache, model: Any, context: int) -> None:
    """Append random tokens up to a context, behind a real one: the same under every placement."""
    ForwardPass(FusedStep(model)).prefill(torch.tensor([5], device=model.device), cache, "prefill")
    generator = torch.Generator(model.device).manual_seed(0)
    firsts = 1, cache.page_size, *range(FILLED_TOKENS, context, FILLED_TOKENS)
    starts = [start for start in firsts if start < context]
    for layer in cache.layers:
        store, shape = layer.attention.store, layer.attention.shape
        for start, stop in zip(starts, [*starts[1:], context]):
            size = 2, shape.num_kv_heads, stop - start, shape.head_dim
            store.append(0, *torch.randn(size, generator=generator, device=model.device, dtype=model.dtype))
            store.reader(0)  # all of it has arrived
        store.crop(0, context)  # drops the copy of the newest tokens that a store may keep
        layer.columns = context
    synchronize(model.device)


def measure_captured(model: Any, plan: Plan, context: int, place: Placement, steps: int) -> dict[str, Any]:
    """Return times, bytes and tokens of one placement: decoding from a full context, then the prompt's last chunk."""
    device, step = model.device, FusedStep(model)
    on_gpu, started = device.type == "cuda", perf_counter()
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    rows, kv = [reserved(context + steps, plan)], KVPool()
    spare = kv.pages.allocate(SPARE_PAGES)
    cache = make_cache(model, plan, probe_every=0, rows=rows, placement=place)
    cache.run.kv, cache.run.table = kv, PageTable(1, kv)
    fill(cache, model, context)
    kv.pages.release(spare)
    fill_s = perf_counter() - started
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    case = DecodeCase.of(model, step, [cache], plan, on_gpu)
    decode(case, context, 2)  # captures
    decoded = decode(case, context, steps)
    peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0
    report = decoded.tallies[0].report()
    bus_bytes, bus = report["kv_bytes_copied"] / steps, _bus(cache)
    read_bytes = weight_bytes(model) + report["kv_bytes_to_select"] / steps
    chunk_s = _prefill_chunk(cache, step, context)
    return {
        "samples_s": digits(decoded.itl_s), "fill_s": fill_s, "tokens": decoded.tokens[0], "host_s": 0.0,
        "kv_bytes": cache.num_bytes, "kv_bytes_on_device": cache.num_device_bytes, "device_cache_hits": None,
        "visible_tokens": report["visible_tokens"], "device_bytes": read_bytes, "bus_bytes": bus_bytes, **bus,
        "bus_floor_s": bus_bytes / bus["gather_rate"] if bus else 0.0, "decode_bytes": peak,
        "chunk_tokens": min(CHUNK, context // 2), "chunk_s": chunk_s,
        "peak_bytes": max(peak, torch.cuda.max_memory_allocated(device) - before) if on_gpu else 0,
    }  # fmt: skip


def _prefill_chunk(cache: SparseCache, step: FusedStep, context: int) -> float:
    """Read the last chunk again; seconds."""
    count = min(CHUNK, context // 2)
    for layer in cache.layers:
        layer.attention.crop(0, context - count)
        layer.columns = context - count
    tokens, started = torch.arange(count, device=step.device) % 100, perf_counter()
    ForwardPass(step).prefill(tokens, cache, "prefill").argmax().item()
    return perf_counter() - started


def _bus(cache: SparseCache) -> dict[str, float]:
    """Bytes per second from host memory: of a plain copy, and of tokens that a kernel gathers; none without a bus."""
    store = cache.attentions[0].store
    if not store.is_remote:
        return {}
    assert isinstance(store, SplitStore)
    pool = store.pool.stored[0]  # keys, or keys and values
    on_host = pool[0].flatten(0, 1)[: store.lengths[0]]  # [tokens, width], contiguous
    rows = mapped(pool, store.device).flatten(0, 2)  # [heads * slots, width], read over the bus
    target = torch.empty_like(on_host, device=rows.device)
    chosen = torch.randint(len(rows), (GATHERED,), device=rows.device)
    seconds = [
        median(gpu_seconds(run) for _ in range(ROUNDS))
        for run in (lambda: target.copy_(on_host, non_blocking=True), lambda: rows.index_select(0, chosen))
    ]
    token_bytes = on_host.shape[1] * on_host.element_size()
    return {"copy_rate": len(on_host) * token_bytes / seconds[0], "gather_rate": GATHERED * token_bytes / seconds[1]}


def layer_bytes(sizes: dict[str, Any], context: int, place: Placement, kinds: tuple[str, ...]) -> float:
    """Return the bytes of one layer in host memory: keys, values, and the largest index of a kind."""
    head_dim, num_tokens = _head_dim(sizes), context * sizes["num_key_value_heads"]
    keys = num_tokens * head_dim * DTYPE.itemsize
    index = {"flat_int8": 0.5 * keys, "quest": keys / 8}  # codes of a byte; summaries
    kv: float = 2 * keys
    if place.in_host_memory:
        kv = num_tokens * place.store.bytes_per_token(head_dim, DTYPE, **dict(place.knobs))
    return kv + max((index.get(kind, 0.0) for kind in kinds), default=0.0)


def shared_bytes(sizes: dict[str, Any], context: int, kinds: tuple[str, ...]) -> float:
    """Return the bytes of an index shared by all layers."""
    keys = context * sizes["num_key_value_heads"]
    graph, ivf = 4 * DEGREE * keys, 4 * FAISS_COPIES * keys * _head_dim(sizes)
    return max(graph if "graph" in kinds else 0, ivf if "ivf" in kinds else 0)


def require_host_memory(
    shape: str, layers: int | None, context: int, place: Placement, kinds: tuple[str, ...], available: int | None = None
) -> None:
    """Refuse a context whose KV does not fit host memory.

    Raises:
        InputError: with the need, the available memory, and how many layers would fit.
    """
    sizes = SHAPES[shape]
    room = available_bytes(torch.device("cpu")) if available is None else available
    num_layers = sizes["num_hidden_layers"] if layers is None else layers
    of_layer, shared = layer_bytes(sizes, context, place, kinds), shared_bytes(sizes, context, kinds)
    need = RUNTIME_BYTES + shared + num_layers * of_layer
    if room is None or need <= room:
        return
    fitting = int((room - RUNTIME_BYTES - shared) // of_layer)
    packed = "" if place.knob("host_values") == "int8" else "--host-values int8, "
    fewer = f"--layers {fitting}, " if fitting > 0 else ""
    raise NotEnoughMemory(
        f"{context:,} tokens of {shape} with {num_layers} layers take about {need / GIB:.1f} GiB of host memory, and "
        f"{room / GIB:.1f} GiB are available. Take {fewer}{packed}or a shorter context."
    )


def _head_dim(sizes: dict[str, Any]) -> int:
    return int(sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"])
