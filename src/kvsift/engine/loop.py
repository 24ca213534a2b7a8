"""The loop of the engine: rows are admitted, prefilled chunk by chunk, decode together, and leave.

It runs in a thread of its own (``engine.thread``), from the first request on; other threads are its clients. What a row
answers does not depend on the others: it is prefilled on a fixed grid of chunks, attended by itself, and shares with
others only pages that are full and were written by the same pass over the same tokens.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from time import perf_counter

import torch
from torch import Tensor

from kvsift.engine.pages import OUT_OF_MEMORY, Pages
from kvsift.engine.pauses import Pauses
from kvsift.engine.pinned_prefix import PinnedPrefix, PrefixSpoiled
from kvsift.engine.row import OPEN_STATES, CacheReport, FinishReason, Row
from kvsift.engine.rows import RunnerRows
from kvsift.engine.schedule import Decision, Schedule
from kvsift.engine.speculative.step import Logits, step_exactly
from kvsift.engine.thread import EngineThread
from kvsift.errors import InputError
from kvsift.layer.accounting import Snapshot
from kvsift.models.hf.cache import SparseCache
from kvsift.plan.plan import Plan
from kvsift.stores.page_table import PageTable

MOST_OPEN = 4096  # requests that wait or run


class Loop(EngineThread):
    """Rows over one pool of pages.

    Args:
        model: runs the passes.
        grid: prompt tokens of a pass; a multiple of the page size.
        max_rows: rows that decode in one step.
        keep_tokens: of prompts that no row needs any more, those that are kept for later ones.
        turn: held during a step.
        clock: seconds.
    """

    def __init__(
        self, model: RunnerRows, grid: int, max_rows: int = 8, keep_tokens: int = 0,
        turn: AbstractContextManager[object] | None = None, clock: Callable[[], float] = perf_counter,
    ) -> None:  # fmt: skip
        super().__init__(turn)
        assert grid % model.page_size == 0, f"a grid of {grid} tokens splits pages of {model.page_size}"
        self._model, self.grid, self.max_rows, self.clock = model, grid, max_rows, clock
        self.pages = Pages(model, grid, keep_tokens)
        self._entering: deque[Row] = deque()  # submitted, in their order
        self._num_threads = 0  # of torch, as the client that came last has set them; 0: not asked yet
        self._keys = itertools.count(1)
        self._begin()

    def _begin(self) -> None:
        self._schedule = Schedule(self.max_rows, self.grid)
        self._rows: dict[int, Row] = {}  # that have not ended
        self.pages.renew()

    @property
    def rows(self) -> list[Row]:
        """Rows that have not ended."""
        return list(self._rows.values())

    def counts(self) -> dict[str, dict[str, int]]:
        """Count rows by state, and pages by owner, without waiting for a step: the numbers may be a moment apart."""
        states = Counter(row.state for row in self.rows)
        return {"rows": {state: states[state] for state in OPEN_STATES}, "pages": self.pages.counts()}

    def submit(self, row: Row) -> None:
        """Queue a row for admission.

        Raises:
            InputError: if too many requests wait.
        """
        if len(self._rows) + len(self._entering) >= MOST_OPEN:
            raise InputError(FULL)
        row.key = next(self._keys)
        if self._num_threads and (number := torch.get_num_threads()) != self._num_threads:
            self._num_threads = number
            self.post(partial(torch.set_num_threads, number))
        self._num_threads = torch.get_num_threads()
        self._entering.append(row)
        self.post(self._enter_next)

    def cancel(self, row: Row) -> None:
        """End a row, if it has not ended, after the present step."""
        self.post(partial(self._close, row, False))

    def close(self, row: Row) -> None:
        """As ``cancel``, and let go of the prompt that it holds, if it does. Safe in a finalizer."""
        self.post(partial(self._close, row, True))

    def step(self) -> None:
        if self._waits_for_a_step():
            return
        with self._stepping():
            self._end_late_rows()
            decision = self._schedule.decide(self._room_to_admit())
            if decision.decode:
                self._decode()
            if decision.read is not None:
                self._advance(self._rows[decision.read])
            elif decision == Decision() and self._schedule.waiting:
                self._refuse_largest()

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    def _cancel_all(self) -> None:
        for row in self.rows:
            self._end(row, "cancelled")

    def _fail(self, error: BaseException) -> None:
        """End all rows after a fault that none of them explains, and begin with an empty pool."""
        failure = RuntimeError(f"the engine failed ({type(error).__name__}: {error})")
        failure.__cause__ = error
        rows = self.rows
        for prefix in list(self.pages.pinned):
            prefix.fail()
        self._model.fail()
        self._begin()
        for row in rows:
            row.cache, row.nodes, row.finish_reason, row.error = None, [], "error", failure
            row.state = "ended"
            row.on_end()

    def _enter_next(self) -> None:
        self._try_to_enter(self._entering.popleft())

    def _try_to_enter(self, row: Row) -> None:
        try:
            self._enter(row)
        except Exception as error:  # of this row alone
            self._rows[row.key] = row
            self._end(row, "error", error)

    def _enter(self, row: Row) -> None:
        if self._is_closed:
            self._finish(row, "cancelled", None)
            return
        self._rows[row.key] = row
        if row.prefix is not None and not row.prefix.take(row, partial(self._try_to_enter, row)):
            return  # it waits for the prefix
        apart = self._model.reason_apart(row)
        row.in_pool = apart is None
        row.no_reuse = apart or ("" if row.prefix is None else DOCUMENT) or row.request.plan.not_shared or ""
        row.root = b"" if row.no_reuse else self._model.root(row)
        self.pages.hold(row, self.pages.found(row))
        if not self._schedule.add(row.key, row.request.client, *self.pages.cost_of(row)):
            raise InputError(FULL)

    def _close(self, row: Row, lets_go: bool) -> None:
        self._end(row, "cancelled")
        self.pages.hold(row, [] if lets_go else row.nodes)
        self._trim()

    def release(self) -> None:
        """Give the memory of the pool back, if no row needs it and no prompt is kept."""
        self.call(self._release)

    def _release(self) -> None:
        self._model.forget()
        self._trim()

    def rewound(self, prefix: PinnedPrefix, plan: Plan) -> SparseCache:
        """The cache of a pinned prefix under a plan, for a client that has the prefix to itself.

        Raises:
            PrefixSpoiled: if the prefix must be prefilled again.
        """
        assert not isinstance(prefix.user, Row), "a row continues in this cache"
        assert prefix.cache is not None, "the prefix was prefilled"
        if prefix.is_spoiled or not self._model.rewind(prefix.cache):
            raise PrefixSpoiled
        prefix.is_lent = True
        self._replan(prefix, prefix.cache, plan)
        return prefix.cache

    def restore(self, row: Row, rotation: int | None, fill: Callable[[SparseCache], None]) -> None:
        """Pin the prompt of a row, whose cache is filled by ``fill`` instead of a prefill."""
        self.call(partial(self._restore_pinned, row, rotation, fill))

    def _restore_pinned(self, row: Row, rotation: int | None, fill: Callable[[SparseCache], None]) -> None:
        assert row.pins is not None
        table = PageTable(1, self.pages.kv) if self._model.reason_apart(row) is None else None
        try:
            if table is not None:
                self.pages.reserve(table, self._model.pages_of(row))
            row.cache = self._model.open(row, table)
            row.cache.pin(rotation)
            row.source = fill
            self._model.restore(row)
            row.cache.prepare()
            self.pin(row.pins, row.cache)
        except BaseException:
            if table is not None:
                table.close(0)
            self._trim()
            raise

    @contextmanager
    def leased(self, prefix: PinnedPrefix, plan: Plan) -> Iterator[SparseCache]:
        """The cache of a pinned prefix under a plan, which no row continues in meanwhile."""
        granted: SimpleQueue[None] = SimpleQueue()
        lease = object()
        self.start()
        try:
            self.post(partial(prefix.lease, lease, partial(granted.put, None)))
            granted.get()
            yield self.call(partial(self.rewound, prefix, plan))
        finally:
            self.post(partial(prefix.give_back, lease))

    def prepare(self, plan: Plan, kinds: Iterable[str], num_pages: int | None = None) -> int:
        """Allocate pages with these kinds of summary, and let the model capture the steps of a plan; returns how many
        steps. Some row must have decoded in captured steps.

        ``num_pages`` are by default what the rows of one step need at most, with the prompts that are kept.
        There may be room for fewer.
        """
        return self.call(partial(self._prepare, plan, frozenset(kinds), num_pages))

    def _prepare(self, plan: Plan, kinds: frozenset[str], num_pages: int | None) -> int:
        self.pages.allocate(kinds, self.max_rows, num_pages)
        return self._model.prepare(self.pages.kv, plan, self.max_rows)

    def check(self) -> None:
        """Check that every page has an owner, and as many references as owners (``AssertionError``), for tests."""
        faults = self.call(lambda: self.pages.faults(self.rows))
        assert not faults, faults[:5]

    def _end_late_rows(self) -> None:
        now = self.clock()
        for row in self.rows:  # one that continues a document has a first token in any case
            if row.request.deadline is not None and now >= row.request.deadline and row.prefix is None:
                self._end(row, "deadline")

    def _advance(self, row: Row) -> None:
        """Prefill the next chunk of a row, which is admitted with the first one."""
        if row.cache is None:
            self._admit(row)
        if not row.is_ended:
            self._read(row, Pauses(self.clock, self._pause))

    def _refuse_largest(self) -> None:
        """Nothing runs, and there is no room for the next row in the line: there never will be, unless rows in the line
        hold prompts for later."""
        waiting = [self._rows[key] for key in self._schedule.waiting]
        if any(row.nodes for row in waiting):
            for row in waiting:
                self.pages.hold(row, [])
                self._schedule.revise(row.key, *self.pages.cost_of(row))
            return
        row = max(waiting, key=self._model.pages_of)
        length, more = len(row.request.ids), row.request.max_new_tokens
        room = self.pages.room(self.rows) * self._model.page_size
        error = InputError(
            f"the prompt has {length:,} tokens and up to {more:,} will be generated; there is memory for {room:,} in "
            "all. Shorten the prompt, or generate fewer."
        )
        self._end(row, "error", error)

    def _room_to_admit(self) -> int:
        """``_room``; where it cannot be told, the rows that wait for it end with the reason, and the others go on."""
        waiting = self._schedule.waiting
        try:
            return self.pages.room(self.rows) if waiting else 0
        except Exception as error:
            for key in waiting:
                failure = RuntimeError(f"the memory that there is cannot be told ({type(error).__name__}: {error})")
                failure.__cause__ = error
                self._end(self._rows[key], "error", failure)
            return 0

    def _admit(self, row: Row) -> None:
        row.state = "reading"
        if row.prefix is not None and row.prefix.cache is not None:
            self._continue(row, row.prefix)
            return
        self.pages.hold(row, self.pages.found(row))
        length, table = self.grid * len(row.nodes), PageTable(1, self.pages.kv) if row.in_pool else None
        try:
            if table is not None:
                self.pages.fill(table, row)
            row.cache = self._model.open(row, table)
            row.cache.stats.observer = row.observer
            if row.nodes:
                self.pages.adopt(row, row.cache)
            elif row.source is not None:
                length = self._restore(row)
            row.num_cached = row.num_reused = length
            row.output.read(length)
        except Exception as error:  # of this row alone
            if table is not None:
                table.close(0)
            row.cache = None
            self._end(row, "error", error)

    def _continue(self, row: Row, prefix: PinnedPrefix) -> None:
        """Let a row begin with a pinned prefix: in its cache, or in a copy that shares its full pages."""
        assert prefix.cache is not None
        try:
            if prefix.is_spoiled:
                raise PrefixSpoiled
            cache = prefix.cache
            if prefix.user is not row:
                cache = self._model.fork(cache, prefix.length, row)
            elif prefix.is_lent:
                self._model.rewind(cache)
                prefix.is_lent = False
            try:
                if cache.run.table is not None and cache.run.table.kv is self.pages.kv:
                    self.pages.reserve(cache.run.table, self._model.pages_of(row))
                row.build_s = self._replan(prefix, cache, row.request.plan)
                self._model.begin(row, cache)
            except BaseException:
                if cache is not prefix.cache and cache.run.table is not None:
                    cache.run.table.close(0)
                raise
            row.cache, row.num_cached, row.num_reused = cache, prefix.length, prefix.length
            cache.stats.observer = row.observer
            row.output.read(prefix.length)
        except Exception as error:  # of this row alone
            self._end(row, "error", error)

    def _replan(self, prefix: PinnedPrefix, cache: SparseCache, plan: Plan) -> float:
        """Let the cache of a pinned prefix go on under a plan; seconds in which that built what decode needs."""
        started, is_new = self.clock(), cache.run.plan != plan
        cache.replan(plan)
        if is_new:
            cache.prepare()  # now, and not in the first decode step
        return self.clock() - started if is_new else 0.0

    def _restore(self, row: Row) -> int:
        """Begin with tokens from elsewhere, and share them; returns how many. The end of the prompt is read again."""
        assert row.cache is not None
        self._model.restore(row)
        length = (len(row.request.ids) - 1) // self.grid * self.grid
        row.cache.undo(length)
        for row.num_cached in range(self.grid, length + 1, self.grid):
            self.pages.seal(row)
        return length

    def _read(self, row: Row, pauses: Pauses) -> None:
        """Prefill the next chunk of a prompt, and with the last one choose the first token."""
        started, cache, before = self.clock(), row.cache, row.num_cached
        assert cache is not None
        stop, end = self._next_stop(row), len(row.request.ids)
        counters, logits = cache.stats.snapshot(), None
        try:
            if stop > before:
                if stop >= end - 1 and row.prefix is None:
                    cache.prepare_after_next()
                logits = self._model.read(row, row.request.ids[before:stop], pauses)
                counters = cache.stats.snapshot()
                self._count(row, before, stop)
            if stop == end - 1:  # the last token alone, whatever was reused before it
                cache.prepare()
                logits = self._model.read(row, row.request.ids[stop:])
                row.num_cached = end
            self._has_read(row, cache, logits)
        except OUT_OF_MEMORY as error:
            if not self._undo(row, counters) or not self.pages.drop(self.pages.kv.pages.num_pages):
                self._end(row, "error", error)  # else it is read again, in the next step
        except Exception as error:
            self._end(row, "error", error)
        finally:
            read_s = self.clock() - started - pauses.seconds
            self._schedule.has_read(row.key, row.num_cached - before, read_s, done=row.num_cached >= end)
            if pauses.seconds:
                self._schedule.has_decoded(pauses.seconds)  # of what decoding is owed now
        if row.num_cached >= end:
            self._look_again()

    def _next_stop(self, row: Row) -> int:
        """Where the next chunk of a prompt ends: on the grid, which begins anew behind a pinned prefix."""
        before, end = row.num_cached, len(row.request.ids)
        others = self._schedule.decoding or self._schedule.waiting or len(self._schedule.reading) > 1
        alone = not others and row.request.plan.prefill is None
        chunks = max(self._model.most_read // self.grid, 1) if alone else 1
        if row.prefix is None:
            return min(before - before % self.grid + chunks * self.grid, end - (row.pins is None))
        stop = min(before - (before - row.prefix.length) % self.grid + chunks * self.grid, end)
        return stop - (stop == end - 1)  # the last token is not left over

    def _count(self, row: Row, before: int, stop: int) -> None:
        """Note that a prompt is cached from one position to another, and share its chunks."""
        for row.num_cached in (*range(before - before % self.grid + self.grid, stop, self.grid), stop):
            if row.num_cached % self.grid == 0 and not row.no_reuse:
                self.pages.seal(row)

    def _has_read(self, row: Row, cache: SparseCache, logits: Tensor | None) -> None:
        """Tell the client what is cached, and once the prompt is, let it choose a token or pin it."""
        if row.num_cached < len(row.request.ids):
            self._tell(row, None)
            return
        if row.pins is not None:
            self._pin(row, row.pins, cache)
            return
        cache.prepare()
        row.num_cached -= 1  # ``_tell`` counts the token that was fed
        self._tell(row, logits)

    def _pin(self, row: Row, prefix: PinnedPrefix, cache: SparseCache) -> None:
        """End a row that has read a prefix, which keeps its cache."""
        started = self.clock()
        cache.prepare()
        prefix.build_s = self.clock() - started
        row.output.read(row.num_cached)
        row.report = CacheReport.of(cache)
        self.pin(prefix, cache)
        row.cache = None
        self._end(row, "stop")

    def pin(self, prefix: PinnedPrefix, cache: SparseCache) -> None:
        """Keep a cache, whose tokens are those of a prefix, for rows that begin with it."""
        self.pages.pin(prefix, cache, self._unpin)

    def _unpin(self, clear: Callable[[], None]) -> None:
        """Return the pages of a prefix that its owner has let go of."""
        self.post(clear)
        self.post(self._trim)

    def _pause(self) -> bool:
        """Decode a token of every row that decodes, in the middle of a chunk; returns whether there are any."""
        if not self._schedule.decoding:
            return False
        self._decode()
        self.after_step()
        return True

    def _look_again(self) -> None:
        """Let the line hold what it has in common with a prompt that was read."""
        for row in [self._rows[key] for key in self._schedule.waiting]:
            found = self.pages.found(row)
            if len(found) > len(row.nodes):
                self.pages.hold(row, found)
                self._schedule.revise(row.key, *self.pages.cost_of(row))

    def _decode(self) -> None:
        started = self.clock()
        rows = [self._rows[key] for key in self._schedule.step_rows()]
        for group in self._groups(rows):
            self._decode_together(group)
        self._schedule.has_decoded(self.clock() - started)

    def _groups(self, rows: Sequence[Row]) -> Sequence[Sequence[Row]]:
        try:
            return self._model.groups(rows)
        except Exception as error:
            failed = next((row for row in rows if row.composed is None), None)  # they begin in order
            if failed is None:
                raise
            self._end(failed, "error", error)
            return self._groups([row for row in rows if not row.is_ended])

    def _decode_together(self, group: Sequence[Row]) -> None:
        counted = [None if row.steps is not None or row.cache is None else row.cache.stats.snapshot() for row in group]
        before = [row.num_cached for row in group]
        try:
            if group[0].exact is not None:
                step_exactly(self._model, group, self._chosen)
            else:
                for row, logits in zip(group, self._model.decode_rows(group)):
                    self._tell(row, logits)
        except Exception as error:
            if len(group) == 1:
                self._end(group[0], "error", error)
                return
            for row, num_cached, counters in zip(group, before, counted):
                is_told = row.is_ended or (row.exact is None and row.num_cached > num_cached)
                if not is_told and not self._undo(row, counters):
                    self._end(row, "error", error)
            for row in group:  # the one that fails again ends
                if not row.is_ended:
                    self._decode_together([row])

    def _chosen(self, row: Row, logits: Logits) -> int | None:
        """The token that the client chooses; None if the row has ended."""
        self._tell(row, logits)
        return None if row.is_ended else row.token

    def _tell(self, row: Row, logits: Logits | None) -> None:
        """Tell the client what is cached, and let it choose a token from the logits of the one that was fed, if any."""
        assert row.cache is not None
        try:
            row.num_cached += logits is not None
            row.output.read(row.num_cached)
            if logits is not None:
                row.state = "decoding"
                row.token, reason = row.output.take(logits, row.cache.stats.probe_s)
                if reason:
                    self._end(row, reason)
        except Exception as error:
            self._end(row, "error", error)

    def _undo(self, row: Row, counters: Snapshot | None) -> bool:
        """Forget what a failed pass has stored and counted; False if the row cannot."""
        if counters is None:
            self._model.recall(row)
            return True
        if row.cache is None or not row.request.plan.can_undo or not row.cache.can_undo:
            return False
        row.cache.stats.set_back(counters)
        row.cache.undo(row.num_cached)
        return True

    def _end(self, row: Row, reason: FinishReason, error: BaseException | None = None) -> None:
        if self._rows.pop(row.key, None) is not None:  # else it has ended, or was never queued
            self._finish(row, reason, error)

    def _finish(self, row: Row, reason: FinishReason, error: BaseException | None) -> None:
        with suppress(KeyError):
            self._schedule.remove(row.key)
        if row.cache is not None:
            try:
                self._model.leave(row)
                row.report = CacheReport.of(row.cache)
            except Exception as failure:  # of a method that describes itself
                reason, error = "error", error or failure
            self._give_back(row, row.cache)
        if row.prefix is not None:
            row.prefix.give_back(row)
        if not row.holds:
            self.pages.hold(row, [])
        self._trim()
        row.finish_reason, row.error = reason, error
        row.state = "ended"  # last, since whoever waits for it goes on now
        row.on_end()

    def _give_back(self, row: Row, cache: SparseCache) -> None:
        """Return the pages of a row, but those of a pinned prefix."""
        row.cache = None
        if row.prefix is None or row.prefix.user is not row or row.prefix.cache is not cache:
            if cache.run.table is not None:
                cache.run.table.close(0)
            return
        try:
            row.prefix.is_spoiled = not self._model.rewind(cache)
        except Exception:
            row.prefix.is_spoiled = True

    def _trim(self) -> None:
        """Drop prompts beyond those that are kept; an idle loop without any gives its memory back."""
        self.pages.trim(not self._rows)


FULL = "too many requests are waiting. Try again when some of them have ended."
DOCUMENT = "it continues a document"
