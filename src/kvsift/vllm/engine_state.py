"""What the parts of the plugin in one process share: vLLM makes each by itself, and hands them a ``VllmConfig``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsift.layer.layer_messages import LayerMessages
from kvsift.layer.paged_decode import Lists
from kvsift.plan.capabilities import check
from kvsift.plan.plan import Plan
from kvsift.plan.tuned_plan import ModelPlans
from kvsift.vllm.counters import PhaseCounters
from kvsift.vllm.refusals import ANCHORS, CPU_PLANS, GPU_REQUESTS, Served, check_config
from kvsift.vllm.settings import Settings, plans_of


@dataclass
class EngineState:
    """State of one engine.

    Attributes:
        plans: plans by row of model runner V1, or slot of V2; requests without a plan of their own are missing.
        counters, prompts: counters of all layers, in decode and in prefill.
        messages: between the layers of a step.
        layers: layers that plans apply to, on a CPU.
        summary_bytes: bytes of all layers, besides vLLM's KV cache.
        max_length: greatest length of a request, in tokens.
        on_gpu: one kernel decodes all sequences, so that their plans have much in common.
        held: memory on a GPU for summaries and lists to come (``gpu_backend.hold``).
        lists: lists on a GPU that layers above attend, by the layer that selects (``gpu_decode.BlockBatch``).
        compiled: dtypes of caches whose kernels are.
        reader: reads plans for this model; None: they name none.
    """

    settings: Settings
    plans: dict[int, Plan] = field(default_factory=dict)
    counters: PhaseCounters = field(default_factory=PhaseCounters)
    prompts: PhaseCounters = field(default_factory=lambda: PhaseCounters("prefill"))
    messages: LayerMessages = field(default_factory=LayerMessages)
    layers: int = 0
    summary_bytes: int = 0
    max_length: int = 0
    on_gpu: bool = False
    held: Tensor | None = None
    lists: dict[int, Lists] = field(default_factory=dict)
    compiled: set[torch.dtype] = field(default_factory=set)
    reader: ModelPlans | None = None

    def plan(self, row: int) -> Plan:
        """Return the plan of a row or slot."""
        return self.plans.get(row, self.settings.plan)

    def probes(self, query: int) -> bool:
        """Whether a sparse query, by its number, is compared with exact attention: each time in another layer."""
        every = self.settings.probe_every
        return bool(every) and query % (every * self.layers + 1) == 0

    def plan_for(self, spec: Any) -> Plan:
        """Return the plan that a request names (``InputError`` if this engine does not carry it out)."""
        plan = self.settings.plan_for(spec, self.reader)
        served = Served(plan, self.settings, self.max_length)
        check(served, ANCHORS, GPU_REQUESTS if self.on_gpu else CPU_PLANS, name_all=True)
        return plan


_engines: dict[str, EngineState | None] = {}  # by the id of the engine; the parts have nothing else in common


def state_of(config: Any) -> EngineState | None:
    """Return the state of the engine of a ``VllmConfig``; None if it was started without settings.

    Raises:
        InputError: for settings that make no sense, or that this engine cannot carry out.
    """
    key = str(config.instance_id)
    if key not in _engines:
        model, device_type = config.model_config, config.device_config.device_type
        reader = plans_of(str(model.model), getattr(model, "revision", None), device_type)
        settings = Settings.read(config.additional_config, reader)
        if settings is not None:
            check_config(config, settings)
        _engines.clear()  # one engine at a time
        _engines[key] = None
        if settings is not None:
            parallel = config.parallel_config
            rank = int(parallel.rank) % int(parallel.tensor_parallel_size)  # vLLM's counts stages of a pipeline, too
            _engines[key] = EngineState(
                settings, {}, PhaseCounters("decode", rank), PhaseCounters("prefill", rank),
                max_length=model.max_model_len, on_gpu=device_type == "cuda", reader=reader,
            )  # fmt: skip
    return _engines[key]


def known_state() -> EngineState | None:
    """Return the state of the engine of this process, None if it has none, or no step was announced yet."""
    return next((state for state in _engines.values() if state is not None), None)
