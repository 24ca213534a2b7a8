"""Prediction of the memory of a run, before anything is loaded."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from kvsift.errors import NotEnoughMemory
from kvsift.models.hf.model_directory import ModelDirectory
from kvsift.models.hf.slot_states import KEPT_STEPS
from kvsift.plan.placement import Placement
from kvsift.plan.plan import Plan
from kvsift.stores.reader import DECODED_TOKENS

GIB = 1 << 30
ROOM_SHARE = 1 / 16  # captured steps reserve pages in round numbers, and a table of all rotary angles
RUNTIME_BYTES = GIB // 2  # torch, transformers and the interpreter
DEVICE, DENSE = Placement(), Plan()
CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [_meminfo(), _cgroup()]
    return min((limit for limit in limits if limit is not None), default=None)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of the process on a CPU, of torch's allocations on a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:  # of this process alone: getrusage may include the process that started it
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration, ValueError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def predict_bytes(
    directory: ModelDirectory, device: torch.device, dtype: torch.dtype, num_tokens: int, chunk_size: int,
    place: Placement = DEVICE, plan: Plan = DENSE, num_seqs: int = 1, captured: bool = False,
) -> int:  # fmt: skip
    """Return the peak memory: of weights, KV, summaries, states of layers without pages, activations of one chunk.

    Args:
        num_tokens: those of all sequences, which are about as long as each other and are prefilled in turn.
        captured: whether the sequences decode in the slots of captured steps.
    """
    config = directory.config
    weights, kv = directory.weight_bytes(device, dtype), kv_bytes(directory, dtype, num_tokens, place)
    longest = -(-num_tokens // num_seqs)
    states = unpaged_bytes(directory, dtype, longest, num_seqs, captured, _num_snapshots(device, longest, chunk_size))
    width = max(directory.mlp_width, 4 * config.hidden_size)
    activations = min(chunk_size, num_tokens) * (8 * config.hidden_size + 3 * width) * dtype.itemsize
    if place.kv_dtype == "int8" and device.type != "cpu":  # as attention of a prompt reads them
        width = max((layer.num_kv_heads * layer.head_dim for layer in directory.full_layers), default=0)
        decoded = longest if plan.prefill is not None else min(longest, DECODED_TOKENS)  # all of a sparse segment
        activations += decoded * width * 2 * dtype.itemsize
    runtime = RUNTIME_BYTES if device.type == "cpu" else 0
    room = ROOM_SHARE if device.type == "cuda" else 0.0
    return int(weights + kv * (1 + summary_share(place)) * (1 + room) + states + activations + runtime)


def unpaged_bytes(
    directory: ModelDirectory, dtype: torch.dtype, length: int, num_seqs: int = 1, captured: bool = False,
    num_snapshots: int = 0,
) -> int:  # fmt: skip
    """Return the size of what layers without pages keep of sequences of ``length`` tokens: in the cache of each, in the
    slots of captured steps, whose number is a power of two, and in so many snapshots of each."""
    windows, linear = directory.window_bytes(dtype, length), directory.linear_state_bytes(dtype)
    slots = 1 << (num_seqs - 1).bit_length() if captured else 0
    copies = num_seqs * (1 + num_snapshots)
    return (windows + linear) * copies + slots * (windows + linear * (1 + KEPT_STEPS))


def _num_snapshots(device: torch.device, length: int, chunk_size: int) -> int:
    """Snapshots of a prompt in the memory of the device: by ``PrefixTree.thin`` about one for each doubling."""
    return (length // chunk_size).bit_length() if device.type == "cpu" else 0


def require_memory(
    directory: ModelDirectory, device: torch.device, dtype: torch.dtype, num_tokens: int, chunk_size: int,
    place: Placement = DEVICE, plan: Plan = DENSE, captured: bool = False,
) -> None:  # fmt: skip
    """Refuse a sequence that does not fit; ``place`` may put most of its KV in host memory, and ``plan`` may evict most
    of it during prefill. Arguments as for ``predict_bytes``.

    Raises:
        InputError: with the memory needed, the memory free, and what would help.
    """
    on_host = place.in_host_memory and device.type != "cpu"
    num_stored = stored_tokens(plan, len(directory.full_layers), num_tokens, chunk_size)
    on_device = min(num_tokens, chunk_size) if on_host else num_stored
    if on_host:
        on_device += place.store.device_tokens(num_tokens, summary_share(place), **dict(place.knobs))
    there = DEVICE if on_host else place
    need = predict_bytes(directory, device, dtype, on_device, chunk_size, there, plan, captured=captured)
    free = available_bytes(device)
    if on_host:
        require_host_memory(directory, dtype, num_tokens, place)
    if free is None or need <= free:
        return
    kv = kv_bytes(directory, dtype, num_stored, there)
    snapshots = _num_snapshots(device, num_tokens, chunk_size)
    kv += unpaged_bytes(directory, dtype, num_tokens, captured=captured, num_snapshots=snapshots)
    kv_dtype = str(dtype).removeprefix("torch.") if place.kv_dtype == "auto" else place.kv_dtype
    weights, where = directory.num_weight_bytes, "on disk"
    if directory.gguf is not None:
        weights, where = directory.weight_bytes(device, dtype), "in memory"
    remedies = ["Shorten the context", "take a smaller model"]
    if dtype == torch.float32:
        remedies.append("use --dtype bfloat16")
    if place.kv_dtype == "auto" and not on_host:
        remedies.append("keep KV in 8 bits with --kv-dtype int8")
    if device.type == "cuda" and not on_host:
        remedies.append("keep KV in host memory with --placement split")
    raise NotEnoughMemory(
        f"this run needs about {need / GIB:.1f} GiB on {device} ({weights / GIB:.1f} GiB of weights "
        f"{where}, {kv / GIB:.1f} GiB of KV for {num_stored:,} tokens in {kv_dtype}), and "
        f"{free / GIB:.1f} GiB is free. {', '.join(remedies[:-1])}, or {remedies[-1]}."
    )


def require_host_memory(directory: ModelDirectory, dtype: torch.dtype, num_tokens: int, place: Placement) -> None:
    """Refuse keys and values that do not fit in host memory (``InputError``)."""
    need, free = kv_bytes(directory, dtype, num_tokens, place), available_bytes(torch.device("cpu"))
    if free is not None and need > free:
        is_packed = place.knob("host_values") == "int8"
        packed = "" if is_packed else f", or pack values: --placement {place}:host_values=int8"
        raise NotEnoughMemory(
            f"the KV of {num_tokens:,} tokens takes {need / GIB:.1f} GiB of host memory, and {free / GIB:.1f} GiB is "
            f"free. Shorten the context{packed}."
        )


def stored_tokens(plan: Plan, num_layers: int, num_tokens: int, chunk_size: int) -> int:
    """Return the mean number of stored tokens per layer with full attention, of which there are ``num_layers``, at the
    peak, including the method's state of other tokens."""
    rule = plan.decode
    if rule is None or not plan.evicts_prompt or not num_layers:
        return num_tokens
    dense = sum(layer < num_layers for layer in rule.budget.dense_layers)
    kept = max(rule.budget.limit(num_tokens), rule.budget.min_context)
    # a whole chunk is stored before eviction, which copies the tokens that are kept
    sparse_tokens = min(num_tokens, 2 * (kept + chunk_size) + int(summary_share(DEVICE) * num_tokens))
    return (dense * num_tokens + (num_layers - dense) * sparse_tokens) // num_layers


def summary_share(place: Placement) -> float:
    """Return the size of page summaries over that of the keys and values they describe: of the default plan, whose
    sketches take 20 bytes beside 256 at head_dim 64 and page size 16. Quest's bounds take a sixteenth."""
    return 0.15 if place.kv_dtype == "int8" else 0.08


def kv_bytes(directory: ModelDirectory, dtype: torch.dtype, num_tokens: int, place: Placement) -> int:
    """Return the size of keys and values of ``num_tokens`` in the layers that keep every token, where they are kept."""
    knobs = dict(place.knobs)
    sizes = (
        layer.num_kv_heads * place.store.bytes_per_token(layer.head_dim, dtype, **knobs)
        for layer in directory.full_layers
    )
    return int(sum(sizes) * num_tokens)


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None


def _cgroup(root: Path = CGROUP) -> int | None:
    try:
        most, used = (int((root / f"memory.{name}").read_text()) for name in ("max", "current"))
        rows = (line.split() for line in (root / "memory.stat").read_text().splitlines())
        return most - used + int(dict(rows).get("inactive_file", 0))  # pages of files go when memory is needed
    except (OSError, ValueError):  # no cgroup, or "max": no limit
        return None
