"""Captured decoding by sketches whose KV is in host memory or beside the model, and the bus between the two.

Keys and values are random, the same in both placements, so both must decode the same tokens; only the last chunk of the
prompt is prefilled, after decoding, to learn its time and its memory.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvsift.engine.fast_path import SPARE_TOKENS
from kvsift.engine.session import row_lengths
from kvsift.models.decoder_prefill import DecoderPrefill
from kvsift.models.decoder_step import DecoderStep
from kvsift.models.transformers import SparseCache, make_cache
from kvsift.plan.placement import Placement
from kvsift.plan.plan import Plan
from kvsift_lab.bench.decode_case import FixedSlots, decode, new_slots, weight_bytes
from kvsift_lab.bench.timing import digits, gpu_seconds, synchronize

FILLED_TOKENS = 32768  # at a time
CHUNK = 8192  # tokens of the prompt that are prefilled, as the engine does it on a GPU
GATHERED = 1 << 16  # tokens of a key each, from all over the pool
ROUNDS = 5


def measure_captured(model: Any, plan: Plan, context: int, place: Placement, steps: int) -> dict[str, Any]:
    """Return times, bytes and tokens of one placement: decoding from a full context, then the prompt's last chunk."""
    device, step = model.device, DecoderStep(model)
    on_gpu, started = device.type == "cuda", perf_counter()
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    cache = _filled(model, step, plan, context, place, context + steps + SPARE_TOKENS)
    fill_s = perf_counter() - started
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    slots = FixedSlots(cache, new_slots(step, cache, plan, 1, on_gpu), plan)
    decode(slots, context, 2)  # captures
    decoded = decode(slots, context, steps)
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


def captured_text(variant: dict[str, Any]) -> str:
    """Render what the bus carried, and the device's memory."""
    gib, mib = 1 << 30, 1 << 20
    text = f"; device memory besides weights {variant['decode_bytes'] / gib:.2f} GiB decoding"
    text += f", {variant['peak_bytes'] / gib:.2f} GiB with a chunk of {variant['chunk_tokens']:,} prompt tokens "
    text += f"({variant['chunk_s']:.2f} s)"
    if "gather_rate" in variant:
        text += (
            f"; bus {variant['bus_bytes'] / mib:.1f} MiB per token, at least {1e3 * variant['bus_floor_s']:.2f} ms "
            f"(gathers {variant['gather_rate'] / 1e9:.1f}, copies {variant['copy_rate'] / 1e9:.1f} GB/s)"
        )
    if "same_tokens" in variant:
        text += f"; {'the same' if variant['same_tokens'] else 'OTHER'} tokens as on the device"
    return text


def _filled(
    model: Any, step: DecoderStep, plan: Plan, context: int, place: Placement, reserved: int
) -> SparseCache:  # fmt: skip
    """A cache of random tokens, the first one a real one."""
    rows = row_lengths([reserved], plan.page_size or 16)
    cache = make_cache(model, plan, probe_every=0, rows=rows, placement=place)
    DecoderPrefill(step)(torch.tensor([5], device=model.device), cache, "prefill")
    generator = torch.Generator(model.device).manual_seed(0)
    for layer in cache.layers:
        store, shape = layer.attention.store, layer.attention.shape
        starts = [1, cache.page_size, *range(FILLED_TOKENS, context, FILLED_TOKENS)]
        for start, stop in zip(starts, [*starts[1:], context]):
            size = 2, shape.num_kv_heads, stop - start, shape.head_dim
            store.append(0, *torch.randn(size, generator=generator, device=model.device, dtype=model.dtype))
            store.reader(0)  # all of it has arrived
        layer.columns = context
    synchronize(model.device)
    return cache


def _prefill_chunk(cache: SparseCache, step: DecoderStep, context: int) -> float:
    """Read the last chunk again; seconds."""
    count = min(CHUNK, context // 2)
    for layer in cache.layers:
        layer.attention.crop(0, context - count)
        layer.columns = context - count
    tokens, started = torch.arange(count, device=step.embedding.device) % 100, perf_counter()
    DecoderPrefill(step)(tokens, cache, "prefill").argmax().item()
    return perf_counter() - started


def _bus(cache: SparseCache) -> dict[str, float]:
    """Bytes per second from host memory: of a plain copy, and of tokens that a kernel gathers; none without a bus."""
    store = cache.attentions[0].store
    if not store.is_remote:
        return {}
    on_host: Tensor = store.reader(0).keys()[0]  # [tokens, head_dim], contiguous
    rows = store.pools().keys.flatten(0, 2)  # [heads * slots, head_dim], read over the bus
    target = torch.empty_like(on_host, device=rows.device)
    chosen = torch.randint(len(rows), (GATHERED,), device=rows.device)
    seconds = [
        median(gpu_seconds(run) for _ in range(ROUNDS))
        for run in (lambda: target.copy_(on_host, non_blocking=True), lambda: rows.index_select(0, chosen))
    ]
    token_bytes = on_host.shape[1] * on_host.element_size()
    return {"copy_rate": len(on_host) * token_bytes / seconds[0], "gather_rate": GATHERED * token_bytes / seconds[1]}
