"""The server's front end, which gets the settings, so that it can refuse requests before they reach the engine."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from kvsift.vllm.engine_state import state_of


class FrontEnd(StatLoggerBase):  # type: ignore[misc]
    """vLLM shows its configuration in this process to loggers of statistics alone; this one logs nothing."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        state_of(vllm_config)

    def record(self, *_: Any, **__: Any) -> None:
        """No-op."""

    def log_engine_initialized(self) -> None:
        """No-op."""
