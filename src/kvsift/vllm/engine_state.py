"""What the parts of the plugin in one process share: vLLM makes each by itself, and hands them a ``VllmConfig``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvsift.plan.plan import Plan
from kvsift.vllm.counters import DecodeCounters
from kvsift.vllm.refusals import check_config
from kvsift.vllm.settings import Settings


@dataclass
class EngineState:
    """State of one engine.

    Attributes:
        plans: by row of model runner V1, or slot of V2; requests without a plan of their own are missing.
        counters: of all layers.
        summary_bytes: of all layers, beside vLLM's KV cache.
    """

    settings: Settings
    plans: dict[int, Plan] = field(default_factory=dict)
    counters: DecodeCounters = field(default_factory=DecodeCounters)
    summary_bytes: int = 0

    def plan(self, row: int) -> Plan:
        """Return the plan of a row or slot."""
        return self.plans.get(row, self.settings.plan)


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
            check_config(config)
        _engines.clear()  # one engine at a time
        _engines[key] = None if settings is None else EngineState(settings)
    return _engines[key]


def known_settings() -> Settings | None:
    """Return the settings of the engine of this process, None if it has none or has not been told."""
    return next((state.settings for state in _engines.values() if state is not None), None)
