"""Decoding in vLLM, its own attention or a plan's: milliseconds per token and seconds to the first.

    python -m kvsift_lab.studies.vllm_decode stock.json                                     # vLLM's FlashAttention
    python -m kvsift_lab.studies.vllm_decode quest.json --plan quest:budget=2048            # kvsift's backend
    python -m kvsift_lab.studies.vllm_decode two.json --tp 2 --points 131072x1,131072x4     # over two GPUs

One process per engine, so run them one after the other. Prompts of batches leave attention out (stock and ours alike),
and with --only-decode all do. Needs vLLM 0.26 and, for the points by default, one NVIDIA GPU of 140 GB.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from kvsift_lab.studies.vllm_engine import LLAMA_3_8B, engine

POINTS = "4096x1,32768x1,131072x1,32768x4,131072x4"
LENGTH = 131072  # the longest sequence
NEW, UNTIMED = 96, 8  # tokens of an answer; of them, steps before the clock


def measure(llm: Any, name: str, context: int, batch: int, rng: random.Random, decodes: bool) -> dict[str, Any]:
    """Return times of a batch of prompts that come at once: steps count while all rows decode. With ``decodes`` the
    prompts get no attention."""
    from vllm import SamplingParams

    core = llm.llm_engine
    llm.collective_rpc("leave_attention_out", args=(decodes,))
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
    ttft_s = None if decodes else begun
    return {"context": context, "batch": batch, "tpot_ms": 1e3 * median(steps), "samples_s": steps, "ttft_s": ttft_s}


def main() -> None:
    """Measure one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--plan", default="")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the heads")
    parser.add_argument("--points", default=POINTS, help="context x batch, with commas between")
    parser.add_argument("--only-decode", action="store_true")
    options = parser.parse_args()
    sizes = [(int(context), int(batch)) for context, batch in (each.split("x") for each in options.points.split(","))]
    tokens = max(LENGTH, *(min(context, LENGTH) * batch for context, batch in sizes)) + 2048
    llm = engine(
        LLAMA_3_8B, options.plan, ranks=options.tp, tokens=tokens, dtype="bfloat16", max_model_len=LENGTH
    )  # fmt: skip
    rng, points = random.Random(1), list[dict[str, Any]]()
    measure(llm, "warm-up", 2000, 1, rng, options.only_decode)
    for context, batch in sizes:
        decodes = options.only_decode or batch > 1
        points.append(measure(llm, f"{context}x{batch}", context, batch, rng, decodes))
        print({key: number for key, number in points[-1].items() if key != "samples_s"}, flush=True)
        run = {"plan": options.plan or "stock", "ranks": options.tp, "gpu": llm_gpu(), "points": points}
        options.out.write_text(json.dumps(run, indent=1))


def llm_gpu() -> str:
    """Name of the GPUs."""
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name())


if __name__ == "__main__":
    main()
