"""Times on the host: all variants in turns, a cold cache before each, with the bandwidth of the same round.

A decode step walks all layers, so the keys of a layer are in memory and not in the cache: before every sample, more
is read than the cache holds. The bandwidth of a shared machine varies by a factor of 1.6 within an hour, so every
round measures it. The load of other processes is recorded too; medians leave out rounds in which it is high
(``report.quiet_rounds``). torch.utils.benchmark times one variant after the other, in a warm cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

import psutil
import torch

from kvsift_lab.bench.recipe import COLD_BYTES
from kvsift_lab.bench.timing import rotated
from kvsift_lab.numbers import digits

SPAN_S = 0.5  # of a measurement of that share: the system counts in hundredths of a second
READ_BYTES = 256 << 20  # of a measurement of bandwidth; eight times a large cache
WARM_UP_ROUNDS = 2
BUSY = "user", "nice", "system", "irq", "softirq", "steal"  # what a processor does where it is not idle

Run = Callable[[], object]


class Rounds(NamedTuple):
    """Samples of all variants, an entry per round.

    Attributes:
        seconds: by variant.
        bandwidth: bytes per second of a sequential read by all threads.
        others: share of the processors that other processes took; None where the system does not report it.
    """

    seconds: dict[str, list[float]]
    bandwidth: list[float]
    others: list[float | None]

    def document(self) -> dict[str, Any]:
        """Return the rounds for a result file, rounded."""
        samples = {name: digits(seconds) for name, seconds in self.seconds.items()}
        return {"samples_s": samples, "bandwidth": digits(self.bandwidth, 4), "others": self.others}


def cold_rounds(
    runs: Mapping[str, Run], repeats: int, cold_bytes: int = COLD_BYTES, bandwidth: Callable[[], float] | None = None,
    again: Collection[str] = (),
) -> Rounds:  # fmt: skip
    """Time every run once per round; each round starts with the next one.

    Args:
        runs: by name.
        repeats: rounds that count, after ``WARM_UP_ROUNDS``.
        cold_bytes: read before every sample.
        bandwidth: bytes per second, measured once per round; ``read_bandwidth`` by default.
        again: runs of which the second of two is timed: they read more than the cache holds.
    """
    names, measure = list(runs), bandwidth or read_bandwidth
    cold = torch.ones(max(cold_bytes // 8, 1), dtype=torch.int64)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    speeds: list[float] = []
    others: list[float | None] = []
    for name in names * WARM_UP_ROUNDS:
        runs[name]()
    load = OtherProcesses()
    for number in range(repeats):
        for name in rotated(names, number):
            cold.sum()
            if name in again:
                runs[name]()
            started = perf_counter()
            runs[name]()
            seconds[name].append(perf_counter() - started)
        speeds.append(measure())
        if load.elapsed_s >= SPAN_S or number == repeats - 1:
            others += [load.share()] * (number + 1 - len(others))
            load = OtherProcesses()
    return Rounds(seconds, speeds, others)


def read_bandwidth() -> float:
    """Return the bytes per second of a sequential read by all threads, the best of three; by torch, of one, without the
    compiled core."""
    from kvsift import native

    if native.available():
        buffer = torch.empty(READ_BYTES, dtype=torch.uint8)
        native.advise_huge(buffer)
        buffer.fill_(1)
        arguments = buffer.data_ptr(), READ_BYTES, native.num_threads(None)
        return READ_BYTES / min(float(native.core.read_seconds(*arguments)) for _ in range(3))
    numbers = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    started = perf_counter()
    numbers.sum()
    return READ_BYTES / (perf_counter() - started)


class OtherProcesses:
    """Time of processors, from now on, of processes other than one and its living descendants, and stolen time.

    Args:
        root: id of that process; this one by default.
        processors: numbers of those that count; all by default.
    """

    def __init__(self, root: int | None = None, processors: Collection[int] = ()) -> None:
        self._root, self._processors = psutil.Process(root), set(processors)
        self._started, self._before = perf_counter(), self._seconds()

    @property
    def elapsed_s(self) -> float:
        return perf_counter() - self._started

    def share(self) -> float | None:
        """Return it as a share of all their time so far; None if the system does not count it."""
        count, busy, own = self._seconds()
        _, busy_before, own_before = self._before
        if not count:
            return None
        return round(max(0.0, busy - busy_before - own + own_before) / count / self.elapsed_s, 3)

    def _seconds(self) -> tuple[int, float, float]:
        """Return the number of processors, their busy seconds since boot, and those of the process and its
        descendants."""
        try:
            times = psutil.cpu_times(percpu=True)
        except OSError:
            return 0, 0.0, 0.0
        counted = [each for number, each in enumerate(times) if number in self._processors or not self._processors]
        busy = sum(getattr(each, kind, 0.0) for each in counted for kind in BUSY)
        own = 0.0
        for process in (self._root, *self._root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it has ended
                own += sum(process.cpu_times()[:2])
        return len(counted), busy, own
