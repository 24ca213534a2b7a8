"""Decoding end to end: the engine's own loop, showing everything and sifting, on one model and one set of pools."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch

from kvsift.benchmarks.decode_case import (
    Host,
    decode,
    filled_cache,
    new_slots,
    pool_bytes,
    read_bytes,
    weight_bytes,
)
from kvsift.benchmarks.decode_profile import kernel_times
from kvsift.benchmarks.timing import gpu_seconds
from kvsift.engine.crossover import measure_crossover
from kvsift.engine.memory import available_bytes
from kvsift.engine.sampling import Sampling
from kvsift.engine.slots import Seat, Slots, Step, StepKind
from kvsift.errors import InputError, unknown
from kvsift.models.decoder_step import DecoderStep
from kvsift.models.transformers_load import ModelDirectory, choose_dtype
from kvsift.models.transformers_random import SHAPES, random_model
from kvsift.models.transformers_step import TransformersStep
from kvsift.runtime.paged_decode import reason_against, rule_of
from kvsift.runtime.plan import Plan
from kvsift.runtime.spec import parse_plan

ROOM_SHARE = 1 / 16  # of the pools: graphs, workspaces and tables of angles


@dataclass(frozen=True)
class Recipe:
    """Everything a result depends on.

    Attributes:
        model: a shape, or a directory.
        random: weights are drawn for the shape; else they are the directory's.
        contexts, batches: every pair of them is a point.
        plan: that sifts; the baseline is "dense".
        steps: tokens decoded for a sample.
        repeats: samples of each variant.
        profile: also sum the kernels of a step by name.
        max_seconds: no point is begun after so long.
    """

    model: str
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    plan: str = "quest:budget=2048"
    steps: int = 32
    repeats: int = 5
    profile: bool = False
    max_seconds: float | None = None
    random: bool = True

    def __post_init__(self) -> None:
        if self.random and self.model not in SHAPES:
            raise unknown("shape", self.model, SHAPES)
        if not self.contexts or not self.batches:
            raise InputError("there is nothing to measure: name at least one context and batch.")
        plan = parse_plan(self.plan)
        reason = "it skips nothing" if rule_of(plan) is None else reason_against(plan)
        if reason is not None:
            raise InputError(f"plan {self.plan!r} cannot be measured against dense captured steps: {reason}.")


def load(recipe: Recipe, device: torch.device) -> Any:
    """The model, ready for inference; random weights are bfloat16.

    Raises:
        InputError: if a directory cannot be used.
    """
    if recipe.random:
        return random_model(recipe.model, device, torch.bfloat16)
    directory = ModelDirectory.check(recipe.model)
    return directory.load(device, choose_dtype("auto", device, directory.config))


def run(recipe: Recipe, model: Any, capture: bool = True) -> Iterator[dict[str, Any]]:
    """Point by point as they are measured; those left out with their reason.

    Args:
        recipe: what to measure.
        model: on its device, ready for inference.
        capture: False runs steps as they are, for tests on a CPU.
    """
    started = perf_counter()
    plan = parse_plan(recipe.plan)
    step = _step_of(model)
    for batch in recipe.batches:
        for context in sorted(recipe.contexts):
            here = {"context": context, "batch": batch}
            if recipe.max_seconds is not None and perf_counter() - started > recipe.max_seconds:
                yield here | {"reason": f"--max-seconds {recipe.max_seconds:g} had passed"}
                continue
            try:
                _require_room(recipe, model, plan, context, batch)
                yield here | _measure(recipe, model, step, plan, context, batch, capture)
            except (InputError, torch.OutOfMemoryError) as error:
                yield here | {"reason": str(error).splitlines()[0]}
            gc.collect()
            if capture:
                torch.cuda.empty_cache()


def _step_of(model: Any) -> Step:
    """As ``FastPath`` takes it; refuses a model whose steps cannot be captured."""
    if DecoderStep.reason_against(model) is None:
        return DecoderStep(model)
    reason = TransformersStep.reason_against(model)
    if reason is not None:
        raise InputError(f"steps of this model cannot be captured, so there is nothing to measure: {reason}.")
    return TransformersStep(model)


@torch.inference_mode()
def _measure(
    recipe: Recipe, model: Any, step: Step, plan: Plan, context: int, batch: int, capture: bool
) -> dict[str, Any]:
    started = perf_counter()
    cache = filled_cache(model, plan, context, batch, recipe.steps)
    sifted = new_slots(step, cache, plan, batch, capture)
    dense = new_slots(step, cache, Plan(), batch, capture)
    dense_below = _dense_below(sifted) if capture else 0
    hosts = {"dense": Host(dense, Plan()), "sifted": Host(sifted, plan)}
    if context + 1 < dense_below:  # what the engine does by itself
        hosts["auto"] = Host(sifted, plan, dense_below)
    weights = weight_bytes(model)
    return {
        "weight_bytes": weights,
        "pool_bytes": cache.num_bytes,
        "dense_below": dense_below,
        "variants": _sampled(recipe, hosts, context, weights, capture),
        "seconds": round(perf_counter() - started, 1),
    }


def _sampled(
    recipe: Recipe, hosts: Mapping[str, Host], context: int, weights: int, capture: bool
) -> list[dict[str, Any]]:
    """Samples of all variants, taken in turns."""
    found: dict[str, dict[str, Any]] = {}
    for name, host in hosts.items():  # captures, and warms up
        _, tallies = decode(host, context, recipe.steps)
        read, first = read_bytes(tallies) / recipe.steps, tallies[0].report()
        found[name] = {
            "name": name, "plan": str(host.plan), "bytes": weights + read, "kv_bytes": read,
            "visible_tokens": first["visible_tokens"], "density": first["density"], "tpot_s": [], "replay_s": [],
        }  # fmt: skip
    names = list(hosts)
    for number in range(recipe.repeats):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds, _ = decode(hosts[name], context, recipe.steps)
            found[name]["tpot_s"].append(float(f"{seconds:.6g}"))
            if capture:
                found[name]["replay_s"].append(float(f"{_replay_seconds(hosts[name], context, recipe.steps):.6g}"))
    if recipe.profile and capture:
        for name, host in hosts.items():
            found[name]["kernels"] = kernel_times(partial(_replay, host, context, recipe.steps), recipe.steps)
    return list(found.values())


def _dense_below(slots: Slots) -> int:
    """Contexts shorter than this are shown in full by the engine; as ``FastPath`` decides it."""
    reserved = slots.batch.table.shape[1] * slots.batch.page_size
    measured = measure_crossover(slots, reserved)
    return reserved + 1 if measured is None else min(measured, reserved + 1)


def _replay_seconds(host: Host, context: int, steps: int) -> float:
    """Of the device for a step, when nobody reads the tokens."""
    _seat(host, context, steps)
    return gpu_seconds(lambda: _launch(host, context, steps)) / steps


def _replay(host: Host, context: int, steps: int) -> None:
    _seat(host, context, steps)
    _launch(host, context, steps)


def _seat(host: Host, context: int, steps: int) -> None:
    host.steps.seat([Seat(row, context, row, Sampling(), 1) for row in range(host.steps.num_slots)], steps)


def _launch(host: Host, context: int, steps: int) -> None:
    dense = rule_of(host.plan) is None or context + 1 < host.dense_below(host.steps)
    for number in range(steps):
        host.steps.run(StepKind(dense, sampled=False), number)


def _require_room(recipe: Recipe, model: Any, plan: Plan, context: int, batch: int) -> None:
    """Refuse what cannot fit, before anything is allocated."""
    free = available_bytes(model.device)
    config = model.config.get_text_config(decoder=True)
    need = pool_bytes(config, plan, context, batch, recipe.steps, model.dtype.itemsize) * (1 + ROOM_SHARE)
    if free is not None and need > free:
        raise InputError(f"its pools need {need / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free")


def head(recipe: Recipe) -> dict[str, Any]:
    """What a result file begins with."""
    return {"kind": "decode", "recipe": asdict(recipe)}
