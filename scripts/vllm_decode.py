"""Decoding in vLLM, its own attention or a plan's: milliseconds per token and seconds to the first, on one GPU.

    python scripts/vllm_decode.py stock.json                             # vLLM's FlashAttention
    python scripts/vllm_decode.py quest.json --plan quest:budget=2048    # kvsift's backend

One process per engine, so run them one after the other. The engine is stepped in this process, as fast as in vLLM's own
two within 0.5 %. Weights are random, of a spread that keeps attention from being uniform. Prompts of batches leave
attention out (stock and ours alike): only decoding is timed then. Needs vLLM 0.26 and an NVIDIA GPU of 140 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import zlib
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

LENGTH, ROWS, BLOCKS = 131072, 8, 32900  # the longest sequence, the most rows, blocks of 16 tokens
POINTS = ((4096, 1), (32768, 1), (131072, 1), (32768, 4), (131072, 4))
NEW, UNTIMED = 96, 8  # tokens of an answer; of them, steps before the clock
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 5e5, "torch_dtype": "bfloat16", "head_dim": 128, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 262144, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
skips_prompts = False


def random_weights(self: Any, model: Any, model_config: Any) -> None:
    """Replace vLLM's dummy weights, under which every key gets the same attention."""
    import torch

    for name, tensor in model.state_dict().items():
        if not torch.is_floating_point(tensor) or tensor.ndim == 0 or "_scale" in name:
            continue
        generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
        if "norm" in name:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02 if tensor.shape[-1] > 2048 else 0.04, generator=generator)


def patch_vllm() -> None:
    """Random weights, and prompts without attention where only decoding is timed."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    DummyModelLoader.load_weights = random_weights
    stock = FlashAttentionImpl.forward

    def forward(
        self: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, output: Any,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if skips_prompts and metadata is not None and metadata.max_query_len > 1:
            return output.copy_(query.view_as(output))
        return stock(self, layer, query, key, value, cache, metadata, output, *args, **kwargs)

    FlashAttentionImpl.forward = forward


def engine(plan: str, **options: Any) -> Any:
    """Return a vLLM of Llama-3-8B's shape, with its own attention if there is no plan, and options instead of these."""
    from vllm import LLM

    directory = Path(tempfile.mkdtemp())
    (directory / "config.json").write_text(json.dumps(LLAMA_3_8B))
    ours = {"attention_backend": "CUSTOM", "additional_config": {"kvsift": {"plan": plan}}}
    base = dict(
        model=str(directory), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=LENGTH,
        max_num_seqs=ROWS, num_gpu_blocks_override=BLOCKS, enable_prefix_caching=False, generation_config="vllm",
        disable_log_stats=True, seed=0, compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]},
        **(ours if plan else {"attention_backend": "FLASH_ATTN"}),
    )  # fmt: skip
    return LLM(**{**base, **options}).llm_engine


def measure(core: Any, name: str, context: int, batch: int, rng: random.Random) -> dict[str, Any]:
    """Return times of a batch of prompts that come at once: steps count while all rows decode."""
    from vllm import SamplingParams

    vocabulary = core.vllm_config.model_config.get_vocab_size()
    context = min(context, LENGTH - NEW - 8)
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    prompts = [[rng.randrange(vocabulary) for _ in range(context)] for _ in range(batch)]
    started, first, events = perf_counter(), dict[str, float](), list[tuple[float, int]]()
    for number, prompt in enumerate(prompts):
        core.add_request(f"{name}-{number}", {"prompt_token_ids": prompt}, sampling)
    while core.has_unfinished_requests():
        outputs, now = core.step(), perf_counter() - started
        for output in outputs:
            if output.outputs[0].token_ids:
                first.setdefault(output.request_id, now)
        if outputs:
            events.append((now, len(outputs)))
    begun = max(first.values())
    pairs = pairwise(events)
    steps = [after - before for (before, n), (after, m) in pairs if before > begun and n == m == batch][UNTIMED:]
    ttft_s = None if skips_prompts else begun
    return {"context": context, "batch": batch, "tpot_ms": 1e3 * median(steps), "samples_s": steps, "ttft_s": ttft_s}


def main() -> None:
    """Measure one engine."""
    global skips_prompts
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--plan", default="")
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    patch_vllm()
    core, rng, points = engine(options.plan), random.Random(1), list[dict[str, Any]]()
    measure(core, "warm-up", 2000, 1, rng)
    for context, batch in POINTS:
        skips_prompts = batch > 1
        points.append(measure(core, f"{context}x{batch}", context, batch, rng))
        print({key: number for key, number in points[-1].items() if key != "samples_s"}, flush=True)
        options.out.write_text(json.dumps({"plan": options.plan or "stock", "points": points}, indent=1))


if __name__ == "__main__":
    main()
