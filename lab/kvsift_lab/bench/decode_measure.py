"""Times of decoding at one point: the engine's own loop, and replays of its captured steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from kvsift.engine.graphs.crossover import measure_crossover
from kvsift.engine.graphs.feeds import Assignment
from kvsift.engine.graphs.slots import Slots, StepKind
from kvsift.engine.sampling import Sampling
from kvsift.errors import UnsupportedPlan
from kvsift.layer.paged_decode import rule_of
from kvsift.models.captured_step import Step
from kvsift.models.fused_step import FusedStep
from kvsift.models.hf.forward_step import TransformersStep, kind_of_step
from kvsift.models.hf.model_directory import ModelDirectory, choose_dtype
from kvsift.plan.placement import Placement
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import parse_plan
from kvsift_lab.bench import machine
from kvsift_lab.bench.bench import Bench
from kvsift_lab.bench.decode import DecodeRecipe, decode_table, point_text
from kvsift_lab.bench.decode_case import (
    DecodeCase,
    decode,
    filled_caches,
    pool_bytes,
    read_bytes,
    weight_bytes,
    with_anchors,
)
from kvsift_lab.bench.random_models import random_model
from kvsift_lab.bench.timing import gpu_seconds, rotated
from kvsift_lab.numbers import digits

ROOM_SHARE = 1 / 16  # of the pools: CUDA graphs, workspaces and tables of angles
NAME_CHARACTERS = 100  # of a kernel: enough to tell templates with all their arguments apart


def step_of(model: Any) -> Step:
    """Return the step of a model, as ``FastPath`` selects it.

    Raises:
        InputError: if steps of the model cannot be captured.
    """
    kind, against = kind_of_step(model)
    if not kind:
        raise UnsupportedPlan(f"steps of this model cannot be captured, so there is nothing to measure: {against[-1]}.")
    return FusedStep(model) if kind == "fused" else TransformersStep(model)


@dataclass(frozen=True)
class DecodeBench(Bench):
    """Decoding of a recipe on a model.

    Attributes:
        step: of the model.
        capture: False runs steps without CUDA graphs, for tests on a CPU.
    """

    recipe: DecodeRecipe
    model: Any
    step: Step
    capture: bool = True
    kind = "decode"

    @classmethod
    def of(cls, recipe: DecodeRecipe) -> DecodeBench:
        """Return the bench on the first GPU; random weights are bfloat16.

        Raises:
            InputError: without a GPU, or for a model that cannot be used.
        """
        device = machine.require_gpu("decode")
        if recipe.random:
            model = random_model(recipe.model, device, torch.bfloat16, quantize=recipe.quantize)
        else:
            directory = ModelDirectory.check(recipe.model).quantized(recipe.quantize)
            model = directory.load(device, choose_dtype("auto", device, directory.config))
        return cls(recipe, model, step_of(model))

    def environment(self) -> dict[str, Any]:
        return machine.gpu_environment(self.recipe.bandwidth)

    def points(self) -> Iterator[tuple[int, int]]:
        return ((context, batch) for batch in self.recipe.batches for context in sorted(self.recipe.contexts))

    def facts(self, point: tuple[int, int]) -> dict[str, Any]:
        return dict(zip(("context", "batch"), point))

    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        return point_text(point, result["bandwidth"]["used"])

    def closing(self, result: dict[str, Any]) -> str:
        return decode_table(result)

    def measure(self, point: tuple[int, int]) -> dict[str, Any]:
        with TemporaryDirectory() as folder:
            plan, anchors = parse_plan(self.recipe.plan), self.recipe.anchors
            if anchors is not None:
                plan = with_anchors(plan, self.model, anchors, Path(folder) / "anchors.json")
            return self._measure(point, plan)

    def _measure(self, point: tuple[int, int], plan: Plan) -> dict[str, Any]:
        (context, batch), started, steps = point, perf_counter(), self.recipe.steps
        config = self.model.config.get_text_config(decoder=True)
        place = Placement(kv_dtype=self.recipe.kv_dtype)
        pools = pool_bytes(config, plan, context, batch, steps, self.model.dtype, place)
        machine.require_room(self.model.device, pools * (1 + ROOM_SHARE))
        caches = filled_caches(self.model, plan, context, batch, steps, place)
        case = partial(DecodeCase.of, self.model, self.step, caches, capture=self.capture)
        variants = {"dense": case(Plan()), "sifted": case(plan)}
        dense_below = _dense_below(variants["sifted"].slots, plan.decode) if self.capture and plan.decode else 0
        if context + 1 < dense_below:  # what the engine does by itself
            variants["auto"] = case(plan, dense_below=dense_below)
        weights = weight_bytes(self.model)
        return {
            "weight_bytes": weights,
            "pool_bytes": caches[0].num_bytes,
            "dense_below": dense_below,
            "variants": self._sampled(variants, context, weights),
            "seconds": round(perf_counter() - started, 1),
        }

    def _sampled(self, variants: Mapping[str, DecodeCase], context: int, weights: int) -> list[dict[str, Any]]:
        """Samples of all variants, taken in turns."""
        steps, samples = self.recipe.steps, dict[str, dict[str, Any]]()
        for name, case in variants.items():  # captures, and warms up
            tallies = decode(case, context, steps).tallies
            read, first = read_bytes(tallies) / steps, tallies[0].report()
            samples[name] = {
                "name": name, "plan": "dense" if case.plan.decode is None else self.recipe.plan,
                "bytes": weights + read, "kv_bytes": read,
                "visible_tokens": first["visible_tokens"], "density": first["density"], "tpot_s": [], "replay_s": [],
            }  # fmt: skip
        for number in range(self.recipe.repeats):
            for name in rotated(list(variants), number):
                samples[name]["tpot_s"] += digits([decode(variants[name], context, steps).mean_s], 6)
                if self.capture:
                    samples[name]["replay_s"] += digits(
                        [gpu_seconds(_replay(variants[name], context, steps)) / steps], 6
                    )
        if self.recipe.profile and self.capture:
            for name, case in variants.items():
                samples[name]["kernels"] = kernel_times(case, context, steps)
        return list(samples.values())


def _dense_below(slots: Slots, rule: Rule) -> int:
    """Return the context from which the engine decodes by the plan; as ``FastPath`` decides it."""
    reserved = slots.batch.table.shape[1] * slots.batch.page_size
    measured = measure_crossover(slots, rule, reserved)
    return reserved + 1 if measured is None else min(measured, reserved + 1)


def _replay(case: DecodeCase, context: int, steps: int) -> Callable[[], None]:
    """Assign the rows of a sample; returns what launches its steps, of which the host reads no tokens."""
    rule, slots = rule_of(case.plan), case.slots
    tables = [cache.table.planned(0) for cache in case.caches]
    slots.assign([Assignment(pages, context, row, Sampling(), 1, rule) for row, pages in enumerate(tables)], steps)
    dense = rule is None or context + 1 < case.dense_below

    def launch() -> None:
        for number in range(steps):
            slots.run(StepKind("dense" if dense else "sparse"), number)

    return launch


def kernel_times(case: DecodeCase, context: int, steps: int) -> list[dict[str, Any]]:
    """Return the kernels of a sample: launches and seconds per step, slowest first.

    Kernels may overlap with the previous one, so their sum may exceed the step.
    """
    _replay(case, context, steps)()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        _replay(case, context, steps)()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in recorded.events() or []:
        if event.device_type == DeviceType.CUDA:
            times[event.name[:NAME_CHARACTERS]].append(event.time_range.elapsed_us() / 1e6)
    return [
        {"name": name, "launches": len(seconds) / steps, "seconds": float(f"{sum(seconds) / steps:.4g}")}
        for name, seconds in sorted(times.items(), key=lambda item: -sum(item[1]))
    ]
