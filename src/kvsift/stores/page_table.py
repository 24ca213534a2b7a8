"""Which pages the sequences of a batch own, for all its layers: runs of consecutive pages of one pool.

The invariant that keeps appends free of copies: **the page that a sequence is filling is never shared**. Full pages may
be, and are never written again.

Layers take the same steps one after the other. A step that must not be carried out twice (a fork, a reset, a new page
size) is carried out by the first layer that takes it (``PageTable.take_step``).
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from kvsift.stores.kv_pool import KVPool
from kvsift.stores.page_pool import PagePool, Run

SPARE_PAGES = 64  # reserved behind a new sequence, so that sequences of a batch stay consecutive while they decode


@dataclass
class RowPages:
    """The pages of one sequence in logical order, and those reserved for its next tokens.

    ``starts`` (of each run, and the end) and ``tensors`` are made from ``runs`` on first use, and dropped when those
    change.
    """

    runs: list[Run] = field(default_factory=list)
    spare: list[Run] = field(default_factory=list)
    num_pages: int = 0
    starts: list[int] = field(default_factory=list)
    tensors: dict[object, Tensor] = field(default_factory=dict)

    @property
    def num_reserved(self) -> int:
        return self.num_pages + sum(run.num_pages for run in self.spare)

    @property
    def last(self) -> int | None:
        """The last page, a reserved one if there are any."""
        runs = self.spare or self.runs
        return runs[-1].stop - 1 if runs else None

    def drop_derived(self) -> None:
        """Drop what was made from ``runs``."""
        self.starts = []
        self.tensors.clear()


class PageTable:
    """Sequences of a batch over a pool of pages; ``row`` is the number of a sequence in the batch.

    Args:
        num_rows: sequences that are open from the start.
        kv: the pool, and the tensors behind it; one of its own by default.

    Attributes:
        copies: (source, target) of every page that was copied so far; a layer copies what it has not copied yet.
        steps: forks, resets and changes of the page size so far.
    """

    def __init__(self, num_rows: int, kv: KVPool | None = None) -> None:
        self.kv = KVPool() if kv is None else kv
        self.pool: PagePool = self.kv.pages
        self.rows = [RowPages() for _ in range(num_rows)]
        self.scratch: int | None = None  # a page of no sequence, which idle slots of a batch write to
        self.copies: list[tuple[int, int]] = []
        self.steps = 0
        self.last_step: tuple[object, ...] = ()
        self._successor: PageTable | None = None
        self._kept: list[Run] = []
        weakref.finalize(self, _abandon, self.pool, self.rows, self._kept)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def adopt(self, row: int, runs: Sequence[Run]) -> None:
        """Let an empty sequence begin with full pages of another one; both share them."""
        assert not self.rows[row].num_pages, "a row adopts pages before it has any of its own"
        self.pool.share(runs)
        _extend(self.rows[row], runs)

    def close(self, row: int) -> None:
        """Return all pages of a sequence, reserved ones too; the sequence stays, empty."""
        pages = self.rows[row]
        runs = pages.runs + pages.spare
        pages.runs, pages.spare, pages.num_pages = [], [], 0
        pages.drop_derived()
        self.pool.release(runs)

    def num_pages(self, row: int) -> int:
        """Pages that a sequence owns."""
        return self.rows[row].num_pages

    def runs(self, row: int) -> list[Run]:
        """Pages that a sequence owns, in logical order."""
        return self.rows[row].runs

    def runs_between(self, row: int, first: int, stop: int) -> list[Run]:
        """Return the pages that a sequence owns from ``first`` to ``stop``, in logical order."""
        _, behind = _split(self.rows[row].runs, first)
        return _split(behind, stop - first)[0]

    @property
    def all_runs(self) -> list[Run]:
        """Pages that this table refers to, once for each sequence that owns or has reserved them."""
        return [run for row in self.rows for run in (*row.runs, *row.spare)] + self._kept

    def slot_runs(self, row: int, page_size: int) -> Tensor:
        """Pages that a sequence owns as runs of slots, ``page_size`` per page: int64 [num_runs, 2], first slot and
        count."""
        tensors, runs = self.rows[row].tensors, self.rows[row].runs
        if page_size not in tensors:
            pages = torch.tensor([(run.start, run.num_pages) for run in runs], dtype=torch.int64).view(-1, 2)
            tensors[page_size] = pages * page_size
        return tensors[page_size]

    def page_ids(self, row: int) -> Tensor:
        """Physical page of every logical one, int64."""
        tensors = self.rows[row].tensors
        if "page_ids" not in tensors:
            first, count = self.slot_runs(row, 1).unbind(1)
            tensors["page_ids"] = torch.arange(int(count.sum())) + (first - count.cumsum(0) + count).repeat_interleave(
                count
            )
        return tensors["page_ids"]

    def pages_on(self, row: int, device: torch.device) -> Tensor:
        """As ``page_ids``, int32 on a device, which all layers share."""
        tensors, runs = self.rows[row].tensors, self.rows[row].runs
        if device not in tensors:
            if len(runs) == 1:
                tensors[device] = torch.arange(*runs[0], dtype=torch.int32, device=device)
            else:
                tensors[device] = self.page_ids(row).to(torch.int32).to(device, non_blocking=True)
        return tensors[device]

    def slots_on(self, row: int, page_size: int, device: torch.device) -> Tensor:
        """Slot of each position in a pool whose pages are flattened, int64 on a device, which all layers share."""
        tensors = self.rows[row].tensors
        if (device, page_size) not in tensors:
            first = self.pages_on(row, device).long().unsqueeze(1) * page_size
            tensors[device, page_size] = (first + torch.arange(page_size, device=device)).flatten()
        return tensors[device, page_size]

    def planned(self, row: int) -> list[int]:
        """The pages of a sequence, then those reserved for it."""
        pages = self.rows[row]
        return [page for run in (*pages.runs, *pages.spare) for page in range(*run)]

    @property
    def longest(self) -> int:
        """The most pages that a sequence owns or has reserved."""
        return max((row.num_reserved for row in self.rows), default=0)

    def run_start(self, row: int, first: int = 0, stop: int | None = None) -> int | None:
        """Page in the pool of a sequence's page ``first`` if the pages from there to ``stop`` are consecutive, else
        None."""
        pages = self.rows[row]
        if len(pages.runs) == 1:
            return pages.runs[0].start + first
        if not pages.starts:
            pages.starts = [0, *accumulate(run.num_pages for run in pages.runs)]
        index = bisect_right(pages.starts, first) - 1
        if index == len(pages.runs) or (pages.num_pages if stop is None else stop) > pages.starts[index + 1]:
            return None
        return pages.runs[index].start + first - pages.starts[index]

    def grow(self, row: int, num_pages: int, reserve: int = 0) -> None:
        """Give a sequence pages until it owns ``num_pages``; a new sequence gets consecutive ones, ``reserve`` in all,
        or some to spare if it is to grow beyond that."""
        pages = self.rows[row]
        missing = num_pages - pages.num_pages
        if missing <= 0:
            return
        if pages.last is None:
            roomy = reserve  # what its caller expects is enough, in whatever pieces the sequence grows
            if reserve <= num_pages:
                roomy = num_pages if self.pool.num_free >= num_pages else num_pages + num_pages // 8 + SPARE_PAGES
            pages.spare = self.pool.allocate(roomy)
        spare, pages.spare = _split(pages.spare, missing)
        _extend(pages, spare)
        missing = num_pages - pages.num_pages
        if missing:
            _extend(pages, self.pool.allocate(missing, after=pages.last))

    def reserve(self, row: int, num_pages: int) -> None:
        """Reserve pages until a sequence has ``num_pages`` with them; it grows into them in order."""
        pages = self.rows[row]
        missing = num_pages - pages.num_pages - sum(run.num_pages for run in pages.spare)
        if missing > 0:
            pages.spare = _joined([*pages.spare, *self.pool.allocate(missing, after=pages.last)])

    def release_spare(self, row: int) -> None:
        """Return the pages that a sequence has reserved and does not own."""
        spare, self.rows[row].spare = self.rows[row].spare, []
        self.pool.release(spare)

    def reserve_scratch(self) -> int:
        """The scratch page."""
        if self.scratch is None:
            self._kept += self.pool.allocate(1)
            self.scratch = self._kept[0].start
        return self.scratch

    def shrink(self, row: int, num_pages: int) -> None:
        """Take pages back until a sequence owns ``num_pages``; it grows back into the same ones where some are
        reserved."""
        pages = self.rows[row]
        if num_pages >= pages.num_pages:
            return
        pages.runs, dropped = _split(pages.runs, num_pages)
        pages.num_pages = num_pages
        pages.drop_derived()
        for run in reversed(dropped):
            again = bool(pages.spare) and pages.spare[0].start == run.stop
            if again and not any(self.pool.is_shared(page) for page in range(*run)):
                pages.spare[0] = Run(run.start, pages.spare[0].stop)
            else:
                self.pool.release([run])

    def unshare_last(self, row: int) -> None:
        """Replace the last page of a sequence by a copy if it is shared; layers find the copy in ``copies``."""
        pages = self.rows[row]
        source = pages.runs[-1].stop - 1
        if not self.pool.is_shared(source):
            return
        ((target, stop),) = self.pool.allocate(1)
        self.pool.release([Run(source, source + 1)])
        pages.runs, _ = _split(pages.runs, pages.num_pages - 1)
        pages.num_pages -= 1
        _extend(pages, [Run(target, stop)])
        self.copies.append((source, target))

    def fork(self, sources: Sequence[int]) -> None:
        """Sequence i becomes a sharer of everything that sequence ``sources[i]`` owned; there are then as many
        sequences."""
        runs = [list(self.rows[source].runs) for source in sources]
        for shared in runs:
            self.pool.share(shared)
        for row in range(self.num_rows):
            self.close(row)
        self.rows[:] = [RowPages() for _ in sources]
        for pages, shared in zip(self.rows, runs):
            _extend(pages, shared)

    def clear(self) -> None:
        """Return all pages of all sequences."""
        for row in range(self.num_rows):
            self.close(row)

    def successor(self, taken: int, page_size: int) -> PageTable:
        """An empty table for pages of another size, in a pool of its own; the same for every layer."""
        if self.take_step(taken, "repage", page_size):
            self._successor = PageTable(self.num_rows)
        assert self._successor is not None
        return self._successor

    def take_step(self, taken: int, name: str, *details: object) -> bool:
        """Return whether a caller that has taken ``taken`` steps is the first to take this one; it must then carry it
        out."""
        if taken < self.steps:
            assert (taken, self.last_step) == (self.steps - 1, (name, *details)), "layers of a batch grew apart"
            return False
        self.steps, self.last_step = self.steps + 1, (name, *details)
        return True


def _extend(pages: RowPages, runs: Iterable[Run]) -> None:
    """Add pages to a sequence."""
    pages.drop_derived()
    extended, num_pages = list(pages.runs), pages.num_pages
    for run in runs:
        num_pages += run.num_pages
        if extended and extended[-1].stop == run.start:
            extended[-1] = Run(extended[-1].start, run.stop)
        else:
            extended.append(run)
    pages.runs, pages.num_pages = extended, num_pages


def _joined(runs: Iterable[Run]) -> list[Run]:
    pages = RowPages()
    _extend(pages, runs)
    return pages.runs


def _split(runs: list[Run], count: int) -> tuple[list[Run], list[Run]]:
    """The first ``count`` pages, and the others."""
    for index, run in enumerate(runs):
        if count < run.num_pages:
            cut = run.start + count
            before = [Run(run.start, cut)] if count else []
            return runs[:index] + before, [Run(cut, run.stop), *runs[index + 1 :]]
        count -= run.num_pages
    return runs, []


def _abandon(pool: PagePool, rows: list[RowPages], kept: list[Run]) -> None:
    pool.abandon([run for row in rows for run in (*row.runs, *row.spare)] + kept)
