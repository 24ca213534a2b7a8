"""Times on the host: all variants in turns, a cold cache before each, the bandwidth of the same minutes beside them.

A decode step walks all layers, so a layer finds its keys in memory and not in the cache: before every sample more is
read than the cache holds. The bandwidth of a shared machine moves by a factor of 1.6 within an hour, so it is measured
in every round; times that hang on it mean little without. What other processes took of the processors is
recorded too, and medians leave out the rounds in which they took more than ``QUIET``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from kvsift.benchmarks.prefill_layer import COLD_BYTES

QUIET = 0.05  # of the processors, taken by everything else together
FEWEST_QUIET = 3  # rounds; with fewer, all rounds count, and the result says so
SPAN_S = 0.5  # time over which the share of others is taken: the system counts in hundredths of a second
READ_BYTES = 256 << 20  # of a measurement of bandwidth, at most; eight times a large cache
WARM_UP_ROUNDS = 2

Run = Callable[[], object]


class Rounds(NamedTuple):
    """Samples of all variants, a list entry per round.

    Attributes:
        seconds: by variant.
        bandwidth: bytes per second of a sequential read by all threads.
        others: share of the processors that other processes took; None where the system does not say.
    """

    seconds: dict[str, list[float]]
    bandwidth: list[float]
    others: list[float | None]

    def document(self) -> dict[str, Any]:
        """For a result file, five digits."""
        short = {name: [float(f"{s:.5g}") for s in samples] for name, samples in self.seconds.items()}
        others = [None if share is None else round(share, 3) for share in self.others]
        return {"samples_s": short, "bandwidth": [float(f"{b:.4g}") for b in self.bandwidth], "others": others}


def cold_rounds(
    runs: Mapping[str, Run], repeats: int, cold_bytes: int = COLD_BYTES, bandwidth: Callable[[], float] | None = None
) -> Rounds:
    """Time every run once per round; each round begins with another one.

    Args:
        runs: by name.
        repeats: rounds that count, after ``WARM_UP_ROUNDS``.
        cold_bytes: read before every sample.
        bandwidth: bytes per second, measured once per round; ``read_bandwidth`` by default.
    """
    names, measure = list(runs), bandwidth or read_bandwidth
    cold = torch.ones(max(cold_bytes // 8, 1), dtype=torch.int64)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    speeds: list[float] = []
    others: list[float | None] = []
    for name in names * WARM_UP_ROUNDS:
        runs[name]()
    span = _Span()
    for number in range(repeats):
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            cold.sum()
            started = perf_counter()
            runs[name]()
            seconds[name].append(perf_counter() - started)
        speeds.append(measure())
        if span.seconds >= SPAN_S or number == repeats - 1:
            others += [span.others()] * (number + 1 - len(others))
            span = _Span()
    return Rounds(seconds, speeds, others)


def quiet_rounds(others: Sequence[float | None]) -> list[int]:
    """Rounds that medians are taken over: those the machine was left alone in, or all if these are too few."""
    quiet = [number for number, share in enumerate(others) if share is None or share <= QUIET]
    return quiet if len(quiet) >= FEWEST_QUIET else list(range(len(others)))


def conditions(bandwidth: Sequence[float], others: Sequence[float | None]) -> str:
    """The machine during the rounds, in a line."""
    speed = f"{middle(bandwidth, others) / 1e9:.0f} GB/s"
    known = [share for share in others if share is not None]
    quiet = sum(share <= QUIET for share in known)
    if not known:
        return f"{speed}, {len(others)} rounds"
    if quiet < FEWEST_QUIET:
        return f"{speed}, {len(others)} rounds; THE MACHINE WAS BUSY: others took {median(known):.0%} of it"
    return f"{speed}, {quiet} of {len(others)} rounds were quiet and count"


def middle(samples: Sequence[float], others: Sequence[float | None]) -> float:
    """Median over quiet rounds."""
    return median(samples[number] for number in quiet_rounds(others))


def read_bandwidth() -> float:
    """Bytes per second of a sequential read by all threads; by torch where the compiled core is missing."""
    from kvsift import native

    if native.available():
        return float(native.bandwidth(READ_BYTES, torch.get_num_threads())) * 1e9
    numbers = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    started = perf_counter()
    numbers.sum()
    return READ_BYTES / (perf_counter() - started)


class _Span:
    """What the processors did from here on."""

    def __init__(self) -> None:
        self._started, self._busy, self._own = perf_counter(), _busy_s(), _own_s()

    @property
    def seconds(self) -> float:
        return perf_counter() - self._started

    def others(self) -> float | None:
        """Share of all processors that was not ours, and not idle."""
        busy = _busy_s()
        if busy is None or self._busy is None:
            return None
        foreign = busy - self._busy - (_own_s() - self._own)
        return max(0.0, foreign / (self.seconds * (os.cpu_count() or 1)))


def _busy_s() -> float | None:
    """Seconds that all processors have been busy since the start, stolen time included; None where nobody counts."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system
