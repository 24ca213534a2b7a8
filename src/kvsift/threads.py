"""How OpenMP's threads wait, and how many of them there are.

A thread of GNU's OpenMP runtime, which torch's wheels for Linux bring, spins 300,000 times (milliseconds) before it
sleeps. Beside other processes that spinning uses up the thread's share of a processor, and the work that it waits for
is late by time slices, some fifty times a token. The runtime reads how long to spin from the environment, once, when
torch loads it:

- kvsift imported before torch: threads spin ``SPINS`` times. ``scripts/busy_machine.py`` measures what that is worth.
- torch imported before kvsift: they spin on. Then fewer threads run while other processes use the processors.

Settings that a user made stay as they are: those of ``WAITING``, OMP_NUM_THREADS and torch.set_num_threads.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from time import monotonic, process_time
from typing import Any, NamedTuple

SPINS = 1000
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # how a user says how threads wait
PERIOD_S = 0.5  # between two looks at the processors, which count in hundredths of a second
IDLE = 0.25  # seconds of work per second between two forward passes; with less, what others did then says nothing

log = logging.getLogger("kvsift")
TORCH_WAS_FIRST = "torch" in sys.modules
USER_WAITING = {name: os.environ[name] for name in WAITING if name in os.environ}
SPINS_SET = sys.platform == "linux" and not TORCH_WAS_FIRST and not USER_WAITING
if SPINS_SET:
    os.environ["GOMP_SPINCOUNT"] = str(SPINS)  # of this process and those that it starts


def processors() -> int:
    """Processors that this process may use: in a container or under taskset they are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def per_process(workers: int) -> int:
    """Threads of each of several processes: OMP_NUM_THREADS where a user set it, else its share of the processors."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return max(1, int(first) if first.isdecimal() else processors() // workers)


def use(threads: int | None) -> None:
    """Let torch, and the compiled core with it, use so many threads from now on; None changes nothing."""
    import torch

    if threads is not None:
        _share.keep()
        torch.set_num_threads(threads)


def yield_to_others() -> None:
    """Let the calling thread use no more threads than processors are free; does nothing unless torch was imported first
    and the user set nothing."""
    if _YIELDS:
        _share.update()


def report() -> dict[str, Any]:
    """Threads, how they wait, and why."""
    import torch

    return {"number": torch.get_num_threads(), "processors": processors(), "while they wait": _waiting()}


def _waiting() -> str:
    if USER_WAITING:
        settings = ", ".join(f"{name}={text}" for name, text in USER_WAITING.items())
        return f"as the environment says: {settings}"
    if SPINS_SET:
        return f"spin {SPINS:,} times, then sleep: kvsift set GOMP_SPINCOUNT={SPINS}"
    if not TORCH_WAS_FIRST:
        return "as the OpenMP runtime has them wait"
    fewer = "; while other processes use the processors, fewer threads run" if _YIELDS else ""
    return (
        f"spin for milliseconds, as torch was imported before kvsift{fewer}. Import kvsift first, or set "
        "OMP_WAIT_POLICY=passive"
    )


class _Reading(NamedTuple):
    """Seconds since the start: of the clock, of all work on our processors, and of our own."""

    clock: float
    busy: float
    own: float


def _read() -> _Reading | None:
    """None where the system does not count."""
    try:
        names, busy = {f"cpu{number}" for number in os.sched_getaffinity(0)}, 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name in names:
                user, nice, system, _, _, irq, softirq = map(int, fields[:7])
                busy += user + nice + system + irq + softirq
    except (AttributeError, OSError, ValueError):
        return None
    return _Reading(monotonic(), busy / os.sysconf("SC_CLK_TCK"), process_time())


class _Share(threading.local):
    """What a thread remembers between two looks; OpenMP's number of threads, too, belongs to a thread.

    A new thread begins with the number that was chosen last in any.
    """

    latest = 0

    def __init__(self) -> None:
        self.before, self.chosen = _START, type(self).latest or _DEFAULT
        self.last_pass: tuple[float, float] | None = None  # seconds of the clock and of work when it began

    def keep(self) -> None:
        """Leave the number as it is from now on."""
        self.before = None

    def update(self) -> None:
        if self.before is None:
            return
        if self._was_idle():
            self.before = _read()
            return
        if monotonic() - self.before.clock < PERIOD_S:
            return
        import torch

        before, self.before = self.before, _read()
        if self.before is None or torch.get_num_threads() != self.chosen:  # set by the user meanwhile
            return self.keep()
        clock, busy, own = (new - old for new, old in zip(self.before, before))
        free = processors() - max(0.0, busy - own) / clock
        threads = min(_DEFAULT, max(1, int(free + 0.5)))
        if threads != self.chosen:
            log.info("other processes leave %.1f processors free: %d of %d threads run", free, threads, _DEFAULT)
            torch.set_num_threads(threads)
            self.chosen = type(self).latest = threads

    def _was_idle(self) -> bool:
        """Whether little was done since the forward pass before this one began."""
        last, self.last_pass = self.last_pass, (monotonic(), process_time())
        if last is None:
            return False
        clock, own = (new - old for new, old in zip(self.last_pass, last))
        return clock > PERIOD_S and own < IDLE * clock


def _default() -> int:
    """Threads of torch where nobody set their number: one per core. 0 where torch is not there yet or somebody did."""
    smt = Path("/sys/devices/system/cpu/smt/active")
    per_core = 2 if smt.is_file() and smt.read_text().strip() == "1" else 1
    number = int(sys.modules["torch"].get_num_threads()) if TORCH_WAS_FIRST else 0
    return number if number in (processors(), processors() // per_core) else 0


_START = _read() if TORCH_WAS_FIRST else None
_DEFAULT = 0 if USER_WAITING or "OMP_NUM_THREADS" in os.environ or _START is None else _default()
_YIELDS = _DEFAULT > 1
_share = _Share()
