"""Memory of page summaries within what vLLM plans.

A backend has no say in the size of a KV cache: it is what a profile run leaves of ``gpu_memory_utilization``. So the
profile run holds as many bytes as the summaries will take, and the first step with a cache gives them back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvsift.vllm import compat

GIB = 1 << 30


def hold(config: Any, summary_share: float, device: torch.device) -> Tensor:
    """Return memory for summaries, of ``summary_share`` bytes for each byte of KV cache; empty where vLLM was told the
    size of the cache, and plans nothing."""
    cache = config.cache_config
    if cache.kv_cache_memory_bytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    free, total = torch.cuda.mem_get_info(device)
    # as vLLM counts: memory of other processes is no part of its share
    planned = int(total * cache.gpu_memory_utilization) - torch.cuda.memory_allocated(device)
    left = max(0, min(free, planned))
    held = int(left * summary_share / (1 + summary_share))
    compat.logger.info("kvsift: %.2f GiB of the memory planned for the KV cache is for page summaries.", held / GIB)
    return torch.empty(held, dtype=torch.uint8, device=device)
