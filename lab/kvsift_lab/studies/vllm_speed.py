"""Speed of vLLM with its own attention and with plans: of decoding, and of prompts that arrive one after the other.

    kvsift bench vllm-decode --plans "stock;quest:budget=2048" --out results/vllm-h200
    kvsift bench vllm-decode --tp 2 --points 131072x1,131072x4 --only-decode --out results/vllm-two-gpus-h200
    kvsift bench vllm-load --plans "stock;prefill=quoka:budget=1024:chunk=512,decode=quest:budget=2048" --out load

Every engine has a process of its own, one after the other. Needs vLLM 0.26 and, for the points by default, NVIDIA GPUs
of 140 GB. Prompts of batches of ``vllm-decode`` leave attention out (stock and ours alike). In ``vllm-load`` each
prompt is answered at length, while chunks of the later ones are read.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch

from kvsift_lab.bench import machine
from kvsift_lab.bench.bench import Study
from kvsift_lab.bench.numbers import table, tokens
from kvsift_lab.studies.recipes import VllmDecodeRecipe, VllmLoadRecipe
from kvsift_lab.studies.vllm_engine import LLAMA_3_8B, engine

LENGTH = 131072  # the longest sequence of vllm-decode
NEW, UNTIMED = 96, 8  # tokens of an answer; of them, steps before the clock
STEP = 8192  # tokens of vllm-load, as in vllm serve


class EnginesInTurns(Study):
    """A study that starts itself in a process of its own for every plan."""

    recipe: Any

    def environment(self) -> dict[str, Any]:
        import vllm

        about = machine.environment(torch.device("cuda", 0))
        return about | {"versions": about["versions"] | {"vllm": vllm.__version__}}

    def run(self) -> Iterator[dict[str, Any]]:
        for plan in self.recipe.plans:
            given = json.dumps([type(self).__name__, asdict(replace(self.recipe, plans=(plan,)))])
            command = [sys.executable, "-m", "kvsift_lab.studies.vllm_speed", given]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:  # vLLM may print, too
                    if line.startswith(POINT):
                        yield {"plan": plan, **json.loads(line.removeprefix(POINT))}
            if process.returncode:
                raise SystemExit(f"the engine of {plan} ended with status {process.returncode}; its error is above")

    @abstractmethod
    def of_engine(self) -> Iterator[dict[str, Any]]:
        """Measure the one engine of this process."""


POINT = "point of kvsift bench: "


class VllmDecode(EnginesInTurns):
    """A point for each plan, context and batch."""

    kind = "vllm-decode"
    recipe: VllmDecodeRecipe

    def of_engine(self) -> Iterator[dict[str, Any]]:
        points, [plan], everywhere = self.recipe.points, self.recipe.plans, self.recipe.only_decode
        held = max(LENGTH, *(min(context, LENGTH) * batch for context, batch in points)) + 2048
        llm = engine(LLAMA_3_8B, plan, ranks=self.recipe.tp, tokens=held, dtype="bfloat16", max_model_len=LENGTH)
        rng = random.Random(1)
        decode_times(llm, "warm-up", 2000, 1, rng, everywhere)
        for context, batch in points:
            times = decode_times(llm, f"{context}x{batch}", context, batch, rng, everywhere or batch > 1)
            yield {"ranks": self.recipe.tp, **times}

    def closing(self, result: dict[str, Any]) -> str:
        return vllm_table(result)


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


class VllmLoad(EnginesInTurns):
    """A point for each plan."""

    kind = "vllm-load"
    recipe: VllmLoadRecipe

    def of_engine(self) -> Iterator[dict[str, Any]]:
        recipe, [plan] = self.recipe, self.recipe.plans
        length = recipe.tokens + recipe.new + 8
        core = engine(
            LLAMA_3_8B, plan, dtype="bfloat16", max_model_len=length, max_num_batched_tokens=STEP
        ).llm_engine  # fmt: skip
        load_times(core, min(9000, recipe.tokens), 2, 8, 0.0)
        yield {
            "tokens": recipe.tokens, "new": recipe.new, "within_s": recipe.within_s, "tokens_of_a_step": STEP,
            **load_times(core, recipe.tokens, recipe.prompts, recipe.new, recipe.within_s),
        }  # fmt: skip


def load_times(core: Any, length: int, prompts: int, new: int, within_s: float) -> dict[str, Any]:
    """Return times of prompts that arrive evenly within so many seconds."""
    from vllm import SamplingParams

    rng, due = random.Random(length), [within_s * number / max(prompts - 1, 1) for number in range(prompts)]
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    vocabulary = core.vllm_config.model_config.get_vocab_size()
    texts = [[rng.randrange(vocabulary) for _ in range(length)] for _ in due]
    times: list[list[float]] = [[] for _ in due]
    started, asked = perf_counter(), 0
    while asked < prompts or core.has_unfinished_requests():
        while asked < prompts and perf_counter() - started >= due[asked]:
            core.add_request(f"{length}-{asked}", {"prompt_token_ids": texts[asked]}, sampling)
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


if __name__ == "__main__":
    name, fields = json.loads(sys.argv[1])
    study, recipe = {"VllmDecode": (VllmDecode, VllmDecodeRecipe), "VllmLoad": (VllmLoad, VllmLoadRecipe)}[name]
    for point in study(recipe(**fields)).of_engine():
        print(f"{POINT}{json.dumps(point)}", flush=True)
