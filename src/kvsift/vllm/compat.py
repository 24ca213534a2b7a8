"""Differences between versions of vLLM, found by trying: no other module asks for a version."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from vllm import __version__
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
from vllm.v1.sample.logits_processor import MoveDirectionality

logger = init_logger("vllm.kvsift")  # under vLLM's own logger, whose handlers show it

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2
except ImportError:
    # 0.28: model runner V2 takes no logits processors, and vLLM falls back to V1 where some are installed
    LogitsProcessor: Any = LogitsProcessorV1
else:
    LogitsProcessor = type("LogitsProcessor", (LogitsProcessorV1, LogitsProcessorV2), {})


GROUPS = "vllm.general_plugins", "vllm.logits_processors", "vllm.stat_logger_plugins"


def findings() -> dict[str, str]:
    """What the plugin finds in this vLLM, for ``kvsift doctor``."""
    from vllm.platforms import current_platform

    on_gpu, metadata = current_platform.is_cuda(), _metadata_fields()
    missing = [group for group in GROUPS if not entry_points(group=group, name="kvsift")]
    backend = "CUSTOM, over FlashAttention" if on_gpu else "in place of CPU_ATTN" if current_platform.is_cpu() else ""
    runners = "V1" if LogitsProcessor is LogitsProcessorV1 else "V1 and V2"
    return {
        "version": f"{__version__}; tested are 0.26 on a GPU, 0.28 and 0.32 on a CPU",
        "plugin": f"not installed: no entry point in {', '.join(missing)}" if missing else "installed",
        "attention backend": backend or f"none for {current_platform.device_name or 'this platform'}",
        "plans of requests": f"by a logits processor, in model runner {runners}",
        "rows that read a prompt": "named by vLLM" if "is_prefilling" in metadata else "those of several tokens",
        "slots of model runner V2": "named by vLLM" if "req_idx" in metadata else "none: rows are counted",
    }


def _metadata_fields() -> frozenset[str]:
    """Fields of the metadata that a step gives every backend, wherever this version keeps it."""
    for module in ("vllm.v1.attention.backend", "vllm.v1.attention.backends.utils"):
        kind = getattr(import_module(module), "CommonAttentionMetadata", None)
        if kind is not None:
            return frozenset(field.name for field in fields(kind))
    return frozenset()


def is_swap(direction: Any) -> bool:
    """Whether two sequences of a batch changed places, not one moved."""
    return bool(direction == MoveDirectionality.SWAP)


def layer_index(name: str) -> int:
    """True index of a layer, from a name such as model.layers.3.self_attn.attn; -1 if it has none."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found.group(1)) if found else -1


def why_dense(attention: Any) -> str:
    """Why a layer is attended by the stock backend alone; empty if it need not be."""
    window = attention.sliding_window  # -1 on a CPU, (-1, -1) on a GPU: none
    window = window[0] + 1 if isinstance(window, tuple) else max(window, 0)
    if attention.attn_type != "decoder":
        return f"attention of type {attention.attn_type}"
    if window:
        return f"a sliding window of {window} tokens"
    if attention.alibi_slopes is not None:
        return "ALiBi"
    return "a cache of another layer" if attention.kv_sharing_target_layer_name else ""


def is_prefilling(metadata: Any) -> list[bool]:
    """Whether each sequence is still in prefill, of vLLM's ``CommonAttentionMetadata``."""
    given = getattr(metadata, "is_prefilling", None)
    if given is None:  # a sequence of one token is then a decode
        return [False] * metadata.num_reqs
    return [bool(each) for each in given[: metadata.num_reqs].tolist()]


def lengths_of_rows(metadata: Any) -> list[int]:
    """Tokens of each sequence, the new ones included, exact for sequences in prefill; without waiting for a GPU
    where this version has them on the host."""
    for name in ("seq_lens_cpu_upper_bound", "_seq_lens_cpu", "seq_lens"):
        given = getattr(metadata, name, None)
        if given is not None:
            return [int(length) for length in given[: metadata.num_reqs].tolist()]
    raise AttributeError("vLLM gives no lengths")


def slots_of_rows(metadata: Any) -> list[int]:
    """The slot of each row in model runner V2; V1 has none and counts rows."""
    given = getattr(metadata, "req_idx", None)
    return list(range(metadata.num_reqs)) if given is None else [int(slot) for slot in given[: metadata.num_reqs]]
