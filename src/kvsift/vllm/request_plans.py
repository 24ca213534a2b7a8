"""The plan of each request, and the row of the batch that it has in a step.

vLLM shows requests to logits processors: the only public interface that sees both a request's arguments
(``extra_args``; ``vllm_xargs`` over HTTP) and its place in the batch. This one leaves the logits alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import is_auto
from kvsift.vllm import compat
from kvsift.vllm.engine_state import EngineState, known_state, state_of
from kvsift.vllm.settings import KEY, read_plan


class RequestPlans(compat.LogitsProcessor):  # type: ignore[misc]
    """Plans by row, for both model runners: V1 calls ``update_state``, V2 ``add_request``."""

    def __init__(self, vllm_config: Any, *_: Any) -> None:
        self._state: EngineState | None = state_of(vllm_config)

    @classmethod
    def validate_params(cls, params: Any) -> None:
        """Refuse a request whose plan is none, or is not allowed here (HTTP 400)."""
        spec = _spec_of(params)
        if spec is None:
            return
        state = known_state()
        if state is None:  # an offline LLM, which does not notify this process
            if not is_auto(spec):  # which only the engine can look up
                read_plan(spec)
        else:
            state.plan_for(spec)

    def update_state(self, update: Any) -> None:
        """Follow the batch of model runner V1."""
        if self._state is None or update is None:
            return
        rows = self._state.plans
        for row in update.removed:
            rows.pop(row, None)
        for row, params, _, _ in update.added:
            self._put(row, params)
        for source, target, direction in update.moved:
            first, second = rows.pop(source, None), rows.pop(target, None)
            if first is not None:
                rows[target] = first
            if second is not None and compat.is_swap(direction):
                rows[source] = second

    def add_request(self, row: int, params: Any) -> bool:
        """Take the slot of a request in model runner V2; its logits stay as they are."""
        if self._state is not None:
            self._put(row, params)
        return False

    def _put(self, row: int, params: Any) -> None:
        assert self._state is not None
        self._state.plans.pop(row, None)
        spec = _spec_of(params)
        if spec is not None:
            self._state.plans[row] = self._plan(self._state, spec)

    def _plan(self, state: EngineState, spec: Any) -> Plan:
        try:
            return state.plan_for(spec)
        except InputError as error:  # an offline LLM did not know; an exception here would end the engine
            if state.on_gpu and not state.settings.allows_dense:
                compat.logger.error("kvsift: %s This request follows the server's plan.", error)
                return state.settings.plan
            compat.logger.error("kvsift: %s This request is decoded densely.", error)
            return Plan()

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor, *_: Any) -> torch.Tensor:
        return logits


def _spec_of(params: Any) -> Any:
    """The plan that sampling parameters name; None if they name none."""
    return (getattr(params, "extra_args", None) or {}).get(KEY)
