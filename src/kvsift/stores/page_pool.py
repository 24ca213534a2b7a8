"""Physical pages: which ones are free, and how many sequences refer to each of the others.

One pool serves any number of sequences, and all layers alike. Free pages are kept as runs, by size and by place, so
that a request of any length costs O(log n) per run that it takes, and gets as few runs as there are."""

from __future__ import annotations

from _thread import RLock
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple


class Run(NamedTuple):
    """Consecutive pages ``start`` to ``stop - 1``."""

    start: int
    stop: int

    @property
    def num_pages(self) -> int:
        return self.stop - self.start


class PagePool:
    """Pages of a pool, by number, which grows on demand; threads may share it.

    Attributes:
        num_pages: pages that the tensors behind the pool must have room for.
        lock: held while the pool changes.
    """

    def __init__(self) -> None:
        self.num_pages = self._num_free = 0
        self._abandoned: deque[list[Run]] = deque()
        self._references: list[int] = []
        self._stop_of: dict[int, int] = {}  # start of a free run -> its stop
        self._start_of: dict[int, int] = {}  # and the other way round
        self._by_size: list[tuple[int, int]] = []  # (count, start) of every free run, ascending
        self.lock = PoolLock()

    @property
    def num_free(self) -> int:
        """Pages that no sequence refers to."""
        with self.lock:
            while self._abandoned:
                self.release(self._abandoned.popleft())
            return self._num_free

    @property
    def num_used(self) -> int:
        """Pages that sequences refer to."""
        return self.num_pages - self.num_free

    def allocate(self, count: int, after: int | None = None) -> list[Run]:
        """Take free pages, each with one reference: those right behind page ``after`` first, then the smallest free
        run that has room for the rest, else new pages at the end or, if enough are free, the largest runs."""
        with self.lock:
            taken: list[Run] = []
            if count and after is not None and after + 1 in self._stop_of:
                taken.append(self._take(after + 1, count))
                count -= taken[-1].num_pages
            if count > self.num_free:
                self._add(count)
            while count:
                index = bisect_left(self._by_size, (count, 0))
                taken.append(self._take(self._by_size[min(index, len(self._by_size) - 1)][1], count))
                count -= taken[-1].num_pages
            return taken

    def share(self, runs: Iterable[Run]) -> None:
        """Add a reference to every page."""
        with self.lock:
            for run in runs:
                for page in range(*run):
                    self._references[page] += 1

    def release(self, runs: Iterable[Run]) -> None:
        """Drop a reference to every page; those without one are free."""
        with self.lock:
            for start, stop in runs:
                references = self._references
                if all(count == 1 for count in references[start:stop]):
                    references[start:stop] = [0] * (stop - start)
                    self._free(start, stop)
                    continue
                for page in range(start, stop):
                    references[page] -= 1
                    if references[page] == 0:
                        self._free(page, page + 1)

    def abandon(self, runs: list[Run]) -> None:
        """Drop references at the next call of another method: safe in a finalizer, which may interrupt one of them."""
        self._abandoned.append(runs)

    def is_shared(self, page: int) -> bool:
        """Whether a page has more than one reference."""
        return self.references(page) > 1

    def trim(self, num_pages: int) -> None:
        """Forget free pages at the end, until there are so many in all."""
        with self.lock:
            start = self._start_of.get(self.num_pages)
            if start is None or self.num_pages <= num_pages:
                return
            end = max(start, num_pages)
            self._remove(start)
            if end > start:
                self._insert(start, end)
            self._num_free -= self.num_pages - end
            del self._references[end:]
            self.num_pages = end

    def references(self, page: int) -> int:
        """References to a page."""
        return self._references[page]

    @property
    def free_runs(self) -> list[Run]:
        """Free pages, ascending."""
        return [Run(start, stop) for start, stop in sorted(self._stop_of.items())]

    def _add(self, count: int) -> None:
        """Add free pages at the end until so many are consecutive there."""
        new = count - (self.num_pages - self._start_of.get(self.num_pages, self.num_pages))
        self._references.extend([0] * new)
        self.num_pages += new
        self._free(self.num_pages - new, self.num_pages)

    def _take(self, start: int, most: int) -> Run:
        """The first pages of a free run, at most so many."""
        stop = self._remove(start)
        end = min(stop, start + most)
        if end < stop:
            self._insert(end, stop)
        self._references[start:end] = [1] * (end - start)
        self._num_free -= end - start
        return Run(start, end)

    def _free(self, start: int, stop: int) -> None:
        """Return pages, joined with the free runs on both sides."""
        self._num_free += stop - start
        if start in self._start_of:
            start = self._start_of[start]
            self._remove(start)
        if stop in self._stop_of:
            stop = self._remove(stop)
        self._insert(start, stop)

    def _insert(self, start: int, stop: int) -> None:
        self._stop_of[start], self._start_of[stop] = stop, start
        insort(self._by_size, (stop - start, start))

    def _remove(self, start: int) -> int:
        stop = self._stop_of.pop(start)
        del self._start_of[stop]
        del self._by_size[bisect_left(self._by_size, (stop - start, start))]
        return stop


class PoolLock(RLock):  # type: ignore[misc]  # final for type checkers alone
    """A reentrant lock; the copy of what it guards gets a lock of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PoolLock:
        return PoolLock()
