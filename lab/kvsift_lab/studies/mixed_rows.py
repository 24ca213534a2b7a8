"""Steps of dense and sparse rows side by side, and steps in which the same rows are all dense or all sparse.

Random weights of Llama-3-8B's shape, random keys and values. Seconds are the device's per step, of replayed graphs, the
variants in turns; a variant is named by the rows that are dense. The last point has a short row beside long ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from kvsift.engine.feeds import Assignment
from kvsift.engine.sampling import Sampling
from kvsift.engine.slots import Slots, StepKind
from kvsift.layer.paged_decode import StepMode, rule_of
from kvsift.models.decoder_step import DecoderStep
from kvsift.models.transformers import SparseCache
from kvsift.models.transformers_random import random_model
from kvsift.plan.syntax import parse_plan
from kvsift_lab.bench import machine
from kvsift_lab.bench.bench import Bench
from kvsift_lab.bench.decode_case import filled_cache, new_slots
from kvsift_lab.bench.timing import digits, gpu_seconds, interleaved
from kvsift_lab.studies.recipes import MixedRowsRecipe


class MixedRowsBench(Bench):
    """Samples of all numbers of dense rows."""

    kind = "mixed-rows"
    recipe: MixedRowsRecipe

    def __init__(self, recipe: MixedRowsRecipe) -> None:
        super().__init__(recipe)
        self._model = random_model(recipe.model, machine.require_gpu("mixed-rows"), torch.bfloat16)
        self._step, self._plan = DecoderStep(self._model), parse_plan(recipe.plan)

    def environment(self) -> dict[str, Any]:
        return machine.environment(torch.device("cuda", 0))

    def points(self) -> Iterator[tuple[int, ...]]:
        yield from self.recipe.points

    def facts(self, point: tuple[int, ...]) -> dict[str, Any]:
        return {"rows": list(point)}

    def measure(self, point: tuple[int, ...]) -> dict[str, Any]:
        batch = len(point)
        cache = filled_cache(self._model, self._plan, max(point), batch, self.recipe.steps)
        slots = new_slots(self._step, cache, self._plan, batch, capture=True)
        numbers = sorted({0, 1, batch // 2, batch - 1, batch})
        timers = {str(number): lambda number=number: self._sample(cache, slots, point, number) for number in numbers}
        samples = {name: digits(seconds, 6) for name, seconds in interleaved(timers, self.recipe.rounds).items()}
        dearer = max(median(samples["0"]), median(samples[str(batch)]))
        ratios = {str(number): round(median(samples[str(number)]) / dearer, 4) for number in numbers[1:-1]}
        return {"dense_rows": samples, "to_dearer": ratios}

    def _sample(self, cache: SparseCache, slots: Slots, rows: tuple[int, ...], dense: int) -> float:
        """Return the seconds of a step whose first ``dense`` rows are dense."""
        mode: StepMode = "sparse" if dense == 0 else "dense" if dense == len(rows) else "mixed"
        kind, steps = StepKind(mode), self.recipe.steps
        slots.prepare(kind)
        rules = [None] * dense + [rule_of(self._plan)] * (len(rows) - dense)
        assignments = [
            Assignment(cache.table.planned(row), length, row, Sampling(), 1, own)
            for row, (length, own) in enumerate(zip(rows, rules))
        ]
        slots.assign(assignments, steps)
        return gpu_seconds(lambda: [slots.run(kind, number) for number in range(steps)]) / steps

    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        times = {name: f"{1e3 * median(seconds):.3f} ms" for name, seconds in point.get("dense_rows", {}).items()}
        return f"{point['rows']}: {times or point['reason']} {point.get('to_dearer', '')}"
