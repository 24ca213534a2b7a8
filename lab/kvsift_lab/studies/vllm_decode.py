"""Speed of decoding in vLLM with its own attention and with plans.

    kvsift bench vllm-decode --plans "stock;quest:budget=2048" --out results/vllm-h200
    kvsift bench vllm-decode --plans "stock;quest:budget=2048:score_by=minmax_fp8" --fp8 --out results/vllm-fp8-h200
    kvsift bench vllm-decode --plans "stock;sketch:budget=1024" --anchors 6 --out results/vllm-anchors-h200
    kvsift bench vllm-decode --tp 2 --points 131072x1,131072x4 --only-decode --out results/vllm-two-gpus-h200

Engines run one after the other. Needs vLLM 0.26 and, for the points by default, an NVIDIA GPU of 140 GB. Prompts of
batches leave attention out (stock and ours alike). For load on ``kvsift serve --engine vllm`` there is ``vllm bench
serve``.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from kvsift_lab.bench import machine
from kvsift_lab.bench.bench import Study
from kvsift_lab.numbers import table, tokens
from kvsift_lab.studies.recipes import VllmDecodeRecipe
from kvsift_lab.studies.vllm_engine import engine, require_vllm

LENGTH = 131072  # the longest sequence
NEW, UNTIMED = 96, 8  # tokens of an answer; of them, steps before the clock
POINT = "point of kvsift bench: "


class VllmDecode(Study):
    """A point for each plan, context and batch; every engine has a process of its own."""

    kind = "vllm-decode"
    recipe: VllmDecodeRecipe

    def environment(self) -> dict[str, Any]:
        require_vllm()
        import vllm

        about = machine.environment(machine.require_gpu(self.kind))
        return about | {"versions": about["versions"] | {"vllm": vllm.__version__}}

    def run(self) -> Iterator[dict[str, Any]]:
        for plan in self.recipe.plans:
            given = json.dumps(asdict(replace(self.recipe, plans=(plan,))))
            command = [sys.executable, "-m", "kvsift_lab.studies.vllm_decode", given]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:  # vLLM may print, too
                    if line.startswith(POINT):
                        yield {"plan": plan, "ranks": self.recipe.tp, **json.loads(line.removeprefix(POINT))}
            if process.returncode:
                raise SystemExit(f"the engine of {plan} ended with status {process.returncode}; its error is above")

    def closing(self, result: dict[str, Any]) -> str:
        return vllm_table(result)


def engine_points(recipe: VllmDecodeRecipe) -> Iterator[dict[str, Any]]:
    """Measure the one engine of this process."""
    held = max(LENGTH, *(min(context, LENGTH) * batch for context, batch in recipe.points)) + 2048
    rounded = {"quantization": "fp8"} if recipe.fp8 else {}
    llm = engine(
        recipe.plans[0], ranks=recipe.tp, tokens=held, anchors=recipe.anchors, dtype="bfloat16", max_model_len=LENGTH,
        **rounded,
    )  # fmt: skip
    rng = random.Random(1)
    decode_times(llm, "warm-up", 2000, 1, rng, recipe.only_decode)
    for context, batch in recipe.points:
        yield decode_times(llm, f"{context}x{batch}", context, batch, rng, recipe.only_decode or batch > 1)


def decode_times(llm: Any, name: str, context: int, batch: int, rng: random.Random, decodes: bool) -> dict[str, Any]:
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
    begun, pairs = max(first.values()), pairwise(events)
    steps = [after - before for (before, n), (after, m) in pairs if before > begun and n == m == batch][UNTIMED:]
    ttft_s = None if decodes else begun
    return {"context": context, "batch": batch, "tpot_ms": 1e3 * median(steps), "samples_s": steps, "ttft_s": ttft_s}


def vllm_table(result: dict[str, Any], of_llm: dict[str, Any] | None = None) -> str:
    """Return milliseconds per token in vLLM, its own attention beside plans in the same call, and ``kvsift.LLM``'s in
    that call, by a result of ``kvsift bench decode``."""
    stock, own = dict[tuple[Any, ...], float](), dict[tuple[Any, ...], float]()
    for point in of_llm["points"] if of_llm else ():
        for variant in point["variants"]:
            key = of_llm.get("call"), variant["plan"], round(point["context"] / 1024), point["batch"]  # type: ignore[union-attr]
            own[key] = 1e3 * median(variant["tpot_s"])
    points, rows = [point for point in result["points"] if point.get("part", "decode") == "decode"], []
    for point in points:
        if point["plan"] == "stock":
            stock[point.get("call"), point["context"], point["batch"]] = point["tpot_ms"]
    for point in points:
        call, context, batch, ms = point.get("call"), point["context"], point["batch"], point["tpot_ms"]
        if point["plan"] != "stock" and (dense := stock.get((call, context, batch))):
            llm = own.get((call, point["plan"], round(context / 1024), batch))
            times = [f"{dense:.2f}", f"{ms:.2f}", f"{dense / ms:.2f}x", f"{llm:.2f}" if llm else ""]
            rows.append([f"`{point['plan']}`", tokens(context), str(batch), *times])
    return table(["plan", "context", "batch", "vLLM's own", "with the plan", "", "`kvsift.LLM`"], rows)


if __name__ == "__main__":
    for point in engine_points(VllmDecodeRecipe(**json.loads(sys.argv[1]))):
        print(f"{POINT}{json.dumps(point)}", flush=True)
