"""Run an offline vLLM in this process: reads a job from a file, writes the tokens beside it.

A job is JSON: {"model", "settings" (of the plugin, or null), "engine" (keywords of vllm.LLM), "rounds"}, where a round
is a list of [prompt token ids, plan or null, number of tokens] that are given at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def main(path: Path) -> None:
    from vllm import LLM

    job = json.loads(path.read_text())
    more = {} if job["settings"] is None else {"additional_config": {"kvsift": job["settings"]}}
    llm = LLM(job["model"], dtype="float32", enforce_eager=True, **job["engine"], **more)
    path.with_suffix(".out").write_text(json.dumps([answers(llm, requests) for requests in job["rounds"]]))


def answers(llm: Any, requests: list[Any]) -> list[dict[str, Any]]:
    """Tokens of each request, their log probabilities, and prompt tokens found in the prefix cache; or an error."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, logprobs=0, extra_args=plan and {"kvsift": plan}
        )
        for _, plan, count in requests
    ]
    try:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, _, _ in requests], params, use_tqdm=False)
    except Exception as error:  # of classes that depend on the version
        return [{"error": str(error)}]
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [next(iter(each.values())).logprob for each in output.outputs[0].logprobs],
            "cached": output.num_cached_tokens,
        }
        for output in outputs
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
