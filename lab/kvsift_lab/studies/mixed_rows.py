"""Steps of dense and sparse rows side by side, and steps in which the same rows are all dense or all sparse.

    python -m kvsift_lab.studies.mixed_rows results/mixed-rows-h200.json

Random weights of Llama-3-8B's shape, random keys and values. Seconds are the device's per step, of replayed graphs, the
variants in turns; a variant is named by the rows that are dense. The last point has a short row beside long ones.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kvsift.engine.feeds import Assignment
from kvsift.engine.provenance import versions_and_machine
from kvsift.engine.sampling import Sampling
from kvsift.engine.slots import Slots, StepKind
from kvsift.layer.paged_decode import StepMode, rule_of
from kvsift.models.decoder_step import DecoderStep
from kvsift.models.transformers import SparseCache
from kvsift.models.transformers_random import random_model
from kvsift.plan.syntax import parse_plan
from kvsift_lab.bench.decode_case import filled_cache, new_slots
from kvsift_lab.bench.machine import gpu_facts
from kvsift_lab.bench.timing import gpu_seconds

K = 1 << 10
RECIPE: dict[str, Any] = {
    "model": "llama-3-8b",
    "plan": "quest:budget=2048",
    "steps": 16,
    "rounds": 9,
    "points": [[32 * K] * 4, [128 * K] * 4, [32 * K] * 8, [96 * K] * 8, [4 * K] + [128 * K] * 3],
}


def sample(cache: SparseCache, slots: Slots, rows: list[int], dense: int) -> float:
    """Return the seconds of a step whose first ``dense`` rows are dense."""
    rule, steps = rule_of(parse_plan(RECIPE["plan"])), RECIPE["steps"]
    mode: StepMode = "sparse" if dense == 0 else "dense" if dense == len(rows) else "mixed"
    kind = StepKind(mode)
    slots.prepare(kind)
    rules = [None] * dense + [rule] * (len(rows) - dense)
    assignments = [
        Assignment(cache.table.planned(row), length, row, Sampling(), 1, own)
        for row, (length, own) in enumerate(zip(rows, rules))
    ]
    slots.assign(assignments, steps)
    return gpu_seconds(lambda: [slots.run(kind, number) for number in range(steps)]) / steps


@torch.inference_mode()
def measure(model: Any, step: DecoderStep, rows: list[int]) -> dict[str, Any]:
    """Return the samples of all variants of a point, in turns."""
    plan, batch = parse_plan(RECIPE["plan"]), len(rows)
    cache = filled_cache(model, plan, max(rows), batch, RECIPE["steps"])
    slots = new_slots(step, cache, plan, batch, capture=True)
    numbers = sorted({0, 1, batch // 2, batch - 1, batch})
    samples: dict[int, list[float]] = {number: [] for number in numbers}
    for turn in range(RECIPE["rounds"] + 2):  # the first two warm up
        for number in numbers[turn % len(numbers) :] + numbers[: turn % len(numbers)]:
            seconds = sample(cache, slots, rows, number)
            if turn > 1:
                samples[number].append(float(f"{seconds:.6g}"))
    dearer = max(median(samples[0]), median(samples[batch]))
    ratios = {number: round(median(samples[number]) / dearer, 4) for number in numbers[1:-1]}
    print(rows, {n: f"{1e3 * median(s):.3f} ms" for n, s in samples.items()}, ratios, flush=True)
    return {"rows": rows, "dense_rows": samples, "to_dearer": ratios}


def main() -> None:
    device = torch.device("cuda", 0)
    result = {"kind": "mixed-rows", "recipe": RECIPE, **versions_and_machine(device), "gpu": gpu_facts()}
    model = random_model(RECIPE["model"], device, torch.bfloat16)
    step = DecoderStep(model)
    result["points"] = []
    for rows in RECIPE["points"]:
        result["points"].append(measure(model, step, rows))
        gc.collect()
        torch.cuda.empty_cache()
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
