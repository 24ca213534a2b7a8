"""What the parts of the plugin in one process share: vLLM makes each by itself, and hands them a ``VllmConfig``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvsift.errors import InputError
from kvsift.plan.plan import Plan
from kvsift.vllm.counters import DecodeCounters
from kvsift.vllm.refusals import check_config
from kvsift.vllm.settings import Settings, read_plan


@dataclass
class EngineState:
    """State of one engine.

    Attributes:
        plans: by row of model runner V1, or slot of V2; requests without a plan of their own are missing.
        counters: of all layers.
        summary_bytes: of all layers, beside vLLM's KV cache.
        per_request: whether requests may name plans of their own.
        held: memory on a GPU for summaries to come (``gpu_memory``).
    """

    settings: Settings
    plans: dict[int, Plan] = field(default_factory=dict)
    counters: DecodeCounters = field(default_factory=DecodeCounters)
    summary_bytes: int = 0
    per_request: bool = True
    held: Tensor | None = None

    def plan(self, row: int) -> Plan:
        """Return the plan of a row or slot."""
        return self.plans.get(row, self.settings.plan)

    def plan_for(self, spec: Any) -> Plan:
        """Return the plan that a request names (``InputError`` if this engine does not carry it out)."""
        if not self.per_request and read_plan(spec) != self.settings.plan:
            raise InputError(f"On a GPU all requests have the server's plan, {self.settings.plan}; got {spec!r}.")
        return self.settings.plan_for(spec)


_engines: dict[str, EngineState | None] = {}  # by the id of the engine; the parts have nothing else in common


def state_of(config: Any) -> EngineState | None:
    """Return the state of the engine of a ``VllmConfig``; None if it was started without settings.

    Raises:
        InputError: for settings that make no sense, or that this engine cannot carry out.
    """
    key = str(config.instance_id)
    if key not in _engines:
        settings = Settings.read(config.additional_config)
        if settings is not None:
            check_config(config, settings)
        _engines.clear()  # one engine at a time
        on_cpu = config.device_config.device_type == "cpu"
        _engines[key] = None if settings is None else EngineState(settings, per_request=on_cpu)
    return _engines[key]


def known_state() -> EngineState | None:
    """Return the state of the engine of this process, None if it has none or has not been told."""
    return next((state for state in _engines.values() if state is not None), None)
