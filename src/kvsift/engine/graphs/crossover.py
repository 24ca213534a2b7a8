"""The context length below which dense attention is faster, measured on the pools that will be decoded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kvsift.engine.graphs.feeds import Assignment
from kvsift.engine.graphs.slots import Slots, on_device, warm_up
from kvsift.engine.sampling import Sampling
from kvsift.layer.paged_decode import StepMode
from kvsift.plan.plan import Rule

NEVER = 1 << 31  # sparse attention does not catch up
SHORT, LONG = 16 << 10, 64 << 10  # tokens; where a cache is large enough
ROUNDS = 5
MODES: tuple[StepMode, StepMode] = ("dense", "sparse")


def measure_crossover(slots: Slots, rule: Rule, reserved: int) -> int | None:
    """Return the context length from which on sparse attention is faster, from two lengths and straight lines.

    Args:
        slots: idle.
        rule: of sparse attention.
        reserved: tokens that the sequences have pages for.

    Returns:
        Tokens; None if the pools are too small to tell, since a list would hold most of them.
    """
    budget = rule.budget
    short = max(2 * budget.limit(min(reserved, SHORT)), budget.min_context, min(SHORT, reserved // 2))
    long = min(reserved, max(LONG, 2 * short))
    if long < 2 * short or all(layer.summary is None for layer in slots.layers):
        return None
    shape = slots.layers[0].shape
    queries = torch.randn(
        slots.num_slots, shape.num_query_heads, shape.head_dim,
        dtype=slots.layers[0].kv.keys.dtype, device=slots.tokens.device,
    )  # fmt: skip
    slots.assign([], 0)
    times = {}
    with on_device(queries.device):
        graphs = [_captured(partial(_attend_all, slots, queries, mode)) for mode in MODES]
        for length in (short, long):
            pages = -(-length // slots.batch.page_size)
            tables = [_pages(slots, slot * pages, pages) for slot in range(slots.num_slots)]
            slots.assign([Assignment(table, length - 1, 0, Sampling(), 0, rule) for table in tables], 0)
            slots.batch.advance()
            times[length] = (_seconds(graphs[0]), _seconds(graphs[1]))
    slots.assign([], 0)
    return crossover_length(times)


def crossover_length(times: dict[int, tuple[float, float]]) -> int:
    """Return the length at which two straight lines meet.

    Args:
        times: context length -> seconds of dense and of sparse attention, at two lengths.

    Returns:
        The length from which on sparse is faster; 0 if it always is, ``NEVER`` if dense gains on it.
    """
    (short, (dense, sparse)), (long, (dense_long, sparse_long)) = sorted(times.items())
    gain, gain_long = dense - sparse, dense_long - sparse_long
    slope = (gain_long - gain) / (long - short)
    if slope <= 0:
        return 0 if min(gain, gain_long) > 0 else NEVER
    return min(max(0, round(short - gain / slope)), NEVER)


def _pages(slots: Slots, first: int, count: int) -> list[int]:
    """Return pages of the pool, whoever has written into them; a small one is gone through again."""
    num_pages = slots.layers[0].kv.keys.shape[1]
    return [page % num_pages for page in range(first, first + count)]


def _attend_all(slots: Slots, queries: torch.Tensor, mode: StepMode) -> None:
    # every layer in turn: one alone would be read from the cache of the GPU
    for layer in slots.layers:
        if layer.summary is not None:
            layer.attend(queries, mode)


@torch.inference_mode()
def _captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    warm_up(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Return the time of the fastest of some replays."""
    times = []
    for _ in range(ROUNDS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return min(times)
