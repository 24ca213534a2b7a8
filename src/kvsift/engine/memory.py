"""How much memory a run will need, before anything is loaded."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from kvsift.errors import InputError
from kvsift.models.transformers_load import ModelDirectory
from kvsift.placement.offload import DEVICE_CACHE
from kvsift.runtime.places import Place
from kvsift.runtime.plan import Plan

GIB = 1 << 30
SUMMARY_SHARE = 1 / 16  # page summaries beside the keys and values they describe, at page size 16
ROOM_SHARE = 1 / 16  # captured steps reserve pages in round numbers, and have a table of all rotary angles
RUNTIME_BYTES = GIB // 2  # torch, transformers and the interpreter
DEVICE, DENSE = Place(), Plan()


def available_bytes(device: torch.device) -> int | None:
    """Memory that can still be had on a device; None if nobody knows."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [_meminfo(), _cgroup()]
    return min((limit for limit in limits if limit is not None), default=None)


def peak_bytes(device: torch.device) -> int:
    """The most memory used so far: the process on a CPU, torch's allocations on a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:  # of this program alone: what getrusage says may be the peak of the shell or test runner that started it
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration, ValueError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def predict_bytes(
    directory: ModelDirectory, device: torch.device, dtype: torch.dtype, num_tokens: int, chunk_size: int
) -> int:
    """What a run over ``num_tokens`` will hold at its peak: weights, KV, summaries, one chunk's activations."""
    config = directory.config
    stored = getattr(config, "dtype", None)
    weights = directory.num_weight_bytes
    if not directory.is_quantised:
        weights = weights * dtype.itemsize // getattr(stored, "itemsize", dtype.itemsize)
    kv = directory.kv_bytes_per_token(dtype) * num_tokens
    width = max(getattr(config, "intermediate_size", 0) or 0, 4 * config.hidden_size)
    activations = min(chunk_size, num_tokens) * (8 * config.hidden_size + 3 * width) * dtype.itemsize
    runtime = RUNTIME_BYTES if device.type == "cpu" else 0
    room = ROOM_SHARE if device.type == "cuda" else 0.0
    return int(weights + kv * (1 + SUMMARY_SHARE) * (1 + room) + activations + runtime)


def require_memory(
    directory: ModelDirectory, device: torch.device, dtype: torch.dtype, num_tokens: int, chunk_size: int,
    place: Place = DEVICE, plan: Plan = DENSE,
) -> None:  # fmt: skip
    """Refuse a run that cannot fit; ``place`` may put all but a little of the KV in host memory, and ``plan`` may free
    most of it while it reads.

    Raises:
        InputError: with what it would take, what there is, and what would help.
    """
    apart = place.apart and device.type != "cpu"
    held = held_tokens(plan, directory.config.num_hidden_layers, num_tokens, chunk_size)
    on_device = min(num_tokens, chunk_size) if apart else held
    if apart and place.name == "offload":
        on_device += int(SUMMARY_SHARE * num_tokens) + (place.device_cache or DEVICE_CACHE)
    need, have = predict_bytes(directory, device, dtype, on_device, chunk_size), available_bytes(device)
    if apart:
        there, room = host_kv_bytes(directory, dtype, num_tokens, place), available_bytes(torch.device("cpu"))
        if room is not None and there > room:
            packed = "" if place.host_values == "int8" else f", or pack values: --placement {place}:host_values=int8"
            raise InputError(
                f"the KV of {num_tokens} tokens takes {there / GIB:.1f} GiB of host memory, and {room / GIB:.1f} GiB "
                f"can be had. Shorten the context{packed}."
            )
    if have is None or need <= have:
        return
    kv = directory.kv_bytes_per_token(dtype) * held
    raise InputError(
        f"this run needs about {need / GIB:.1f} GiB on {device} ({directory.num_weight_bytes / GIB:.1f} GiB of weights "
        f"on disk, {kv / GIB:.1f} GiB of KV for {held} tokens in {str(dtype).removeprefix('torch.')}), and "
        f"{have / GIB:.1f} GiB can be had. Shorten the context, take a smaller model"
        + (", or use --dtype bfloat16" if dtype == torch.float32 else "")
        + (", or keep KV in host memory with --placement split." if device.type == "cuda" and not apart else ".")
    )


def held_tokens(plan: Plan, num_layers: int, num_tokens: int, chunk_size: int) -> int:
    """Tokens whose KV is held at the peak, in the mean of all layers, and what a method remembers of the others."""
    rule = plan.decode
    if rule is None or not plan.evicts_prompt:
        return num_tokens
    dense = sum(layer < num_layers for layer in rule.budget.dense_layers)
    left = max(rule.budget.limit(num_tokens), rule.budget.min_context)
    # a chunk comes in as a whole, and what is left of it and of the tokens before is copied
    each = min(num_tokens, 2 * (left + chunk_size) + int(SUMMARY_SHARE * num_tokens))
    return (dense * num_tokens + (num_layers - dense) * each) // num_layers


def host_kv_bytes(directory: ModelDirectory, dtype: torch.dtype, num_tokens: int, place: Place) -> int:
    """Keys and values of so many tokens in host memory."""
    config = directory.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(directory.kv_bytes_per_token(dtype) * num_tokens * (1 + place.value_share(head_dim, dtype)) / 2)


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None


def _cgroup() -> int | None:
    root = Path("/sys/fs/cgroup")
    try:
        return int((root / "memory.max").read_text()) - int((root / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup, or "max": no limit
        return None
