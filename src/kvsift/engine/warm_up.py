"""Warming up: the memory and the captured steps that first clients would wait for are there before they come."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from kvsift.batching.loop import Loop
from kvsift.batching.row import Row
from kvsift.engine.model_runner import ModelRunner
from kvsift.engine.rows import TextOutput
from kvsift.engine.transcript import Request
from kvsift.layer.layer_cache import DEFAULT_PAGE_SIZE
from kvsift.layer.paged_decode import rule_of
from kvsift.plan.plan import Plan


class WarmUp(NamedTuple):
    """What was done before the first prompt.

    Attributes:
        num_tokens: for which memory is allocated.
        num_steps: that were captured.
        seconds: that it took.
    """

    num_tokens: int
    num_steps: int
    seconds: float


def warm_up(runner: ModelRunner, loop: Loop, plans: Sequence[Plan], num_tokens: int | None) -> WarmUp:
    """See ``LLM.warm_up``. Steps of the first plan that selects serve dense rows, too."""
    started = perf_counter()
    pooled = [plan for plan in plans if runner.reason_apart(plan) is None]
    captured = [plan for plan in pooled if runner.composed_reason(plan) is None]
    if not captured:
        return WarmUp(0, 0, perf_counter() - started)
    plan = next((plan for plan in captured if rule_of(plan) is not None), captured[0])
    _answer(runner, loop, plan)
    num_pages = None if num_tokens is None else -(-num_tokens // DEFAULT_PAGE_SIZE)
    num_steps = loop.prepare(plan, {kind for each in pooled for kind in each.summaries}, num_pages)
    return WarmUp(loop.kv.pages.num_pages * DEFAULT_PAGE_SIZE, num_steps, perf_counter() - started)


def _answer(runner: ModelRunner, loop: Loop, plan: Plan) -> None:
    """Read a chunk and decode a token: kernels are compiled, and the layers are known."""
    length = min(loop.grid, (runner.directory.max_positions or loop.grid + 1) - 1)  # too short to be shared
    request = Request([0] * length, 2)
    row = Row(request.ids, plan, 2, TextOutput(request, runner.tokenizer, runner.device))
    loop.submit(row)
    while not row.is_ended:
        loop.step(unless=lambda: row.is_ended)
    loop.close(row)
    if row.error is not None:
        raise row.error
