"""Which physical pages each row of a batch owns: a page table on the host, with shared pages counted.

The invariant that keeps appends free of copies: **the page a row is filling is never shared**. Full pages are, and
are never written again; a fork copies the partial page at once.
"""

from __future__ import annotations

from collections.abc import Sequence

SPARE_PAGES = 64  # kept behind a new row's pages, so that rows of a batch stay contiguous while they decode


class PageTable:
    """Rows of physical page ids. The pools they index live elsewhere (one set per layer) and grow on demand."""

    def __init__(self, num_rows: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.num_pages = 0  # pages that pools must hold
        self._spare: list[list[int]] = [[] for _ in range(num_rows)]
        self._consecutive = [True] * num_rows
        self._references: list[int] = []
        self._free: set[int] = set()

    def grow(self, row: int, num_pages: int, reserve: int = 0) -> None:
        """Give ``row`` pages until it owns ``num_pages``; a new row gets consecutive ones, ``reserve`` in all."""
        owned, spare = self.rows[row], self._spare[row]
        if not owned and not spare and num_pages > len(self._free):
            spare.extend(self._fresh(max(reserve, num_pages + num_pages // 8 + SPARE_PAGES)))
        kept = spare[: max(num_pages - len(owned), 0)]
        del spare[: len(kept)]
        for page in kept:
            self._own(row, page)
        while len(owned) < num_pages:
            self._own(row, self._next(owned))

    def reserve(self, row: int, num_pages: int) -> None:
        """Keep spare pages until ``row`` has ``num_pages`` with them; it will grow into them in order."""
        owned, spare = self.rows[row], self._spare[row]
        for _ in range(num_pages - len(owned) - len(spare)):
            spare.append(self._next((spare or owned)[-1:]))

    def planned(self, row: int) -> list[int]:
        """The pages of ``row``, then those it will grow into."""
        return self.rows[row] + self._spare[row]

    def take(self) -> int:
        """A page that belongs to no row, for good."""
        page = self._next([])
        self._references[page] = 1
        return page

    def clear(self) -> None:
        """Every row gives back all its pages, spare ones too."""
        for owned, spare in zip(self.rows, self._spare):
            for page in owned:
                self._release(page)
            self._free.update(spare)
            owned.clear()
            spare.clear()
        self._consecutive = [True] * len(self.rows)

    def shrink(self, row: int, num_pages: int) -> None:
        """Take pages back until ``row`` owns ``num_pages``."""
        owned, spare = self.rows[row], self._spare[row]
        while len(owned) > num_pages:
            page = owned.pop()
            if not self.is_shared(page) and spare and spare[0] == page + 1:
                self._references[page] = 0
                spare.insert(0, page)  # the row grows back into the same pages
            else:
                self._release(page)
        self._consecutive[row] = _are_consecutive(self.rows[row])

    def compact(self) -> list[int]:
        """Number the pages of all rows anew, without gaps and spare ones: the old number of each."""
        used = sorted({page for row in self.rows for page in row})
        number = {page: index for index, page in enumerate(used)}
        self.rows = [[number[page] for page in row] for row in self.rows]
        self._references = [self._references[page] for page in used]
        self.num_pages, self._free, self._spare = len(used), set(), [[] for _ in self.rows]
        self._consecutive = [_are_consecutive(row) for row in self.rows]
        return used

    def is_shared(self, page: int) -> bool:
        """Whether more than one row owns the page."""
        return self._references[page] > 1

    def unshare_last(self, row: int) -> tuple[int, int] | None:
        """Make the last page of ``row`` its own. Returns (source, target) of the copy the pools must make."""
        source = self.rows[row][-1]
        if not self.is_shared(source):
            return None
        target = self._next([])
        self._references[target] = 1
        self._references[source] -= 1
        self.rows[row][-1] = target
        self._consecutive[row] = _are_consecutive(self.rows[row])
        return source, target

    def fork(self, sources: Sequence[int]) -> None:
        """New rows: row i becomes a sharer of everything row ``sources[i]`` owned."""
        rows = [list(self.rows[source]) for source in sources]
        for row in rows:
            for page in row:
                self._references[page] += 1
        for row in self.rows:
            for page in row:
                self._release(page)
        self._free.update(page for spare in self._spare for page in spare)
        self.rows, self._spare = rows, [[] for _ in rows]
        self._consecutive = [_are_consecutive(row) for row in rows]

    def run_start(self, row: int) -> int | None:
        """First page of ``row`` if its pages are consecutive, else None."""
        return self.rows[row][0] if self.rows[row] and self._consecutive[row] else None

    def _own(self, row: int, page: int) -> None:
        owned = self.rows[row]
        self._references[page] = 1
        self._consecutive[row] &= not owned or page == owned[-1] + 1
        owned.append(page)

    def _next(self, owned: list[int]) -> int:
        after = owned[-1] + 1 if owned else -1
        if after == self.num_pages or not self._free:
            return self._fresh(1)[0]
        page = after if after in self._free else min(self._free)
        self._free.remove(page)
        return page

    def _fresh(self, count: int) -> range:
        fresh = range(self.num_pages, self.num_pages + count)
        self.num_pages += count
        self._references.extend([0] * count)
        return fresh

    def _release(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.add(page)


def _are_consecutive(pages: list[int]) -> bool:
    return not pages or pages == list(range(pages[0], pages[0] + len(pages)))
