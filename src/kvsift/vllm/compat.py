"""Differences between versions of vLLM, found by trying: no other module asks for a version."""

from __future__ import annotations

import re
from typing import Any

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


def is_swap(direction: Any) -> bool:
    """Whether two rows of a batch changed places, not one moved."""
    return bool(direction == MoveDirectionality.SWAP)


def layer_index(name: str) -> int:
    """True index of a layer, from a name such as model.layers.3.self_attn.attn; -1 if it has none."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found.group(1)) if found else -1


def is_prefilling(metadata: Any) -> list[bool]:
    """Whether each row still reads its prompt, of vLLM's ``CommonAttentionMetadata``."""
    given = getattr(metadata, "is_prefilling", None)
    if given is None:  # a row of one token is then a decode
        return [False] * metadata.num_reqs
    return [bool(each) for each in given[: metadata.num_reqs].tolist()]


def slots_of_rows(metadata: Any) -> list[int]:
    """The slot of each row in model runner V2; V1 has none and counts rows."""
    given = getattr(metadata, "req_idx", None)
    return list(range(metadata.num_reqs)) if given is None else [int(slot) for slot in given[: metadata.num_reqs]]
