"""The chats of ``chats.py`` in stock vLLM, at the same load, through its engine's step loop.

    python -m kvsift_lab.studies.chats gpu-shared chats-shared.json --rounds 1 --chunk-reads 0
    python -m kvsift_lab.studies.chats gpu chats.json --rounds 1 --chunk-reads 0
    python -m kvsift_lab.studies.vllm_chats chats-shared.json chats.json

Recipes are those of the results that are given, on the same machine, and what is measured is added to them: rounds of
the plan ``vLLM`` and its version. Prefixes are cached; a step has 8,192 tokens, as in ``vllm serve``, or where chats
wait for a document, 1,024 of one prompt, too (``--long-prefill-token-threshold``, the grid of ``kvsift.LLM``). Needs
vLLM 0.26.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from transformers import AutoTokenizer

from kvsift.models.embedded import embedded_model
from kvsift_lab.studies.chats import MOST, MeasuredChats, load_of, saver
from kvsift_lab.studies.vllm_engine import LLAMA_3_8B, SIZES, engine

STEP, GRID = 8192, 1024  # tokens of a step; those of one prompt in it
GRAPHS = [1, 2, 4, 8, 16, 24, 32]  # tokens: a question beside seven chats has about 24


@dataclass
class VllmTimes:
    times: list[float] = field(default_factory=list)


@dataclass
class VllmRow:
    """A request to vLLM."""

    key: str
    output: VllmTimes = field(default_factory=VllmTimes)
    num_reused: int = 0
    is_ended: bool = False
    error: Exception | None = None


class VllmChats(MeasuredChats):
    """Requests to vLLM's engine; plans are of no meaning."""

    def __init__(self, core: Any, *load: Any) -> None:
        super().__init__(*load)
        self.core = core
        self.rows: dict[str, VllmRow] = {}  # that have not ended
        self.count = 0

    def start(self, ids: list[int], plan: str, num_tokens: int = MOST) -> VllmRow:
        from vllm import SamplingParams

        self.count += 1
        row = self.rows[f"{self.count}"] = VllmRow(f"{self.count}")
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        self.core.add_request(row.key, {"prompt_token_ids": ids}, sampling)
        return row

    def step(self) -> None:
        outputs, now = self.core.step(), perf_counter()
        for output in outputs:
            if (row := self.rows.get(output.request_id)) is None:
                continue
            times = row.output.times
            times.extend([now] * (len(output.outputs[0].token_ids) - len(times)))
            row.num_reused = output.num_cached_tokens or 0
            if output.finished:
                row.is_ended = True
                del self.rows[row.key]

    def close(self, *rows: VllmRow) -> None:
        self.core.abort_request([row.key for row in rows if self.rows.pop(row.key, None) is not None])

    def state(self, row: VllmRow) -> dict[str, Any]:
        return {"reused": row.num_reused}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="of chats.py, to which these are added")
    paths = parser.parse_args().results
    results = [json.loads(path.read_text()) for path in paths]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    tokenizer = AutoTokenizer.from_pretrained(embedded_model())
    loads = [load_of(result["recipe"], tokenizer) for result in results]
    longest = max(len(documents[0]) for _, documents, _ in loads) + 64 + MOST
    core = engine(
        LLAMA_3_8B, "", dtype="bfloat16", max_model_len=longest, max_num_batched_tokens=STEP,
        enable_prefix_caching=True, compilation_config={"cudagraph_capture_sizes": GRAPHS},
    ).llm_engine  # fmt: skip
    for path, result, load in zip(paths, results, loads):
        core.reset_prefix_cache()
        measure(core, path, result, load)


def measure(core: Any, path: Path, result: dict[str, Any], load: tuple[list[int], list[list[int]], list[int]]) -> None:
    """Add the rounds of vLLM to a result."""
    import torch
    import vllm

    assert torch.cuda.get_device_name() == result["machine"], f"{path} was measured on {result['machine']}"
    name, config, recipe = f"vLLM {vllm.__version__}", core.vllm_config, result["recipe"]
    ids, documents, question = load
    chats, save = VllmChats(core, recipe, documents, question), saver(result, path)
    assert recipe["chats"] <= max(SIZES), f"vLLM decodes {max(SIZES)} rows"
    result["vllm"] = {
        "version": vllm.__version__, "torch": torch.__version__, "tokens_of_a_step": STEP,
        "kv_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
    }  # fmt: skip
    chats.read([7, *ids[:2048]])
    for chat in range(recipe["documents"]):
        save(vllm_read_s=chats.read(chats.prompt(chat)))
    for number in range(recipe["rounds"]):
        new = [400 + number, *ids[: recipe["new_tokens"]]] if recipe["new_tokens"] else []
        save(rounds={"plan": name, **chats.measure("", new)})
    if "read_beside" in recipe:
        for number, most in enumerate((0, GRID)):
            config.scheduler_config.long_prefill_token_threshold = most
            how = f"{name}, {most or STEP} tokens at a time"
            save(read_beside=chats.read_beside(number, ids, how, name))
        config.scheduler_config.long_prefill_token_threshold = 0


if __name__ == "__main__":
    main()
