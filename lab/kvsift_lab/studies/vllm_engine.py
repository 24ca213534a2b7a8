"""vLLM engines of Llama's shape with random weights, which scripts run without a model to load.

The engine is stepped in this process, as fast as in vLLM's own two within 0.5 %; ranks have processes of their own.
"""

from __future__ import annotations

import json
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kvsift.errors import MissingPackage
from kvsift.plan.syntax import parse_plan
from kvsift.types import Origin
from kvsift_lab.bench.spaced_anchors import with_spaced_anchors

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 5e5, "torch_dtype": "bfloat16", "head_dim": 128, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 262144, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SIZES = [1, 2, 4, 8]  # of batches that have CUDA graphs


def require_vllm() -> None:
    """Refuse to measure without it.

    Raises:
        InputError: saying how to install it.
    """
    if find_spec("vllm") is None:
        raise MissingPackage("this bench measures vLLM, which is not installed: pip install 'vllm==0.26.*'.")


def engine(
    plan: str, *, ranks: int = 1, tokens: int | None = None, anchors: int | None = None, **options: Any
) -> Any:  # fmt: skip
    """Return a ``vllm.LLM`` whose attention is kvsift's, or vLLM's own where the plan is "stock".

    Args:
        ranks: GPUs that share the heads.
        tokens: that the KV cache holds; by default as many as fit.
        anchors: layers that select for the others, evenly spaced; by default all do.
        options: of vLLM, instead of those here.
    """
    is_ours = plan != "stock"
    if not is_ours:  # vLLM takes its newer model runner only where no plugin is loaded
        os.environ.setdefault("VLLM_PLUGINS", "")
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    from vllm import LLM
    from vllm.platforms import current_platform

    directory = Path(tempfile.mkdtemp(prefix="random-llama-"))
    (directory / "config.json").write_text(json.dumps(LLAMA_3_8B))
    base: dict[str, Any] = {
        "model": str(directory), "load_format": "random_weights",
        "worker_extension_cls": "kvsift_lab.studies.vllm_worker.WorkerExtension",
        "tensor_parallel_size": ranks, "skip_tokenizer_init": True, "max_num_seqs": max(SIZES), "seed": 0,
        "enable_prefix_caching": False, "generation_config": "vllm", "disable_log_stats": True,
    }  # fmt: skip
    if current_platform.is_cpu():  # to try a script out
        base |= {"enforce_eager": True}
    else:
        base |= {"attention_backend": "CUSTOM" if is_ours else "FLASH_ATTN"}
        base |= {"num_gpu_blocks_override": tokens and tokens // 16}
        base |= {"compilation_config": {"cudagraph_capture_sizes": SIZES}}
    if is_ours:
        plan = plan if anchors is None else with_anchors(plan, anchors, directory / "anchors.json")
        base |= {"additional_config": {"kvsift": {"plan": plan, "log_every_s": 5}}}
    return LLM(**(base | options))


def with_anchors(plan: str, count: int, path: Path) -> str:
    """Return a plan with a file that names no weights, which are drawn later."""
    shape, origin = LLAMA_3_8B, Origin("random Llama", torch.zeros(1))
    layers, heads = shape["num_hidden_layers"], shape["num_key_value_heads"]
    return str(with_spaced_anchors(parse_plan(plan), origin, layers, heads, count, path))
