"""Prompts that arrive one after the other at vLLM, with its own attention or a plan's: waits and tokens per second.

    python -m kvsift_lab.studies.vllm_load load.json
    python -m kvsift_lab.studies.vllm_load load.json --plan prefill=quoka:budget=1024:chunk=512,decode=quest:budget=2048

Eight prompts within five seconds, each answered at length, while chunks of the later ones are read. A run is added to
the file. One process per engine; needs vLLM 0.26 and one NVIDIA GPU of 140 GB.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from kvsift_lab.studies.vllm_decode import llm_gpu
from kvsift_lab.studies.vllm_engine import LLAMA_3_8B, engine

STEP = 8192  # tokens, as in vllm serve


def measure(core: Any, tokens: int, prompts: int, new: int, within_s: float, vocabulary: int) -> dict[str, Any]:
    """Times of prompts that arrive evenly within so many seconds."""
    from vllm import SamplingParams

    rng, due = random.Random(tokens), [within_s * number / max(prompts - 1, 1) for number in range(prompts)]
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    texts = [[rng.randrange(vocabulary) for _ in range(tokens)] for _ in due]
    times: list[list[float]] = [[] for _ in due]
    started, asked = perf_counter(), 0
    while asked < prompts or core.has_unfinished_requests():
        while asked < prompts and perf_counter() - started >= due[asked]:
            core.add_request(f"{tokens}-{asked}", {"prompt_token_ids": texts[asked]}, sampling)
            asked += 1
        for output in core.step():
            row = times[int(output.request_id.split("-")[1])]
            row += [perf_counter() - started] * (len(output.outputs[0].token_ids) - len(row))
    begun, ended = max(row[0] for row in times), min(row[-1] for row in times)
    made = sum(begun < moment <= ended for row in times for moment in row)
    gaps = [after - before for row in times for before, after in pairwise(row)]
    return {
        "ttft_s": [row[0] - arrival for row, arrival in zip(times, due)],
        "itl_s": {"median": median(gaps), "p99": quantiles(gaps, n=100)[98], "longest": max(gaps)},
        "tokens_per_s_once_read": made / (ended - begun) if ended > begun else None,
        "seconds": max(row[-1] for row in times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--plan", default="")
    parser.add_argument("--tokens", type=int, default=65536, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new", type=int, default=2048)
    parser.add_argument("--within", type=float, default=5.0, help="seconds in which all arrive")
    options = parser.parse_args()
    length = options.tokens + options.new + 8
    core = engine(
        LLAMA_3_8B, options.plan, dtype="bfloat16", max_model_len=length, max_num_batched_tokens=STEP
    ).llm_engine  # fmt: skip
    vocabulary = core.vllm_config.model_config.get_vocab_size()
    measure(core, min(9000, options.tokens), 2, 8, 0.0, vocabulary)
    found = measure(core, options.tokens, options.prompts, options.new, options.within, vocabulary)
    load = {"tokens": options.tokens, "new": options.new, "within_s": options.within, "tokens_of_a_step": STEP}
    runs = json.loads(options.out.read_text()) if options.out.exists() else []
    runs.append({"plan": options.plan or "stock", "gpu": llm_gpu(), **load, **found})
    print(runs[-1], flush=True)
    options.out.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
