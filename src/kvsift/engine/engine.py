"""A model, and the thread that serves requests to it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Self

import torch

from kvsift.engine.executor import Executor
from kvsift.engine.graphs.crossover import HostCrossover
from kvsift.engine.loop import STATE_BYTES, Loop
from kvsift.engine.model_runner import ModelRunner
from kvsift.engine.options import GenerateOptions
from kvsift.layer.paged_decode import reason_against, rule_of
from kvsift.models.hf.model_directory import ModelDirectory
from kvsift.models.hf.sparse import SparseCache, make_cache
from kvsift.models.native_step import NativeStep
from kvsift.plan.capabilities import reason
from kvsift.plan.placement import Placement
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.tuned_plan import ModelPlans

SEQUENCES, GPU_SEQUENCES = 8, 64  # that decode in one step, and in captured ones
DEFAULTS = GenerateOptions()
GPU_GRID = 1024  # tokens: a second question reads fewer again than in chunks of 8,192, and other sequences wait less


class Engine(ModelRunner):
    """A model with its pools, prefix cache and scheduler.

    Args:
        directory, device, dtype, place, chunk_size, probe_every, dense_below, path, deterministic, plans: see
            ``ModelRunner``.
        keep_tokens: number of tokens of prompts that are kept for later ones.
        state_bytes: see ``LLM``.

    Attributes:
        loop: serves requests, in a thread of its own from the first one on. Chunks of prompts have ``chunk_size``
            tokens, or ``GPU_GRID``, in whole pages.
    """

    def __init__(
        self, directory: ModelDirectory, device: torch.device, dtype: torch.dtype, place: Placement, chunk_size: int,
        probe_every: int, dense_below: int | str, path: str, deterministic: bool, plans: ModelPlans,
        keep_tokens: int = 0, state_bytes: int = STATE_BYTES,
    ) -> None:  # fmt: skip
        super().__init__(
            directory, device, dtype, place, chunk_size, probe_every, dense_below, path, deterministic, plans
        )
        on_gpu = self.device.type == "cuda"
        most = GPU_SEQUENCES if on_gpu and self.fast_path.enabled and not deterministic else SEQUENCES
        executor = Executor(self, most)
        size = min(self.chunk_size, GPU_GRID) if on_gpu else self.chunk_size
        grid = max(size // executor.page_size, 1) * executor.page_size
        self.loop = Loop(executor, grid, most, keep_tokens, state_bytes, self.fast_path.turn)
        self._crossover = HostCrossover(self._begun_cache)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all answers and the thread that computes them, and free the memory of the cache. Nothing can be asked
        afterwards."""
        self.loop.stop()

    def executed_plan(
        self, plan: Plan, length: int, options: GenerateOptions = DEFAULTS, is_observed: bool = False
    ) -> Plan:
        """The plan as it runs for a request: captured steps know where they are dense, and for others decode is made
        dense in contexts below ``dense_below``.

        On a CPU, where that is "auto", steps are timed between two steps of the engine: once per plan, and again for
        requests that are longer than those before as long as dense steps are faster.

        Args:
            plan: the plan that was asked for.
            length: tokens of the request in all.
            options: those of the request.
            is_observed: what is selected is of use to the request, whatever it costs, as it is to exact answers and
                passages.
        """
        selects = options.exact or options.passages
        leaves_captured = selects or options.logprobs is not None  # or drafts, which know no crossover
        if not leaves_captured and self.reason_uncaptured(plan) is None:
            return plan
        rule, below = rule_of(plan), self.dense_below
        if rule is None:
            return plan
        if not isinstance(below, int):
            below = 0 if is_observed or selects else self.loop.call(partial(self._crossover_of, plan, rule, length))
        if rule.budget.min_context >= below:
            return plan
        dense_below = replace(rule, budget=replace(rule.budget, min_context=below))
        return Plan(dense_below if plan.evicts_prompt else plan.prefill, dense_below)

    def _crossover_of(self, plan: Plan, rule: Rule, length: int) -> int:
        """Where the decode steps of a plan become faster than dense ones on a CPU; 0 elsewhere."""
        own = None if self.device.type != "cpu" or self.deterministic else self.fast_path.forward_pass(self.model)
        if own is None or (reason_against(plan) and reason(rule, NativeStep.of_rules)):
            return 0  # its steps are composed everywhere
        rule = replace(rule, budget=replace(rule.budget, min_context=0))
        return self._crossover.of(rule, length, own)

    def _begun_cache(self, plan: Plan, length: int) -> SparseCache:
        """A cache for so many tokens, of which it has one."""
        cache = make_cache(self.model, plan, probe_every=0, reserve=length, placement=self.place)
        self.feed(cache, [0])
        return cache

    def release(self) -> None:
        """Free the pools and CUDA graphs that no answer needs, and that are kept for later ones."""
        self.loop.release()
