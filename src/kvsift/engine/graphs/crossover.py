"""The context length below which dense decoding is faster: attention on the pools that will be decoded on a GPU, whole
steps over random keys and values on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Lock
from time import perf_counter

import torch

from kvsift.collector import collector_off
from kvsift.engine.graphs.feeds import Assignment
from kvsift.engine.graphs.slots import Slots, on_device, warm_up
from kvsift.engine.sampling import Sampling
from kvsift.layer.paged_decode import StepMode
from kvsift.models.forward_pass import ForwardPass
from kvsift.models.hf.layer import SparseLayer
from kvsift.models.hf.sparse import SparseCache
from kvsift.plan.plan import Plan, Rule

log = logging.getLogger("kvsift")
NEVER = 1 << 31  # sparse attention does not catch up
SHORT, LONG = 16 << 10, 64 << 10  # tokens; where a cache is large enough
ROUNDS = 5
MODES: tuple[StepMode, StepMode] = ("dense", "sparse")
LEAST, MOST_S = 1024, 0.5  # on a CPU: tokens of the shortest context that is timed, and seconds for a length


def measure_crossover(slots: Slots, rule: Rule, reserved: int) -> int | None:
    """Return the context length from which on sparse attention is faster, from two lengths and straight lines.

    Args:
        slots: idle.
        rule: a sparse rule.
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
        dtype=slots.dtype, device=slots.tokens.device,
    )  # fmt: skip
    slots.assign([], 0)
    times = {}
    with on_device(queries.device):
        captured = [_captured(partial(_attend_all, slots, queries, mode)) for mode in MODES]
        for length in (short, long):
            pages = -(-length // slots.batch.page_size)
            tables = [_pages(slots, slot * pages, pages) for slot in range(slots.num_slots)]
            slots.assign([Assignment(table, length - 1, 0, Sampling(), 0, rule) for table in tables], 0)
            slots.batch.advance()
            times[length] = (_seconds(captured[0]), _seconds(captured[1]))
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
    with collector_off():
        warm_up(run)
        cuda_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(cuda_graph):
            run()
    return cuda_graph


def _seconds(cuda_graph: torch.cuda.CUDAGraph) -> float:
    """Return the time of the fastest of some replays."""
    times = []
    for _ in range(ROUNDS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        cuda_graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return min(times)


class HostCrossover:
    """Crossings of a model's decode steps on a CPU, for each rule once. Threads may share it.

    Contexts shorter than twice the budget are dense, and nothing is measured for them. For longer ones steps are timed
    at a length and at twice the length, and again at longer ones while dense steps are faster and some request has so
    many tokens: what was decided about shorter contexts stays.

    Args:
        new_cache: plan, tokens -> a cache with room for them and one of them in it.
    """

    def __init__(self, new_cache: Callable[[Plan, int], SparseCache]) -> None:
        self._new_cache = new_cache
        self._lock = Lock()
        self._known: dict[str, tuple[int | None, int]] = {}  # the crossover, if it was found, and tokens decided about

    def of(self, rule: Rule, length: int, model: ForwardPass) -> int:
        """The length below which a context is to be decoded densely, for a request of ``length`` tokens in all."""
        with self._lock:
            least = max(LEAST, 2 * rule.budget.limit(2 * LEAST))
            found, decided = self._known.get(str(rule), (None, least))
            while found is None and decided < length:
                short, decided = decided, 2 * decided
                meeting = crossover_length(self._times(rule, (short, decided), model))
                found = None if meeting > decided else max(meeting, short)
                self._known[str(rule)] = found, decided
                if found is not None:
                    log.info("sparse decode steps are faster from %d tokens on under %s", found, rule)
            return decided + 1 if found is None else found

    def _times(self, rule: Rule, lengths: tuple[int, int], model: ForwardPass) -> dict[int, tuple[float, float]]:
        """Seconds of a dense and of a sparse step at each length, over one cache."""
        never = replace(rule, budget=replace(rule.budget, min_context=NEVER))
        cache, times = self._new_cache(Plan(None, rule), lengths[1]), {}
        for length in lengths:
            extend_randomly(cache, length)
            times[length] = _seconds_in_turns(model, cache, (Plan(None, never), Plan(None, rule)))
        return times


def _seconds_in_turns(model: ForwardPass, cache: SparseCache, plans: tuple[Plan, Plan]) -> tuple[float, float]:
    """Seconds of a step under each of two plans: the fastest of some, which take turns."""
    token, started, rounds = torch.zeros(1, dtype=torch.int64), perf_counter(), list[list[float]]()
    while len(rounds) < 3 or (len(rounds) <= ROUNDS and perf_counter() - started < MOST_S):
        rounds.append([])
        for plan in plans:
            cache.replan(plan)
            model.decode(token, [cache])  # the first step under a plan learns where everything is
            before = perf_counter()
            model.decode(token, [cache])
            rounds[-1].append(perf_counter() - before)
    dense, sparse = (min(of_plan[1:]) for of_plan in zip(*rounds))
    return dense, sparse


def extend_randomly(cache: SparseCache, length: int) -> None:
    """Store random keys and values behind the tokens of a cache of one sequence, the same ones in all layers."""
    numbers = torch.Generator().manual_seed(length)
    made: dict[tuple[int, int, int], list[torch.Tensor]] = {}
    for layer in cache.layers:
        if not isinstance(layer, SparseLayer) or (attention := layer.attention) is None:
            continue  # a window stays as short as it is
        sizes = attention.shape.num_kv_heads, length - attention.store.lengths[0], attention.shape.head_dim
        if sizes not in made:
            made[sizes] = [torch.randn(sizes, generator=numbers).to(attention.like.dtype) for _ in range(2)]
        attention.store.append(0, *made[sizes])
        layer.columns = length
