"""The share of the processors that processes of others use."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter

from kvsift.threads import busy_seconds


class OtherProcesses:
    """Time of the processors, from now on, of processes other than this one and its descendants."""

    def __init__(self) -> None:
        self._started, self._before = perf_counter(), _seconds()

    def share(self) -> float | None:
        """Return it as a share of all time of the processors so far; None if the system does not count it."""
        now = _seconds()
        if now is None or self._before is None:
            return None
        busy, own = (after - before for after, before in zip(now, self._before))
        elapsed = perf_counter() - self._started
        return round(max(0.0, busy - own) / len(os.sched_getaffinity(0)) / elapsed, 3)


def _seconds() -> tuple[float, float] | None:
    """Return busy seconds of the processors, and those of this process and its descendants."""
    busy = busy_seconds()
    return None if busy is None else (busy, sum(_own_ticks(os.getpid())) / os.sysconf("SC_CLK_TCK"))


def _own_ticks(root: int) -> list[int]:
    """Return the ticks of a process and of its living descendants."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    found, reached = [root], {root}
    while found:
        found = [pid for pid, parent in parents.items() if parent in found and pid not in reached]
        reached.update(found)
    return [ticks[pid] for pid in reached if pid in ticks]
