"""Times of short launches, all variants in turns, with a cold cache.

A launch of microseconds cannot be timed from the host: dozens are captured in a CUDA graph and replayed. Consecutive
launches read different sets of buffers; there are enough sets that each has left the L2 cache before it is
read again. ``triton.testing.do_bench_cudagraph`` replays one function on the same buffers, and one function after the
other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from kvsift.engine.graphs.slots import warm_up

LAUNCHES = 24  # of a CUDA graph, at least: a replay then costs a few hundredths of a microsecond per launch
COLD_BYTES = 1 << 30  # read between two launches on one set; the L2 cache of an H200 has 60 MB
WARM_UP_ROUNDS = 2

Launch = Callable[[int], object]  # on the buffers of that number
Timer = Callable[[], float]  # takes one sample: seconds per launch
Clock = Callable[[Launch, int], Timer]  # (launch, number of sets of buffers) -> timer


def graph_clock(run: Launch, num_sets: int) -> Timer:
    """Time one launch on a GPU, by replays of a CUDA graph of launches over all sets.

    Raises:
        RuntimeError: if the launches do not run, or cannot be captured.
    """

    def run_all() -> None:
        for number in range(num_sets):
            run(number)

    warm_up(run_all)
    launches = -(-LAUNCHES // num_sets) * num_sets
    cuda_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cuda_graph):
        for launch in range(launches):
            run(launch % num_sets)
    # the CUDA graph holds addresses only: ``run`` keeps the tensors alive
    return lambda run=run: gpu_seconds(cuda_graph.replay) / launches  # type: ignore[misc]


def gpu_seconds(run: Callable[[], object]) -> float:
    """Return the seconds of the device from the start of ``run`` to the end of its queued work."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU has nothing queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(timers: Mapping[str, Timer], repeats: int) -> dict[str, list[float]]:
    """Return samples of all timers, taken in turns, so that a slow moment of the machine meets them all."""
    for name in list(timers) * WARM_UP_ROUNDS:
        timers[name]()
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for number in range(repeats):
        for name in rotated(list(timers), number):
            samples[name].append(timers[name]())
    return samples


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Return the names in the order of a round; each round starts with the next one."""
    first = number % max(1, len(names))
    return [*names[first:], *names[:first]]
