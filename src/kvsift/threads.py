"""Number and waiting of OpenMP's threads.

A thread of GNU's OpenMP runtime, which torch's wheels for Linux bring, spins 300,000 times (milliseconds) before it
sleeps. Beside other processes, spinning uses up the thread's share of a processor and delays the work that it waits for
by time slices, some fifty times a token. The runtime reads the spin count from the environment, once, when torch loads
it:

- kvsift imported before torch: threads spin ``SPINS`` times. ``kvsift bench busy`` measures the effect.
- torch imported before kvsift: they spin 300,000 times.
- threads of several teams, more than processors: they hardly spin. The thread that loads a model has a team, and
  the engine's thread another; so the first one gives up its team when the engine starts (``end_team``).

Either way, fewer threads decode while other processes use the processors.

Settings of the user are not changed: those of ``WAITING``, OMP_NUM_THREADS and torch.set_num_threads.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import monotonic, process_time
from typing import Any, NamedTuple

SPINS = 30_000
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # settings of the user on waiting
PERIOD_S = 0.5  # between two readings of the processors, which count in hundredths of a second
IDLE = 0.25  # seconds of work per second between two forward passes; with less, a reading is not representative

FEW_TOKENS = 16

log = logging.getLogger("kvsift")
TORCH_WAS_FIRST = "torch" in sys.modules
INHERITED = os.environ.get("GOMP_SPINCOUNT") == str(SPINS)  # from a process of kvsift that started this one
USER_WAITING = {
    name: os.environ[name] for name in WAITING if name in os.environ and not (INHERITED and name == "GOMP_SPINCOUNT")
}
SPINS_SET = sys.platform == "linux" and not USER_WAITING and (INHERITED or not TORCH_WAS_FIRST)
if SPINS_SET:
    os.environ["GOMP_SPINCOUNT"] = str(SPINS)  # of this process and those that it starts


def processors() -> int:
    """Return the number of processors of this process, which in a container or under taskset are not all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def per_process(workers: int) -> int:
    """Return the threads of each of several processes: OMP_NUM_THREADS if set, else its share of the processors."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return max(1, int(first) if first.isdecimal() else processors() // workers)


def use(threads: int | None) -> None:
    """Set the number of threads of torch and the compiled core; None changes nothing."""
    import torch

    if threads is not None:
        _share.keep()
        torch.set_num_threads(threads)


def yield_to_others(num_tokens: int) -> None:
    """Limit the threads of the caller's forward pass over so many tokens to the free processors, unless the user made
    settings.

    Passes over many tokens use all threads: these seldom wait, and each gets its share beside other processes.
    """
    if _START is not None and _most_threads() > 1:
        _share.update(num_tokens <= FEW_TOKENS)


def give_back() -> None:
    """Let the caller compute with all threads again, unless the user has set their number since."""
    if _START is not None and _most_threads() > 1:
        _share.set(_most_threads())


def end_team() -> None:
    """End the OpenMP threads of the calling thread; its next parallel operation starts them again. Does nothing where
    torch has another OpenMP runtime than GNU's.

    A second question of a document of 2,048 tokens waited 400 times for a sleeping thread without this, 12 of 85 ms
    (SmolLM2-135M, two processors).
    """
    if sys.platform != "linux":
        return
    import ctypes  # 2 ms, which the command line need not wait for

    with suppress(OSError):
        for path in set(re.findall(r"/\S*/libgomp[^/\s]*\.so\S*", Path("/proc/self/maps").read_text())):
            pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)  # OpenMP 5.0
            if pause is not None:
                pause(1)  # omp_pause_soft


def report() -> dict[str, Any]:
    """Return the number of threads, how they wait, and the reason."""
    import torch

    return {"number": torch.get_num_threads(), "processors": processors(), "while they wait": _waiting()}


def _waiting() -> str:
    if USER_WAITING:
        settings = ", ".join(f"{name}={text}" for name, text in USER_WAITING.items())
        return f"as the environment says: {settings}"
    fewer = "; while other processes use the processors, fewer threads decode" if _most_threads() > 1 else ""
    if SPINS_SET:
        return f"spin {SPINS:,} times, then sleep: kvsift set GOMP_SPINCOUNT={SPINS}{fewer}"
    if not TORCH_WAS_FIRST:
        return f"as the OpenMP runtime has them wait{fewer}"
    return (
        f"spin for milliseconds, as torch was imported before kvsift{fewer}. Import kvsift first, or set "
        "OMP_WAIT_POLICY=passive"
    )


class _Reading(NamedTuple):
    """Seconds since the start: of the clock, of all work on the processors, and of this process."""

    clock: float
    busy: float
    own: float


def busy_seconds() -> float | None:
    """Seconds of all work on the processors since the system started; None if it does not count them."""
    try:
        names, busy = {f"cpu{number}" for number in os.sched_getaffinity(0)}, 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name in names:
                user, nice, system, _, _, irq, softirq = map(int, fields[:7])
                busy += user + nice + system + irq + softirq
        return busy / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError):
        return None


def _read() -> _Reading | None:
    """Read the seconds; None if the system does not count them."""
    busy = busy_seconds()
    return None if busy is None else _Reading(monotonic(), busy, process_time())


class _Share(threading.local):
    """Readings and thread number of one thread; OpenMP's number of threads, too, belongs to a thread.

    A new thread starts with the number that any thread chose last.
    """

    latest = 0

    def __init__(self) -> None:
        self.before = _START
        self.number = self.chosen = 0  # last number given to torch; the number beside other processes
        self.last_pass: tuple[float, float] | None = None  # seconds of the clock and of work when it began

    def keep(self) -> None:
        """Change the number no more."""
        self.before = None

    def update(self, few_tokens: bool) -> None:
        if self.before is None:
            return
        import torch

        if not self.number:
            self.number, self.chosen = torch.get_num_threads(), type(self).latest or _most_threads()
        if torch.get_num_threads() != self.number:  # set by the user meanwhile
            return self.keep()
        if self._was_idle():
            self.before = _read()
        elif monotonic() - self.before.clock >= PERIOD_S:
            self._choose()
        self.set(self.chosen if few_tokens else _most_threads())

    def set(self, number: int) -> None:
        import torch

        if self.before is not None and torch.get_num_threads() == self.number != number:
            torch.set_num_threads(number)
            self.number = number

    def _choose(self) -> None:
        assert self.before is not None
        now = _read()
        if now is None:
            return self.keep()
        clock, busy, own = (new - old for new, old in zip(now, self.before))
        free = processors() - max(0.0, busy - own) / clock
        threads = min(_most_threads(), max(1, int(free + 0.5)))
        if threads != self.chosen:
            log.info("other processes leave %.1f processors free: %d of %d threads run", free, threads, _most_threads())
        self.before, self.chosen = now, threads
        type(self).latest = threads

    def _was_idle(self) -> bool:
        """Return whether little was computed since the previous forward pass began."""
        last, self.last_pass = self.last_pass, (monotonic(), process_time())
        if last is None:
            return False
        clock, own = (new - old for new, old in zip(self.last_pass, last))
        return clock > PERIOD_S and own < IDLE * clock


@cache
def _most_threads() -> int:
    """Return torch's threads, one per core, if no setting changed their number, else 0; call before any change."""
    import torch

    smt = Path("/sys/devices/system/cpu/smt/active")
    per_core = 2 if smt.is_file() and smt.read_text().strip() == "1" else 1
    number = torch.get_num_threads()
    given = USER_WAITING or "OMP_NUM_THREADS" in os.environ
    return number if not given and number in (processors(), processors() // per_core) else 0


_START = _read()
_share = _Share()
