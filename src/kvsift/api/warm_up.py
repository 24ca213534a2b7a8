"""Warming up: the memory and the captured steps that first clients would wait for are there before they come."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import NamedTuple

from kvsift.engine.engine import Engine
from kvsift.engine.follow import follow
from kvsift.engine.loop import OUT_OF_MEMORY, Loop
from kvsift.engine.options import GenerateOptions
from kvsift.engine.request import Request
from kvsift.engine.sequence import EngineSequence
from kvsift.engine.transcript import TextOutput
from kvsift.layer.layer_cache import DEFAULT_PAGE_SIZE
from kvsift.layer.paged_decode import rule_of
from kvsift.plan.plan import Plan

MOST_READ = 32768  # tokens, to see a rule of prefill leave something out


class WarmUp(NamedTuple):
    """What was done before the first prompt.

    Attributes:
        num_tokens: tokens that memory is allocated for.
        num_steps: number of captured steps.
        seconds: time that it took.
    """

    num_tokens: int
    num_steps: int
    seconds: float


def warm_up(runner: Engine, loop: Loop, plans: Sequence[Plan], num_tokens: int | None) -> WarmUp:
    """See ``LLM.warm_up``. Steps of the first plan that selects serve dense sequences, too."""
    started = perf_counter()
    pooled = [plan for plan in plans if runner.reason_apart(plan) is None]
    captured = [plan for plan in pooled if runner.reason_uncaptured(plan) is None]
    if not captured:
        return WarmUp(0, 0, perf_counter() - started)
    plan = next((plan for plan in captured if rule_of(plan) is not None), captured[0])
    _answer(runner, loop, plan)
    for each in {str(plan.prefill): plan for plan in pooled if plan.prefill is not None}.values():
        loop.call(partial(_read, runner, loop.grid, each))
    num_pages = None if num_tokens is None else -(-num_tokens // DEFAULT_PAGE_SIZE)
    exact_plan = runner.executed_plan(runner.plans.verified(plan), 0, GenerateOptions(exact=True))
    num_steps = loop.prepare(plan, exact_plan, {kind for each in pooled for kind in each.summaries}, num_pages)
    return WarmUp(loop.pages.kv.pages.num_pages * DEFAULT_PAGE_SIZE, num_steps, perf_counter() - started)


def _answer(runner: Engine, loop: Loop, plan: Plan) -> None:
    """Read a chunk and decode a token: kernels are compiled, and the layers are known."""
    length = min(loop.grid, (runner.directory.max_positions or loop.grid + 1) - 1)  # too short to be shared
    request = Request([0] * length, 2, plan)
    output = TextOutput(request, runner.tokenizer, runner.device)
    seq = EngineSequence(request, output)
    for _ in follow(loop, [seq], [output]):
        pass
    if seq.error is not None:
        raise seq.error


def _read(runner: Engine, grid: int, plan: Plan) -> None:
    """Read a prompt of which a rule of prefill leaves something out, and which ends in a segment, in chunks of the
    loop: kernels are compiled."""
    rule, longest = plan.prefill, min(runner.directory.max_positions or MOST_READ, MOST_READ)
    assert rule is not None
    end = grid + rule.method.segment_size // 2 + 1
    start = next((start for start in range(grid, longest - end, grid) if not rule.is_dense(-1, start, start + 1)), None)
    if start is None:
        return
    with suppress(*OUT_OF_MEMORY):
        cache = runner.new_cache(plan, start + end)
        for first in range(0, start + end, grid):
            runner.feed(cache, [0] * min(grid, start + end - first))
