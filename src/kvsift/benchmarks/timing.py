"""Times of launches that take microseconds, all variants in turns, with a cold cache.

A launch this short cannot be timed from the host: dozens are captured in a CUDA graph and replayed. Each launch of a
graph reads another set of buffers, and the sets are so many that none is still in the L2 cache when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

import torch

from kvsift.engine.slots import warm_up

LAUNCHES = 24  # in a graph, at least: what replaying costs is then a few hundredths of a microsecond for each
COLD_BYTES = 1 << 30  # read between two visits to one set; the L2 cache of an H200 holds 60 MB
WARM_UP_ROUNDS = 2

Run = Callable[[int], object]  # one launch on the buffers of that number
Timer = Callable[[], float]  # measures once more: seconds per launch
Clock = Callable[[Run, int], Timer]  # of a run over so many sets of buffers


def graph_clock(run: Run, num_sets: int) -> Timer:
    """Seconds of one launch on a GPU, from replays of a graph of launches over all sets.

    Raises:
        RuntimeError: if the launches do not run, or cannot be captured.
    """

    def run_all() -> None:
        for number in range(num_sets):
            run(number)

    warm_up(run_all)
    launches = -(-LAUNCHES // num_sets) * num_sets
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in range(launches):
            run(launch % num_sets)
    # the graph knows addresses only: ``run`` keeps alive what lies there
    return lambda run=run: gpu_seconds(graph.replay) / launches  # type: ignore[misc]


def gpu_seconds(run: Callable[[], object]) -> float:
    """Of the device, from the beginning of ``run`` to the end of what it has queued."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def host_clock(run: Run, num_sets: int) -> Timer:
    """Seconds of one launch by the wall clock: for tests without a GPU."""

    def seconds() -> float:
        started = perf_counter()
        for number in range(num_sets):
            run(number)
        return (perf_counter() - started) / num_sets

    return seconds


def interleaved(timers: Mapping[str, Timer], repeats: int) -> dict[str, list[float]]:
    """Samples of all timers, taken in turns, so that a slow moment of the machine meets them all; each round begins
    with another one."""
    names = list(timers)
    for _ in range(WARM_UP_ROUNDS):
        for name in names:
            timers[name]()
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(repeats):
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            samples[name].append(timers[name]())
    return samples
