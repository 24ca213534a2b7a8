"""The loop: rows join, are read chunk by chunk, decode together, and leave.

It has no thread of its own. Whoever waits for a row takes steps, and a step serves all rows, whoever waits for them.
What a row answers does not depend on the others: it is read on a fixed grid of chunks, attended by itself, and shares
with others only pages that are full and were written by the same pass over the same tokens.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from threading import Lock
from time import perf_counter, sleep

import torch

from kvsift.batching.exact.step import Logits, step_exactly
from kvsift.batching.ledger import Books, audit
from kvsift.batching.pauses import Pauses
from kvsift.batching.prefix_tree import Node, PrefixTree
from kvsift.batching.row import OPEN_STATES, CacheReport, FinishReason, Row
from kvsift.batching.row_model import RowModel
from kvsift.batching.schedule import Decision, Schedule
from kvsift.errors import InputError
from kvsift.layer.accounting import Snapshot
from kvsift.locks import take
from kvsift.models.inference import inference
from kvsift.models.transformers_cache import SparseCache
from kvsift.plan.plan import Plan
from kvsift.stores.kv_pool import KVPool, LayerPool
from kvsift.stores.page_pool import Run
from kvsift.stores.page_table import PageTable

PATIENCE_S = 0.005  # between two looks at what another thread's step has brought
OUT_OF_MEMORY = MemoryError, torch.OutOfMemoryError


class Loop:
    """Rows over one pool of pages.

    Args:
        model: runs the passes.
        grid: prompt tokens of a pass; a multiple of the page size.
        max_rows: rows that are open at once.
        keep_tokens: of prompts that no row needs any more, those that are kept for later ones.
        turn: held during a step.
        clock: seconds.
    """

    def __init__(
        self, model: RowModel, grid: int, max_rows: int = 8, keep_tokens: int = 0,
        turn: AbstractContextManager[object] | None = None, clock: Callable[[], float] = perf_counter,
    ) -> None:  # fmt: skip
        assert grid % model.page_size == 0, f"a grid of {grid} tokens splits pages of {model.page_size}"
        self._model, self.grid, self.max_rows, self.clock = model, grid, max_rows, clock
        self._keep_pages = keep_tokens // model.page_size
        self._turn = nullcontext() if turn is None else turn
        self._schedule = Schedule(max_rows, grid)
        self._rows: dict[int, Row] = {}  # that have not ended
        self._keys = itertools.count(1)
        self._lock = Lock()
        self._leaving: deque[tuple[Row, bool]] = deque()  # rows to end, and whether they let go of their prompts
        self._entering: deque[Row] = deque()  # one for each thread that submits, in no order
        self._begin()

    def _begin(self) -> None:
        kv = KVPool(steady=self._model.steady)
        self.kv, self.tree = kv, PrefixTree(kv.pages, self.grid)  # together, whatever interrupts

    @property
    def rows(self) -> list[Row]:
        """Rows that have not ended."""
        return list(self._rows.values())

    def books(self) -> Books:
        """Count rows and pages. It waits for no step, so during one the numbers may be a moment apart."""
        states, pages, tree = Counter(row.state for row in self.rows), self.kv.pages, self.tree
        free, kept = pages.num_free, tree.num_pages
        loose = sum(run.num_pages for run in self._model.runs(self.kv))
        owned = {"free": free, "kept": kept, "rows": max(pages.num_pages - free - kept - loose, 0)}
        return Books({state: states[state] for state in OPEN_STATES}, owned)

    def submit(self, row: Row) -> None:
        """Put a row into the line.

        Raises:
            InputError: if the line is full.
        """
        try:
            self._entering.append(row)
            with self._lock:
                self._enter(row)
        finally:
            self._entering.pop()
        self._leave()

    def _enter(self, row: Row) -> None:
        row.key, apart = next(self._keys), self._model.reason_apart(row)
        row.in_pool, row.no_reuse = apart is None, apart or row.plan.not_shared or ""
        row.root = b"" if row.no_reuse else self._model.root(row)
        try:
            self._hold(row, self._found(row))
            self._rows[row.key] = row  # before the schedule names it to whoever takes a step
            if not self._schedule.add(row.key, row.client, *self._cost_of(row)):
                raise InputError("too many requests are waiting. Try again when some of them have ended.")
        except Exception:
            self._rows.pop(row.key, None)
            self._hold(row, [])
            raise

    def cancel(self, row: Row) -> None:
        """End a row, if it has not ended, after the present step; its prompt, as far as it was read, is held."""
        self._leaving.append((row, False))
        self._leave()

    def close(self, row: Row) -> None:
        """As ``cancel``, and let go of its prompt, which stays no longer than others. Safe in a finalizer."""
        self._leaving.append((row, True))
        self._leave()

    def _leave(self) -> None:
        """Carry out what was asked for, unless a step is being taken: it does so when it ends."""
        while self._leaving:
            taken: list[bool] = []
            try:
                if not take(self._lock, taken):
                    return
                with self._mending():
                    while self._leaving:
                        row, lets_go = self._leaving[0]
                        self._end(row, "cancelled")
                        self._hold(row, [] if lets_go else row.nodes)
                        self._trim()
                        self._leaving.popleft()  # last: the next one does again what an interrupt leaves undone
            finally:
                if taken:
                    self._lock.release()

    def step(self, unless: Callable[[], bool], news: Callable[[], None] | None = None) -> None:
        """Take a step, unless a condition holds by the time that the step can begin. ``news`` is called when rows have
        new tokens while the step, which reads a chunk, goes on."""
        if self._entering:  # a lock is not fair: who takes it again at once gets it
            sleep(PATIENCE_S)
        taken: list[bool] = []
        with self._turn:
            try:
                while not take(self._lock, taken, PATIENCE_S):
                    if unless():
                        return
                if not unless():
                    with self._mending():
                        self._step(news)
            finally:
                if taken:
                    self._lock.release()
                self._leave()

    def release(self) -> None:
        """Give the memory of the pool back, if no row needs it and no prompt is kept."""
        with self._lock, self._mending():
            self._model.forget()
            self._trim()
        self._leave()

    def prepare(self, plan: Plan, kinds: Iterable[str], num_pages: int | None = None) -> int:
        """Allocate pages with these kinds of summary, and let the model capture the steps of a plan; returns how many
        steps. Some row must have decoded in captured steps.

        ``num_pages`` are by default what the rows that are open at once need at most, with the prompts that are kept.
        There may be room for fewer.
        """
        longest = self._model.longest
        with self._turn, self._lock, inference():
            self.tree.kinds |= frozenset(kinds)
            for pool in self.kv.layers.values():
                pool.maintain(self.tree, self.tree.kinds)
            room = self._room()
            if num_pages is None:
                num_pages = room if longest is None else self.max_rows * longest + self._keep_pages
            table = PageTable(1, self.kv)
            try:
                with suppress(*OUT_OF_MEMORY):  # the books tell what there is
                    self._reserve(table, min(num_pages, room), grows=False)
                for pool in self.kv.layers.values():  # steps are timed
                    pool.write_noise(table.all_runs)
            finally:
                table.close(0)
            num_steps = self._model.prepare(self.kv, plan, self.max_rows)
        self._leave()
        return num_steps

    def check(self) -> None:
        """Refuse books that do not balance (``AssertionError``), for tests."""
        with self._lock:
            wrong = audit(self.kv.pages, self._owned())
        self._leave()
        assert not wrong, wrong[:5]

    def _owned(self) -> list[Run]:
        """Pages, once for each owner."""
        tables = [row.cache.run.table for row in self._rows.values() if row.cache is not None]
        owned = [run for table in tables if table is not None and table.kv is self.kv for run in table.all_runs]
        return [*owned, *self.tree.runs, *self._model.runs(self.kv)]

    @contextmanager
    def _mending(self) -> Iterator[None]:
        """Let an interrupt leave no page without an owner, and no row without a place in the schedule."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.kv.pages.recount(self._owned())
            for row in [self._rows[key] for key in self._schedule.mend(self._rows)]:
                tokens, pages = self._cost_of(row)
                if not self._schedule.add(row.key, row.client, tokens, pages if row.cache is None else 0):
                    self._end(row, "error", RuntimeError("the step of this row was interrupted, and the line is full"))
            raise

    @inference()
    def _step(self, news: Callable[[], None] | None) -> None:
        now = self.clock()
        for row in self.rows:
            if row.deadline is not None and now >= row.deadline:
                self._end(row, "deadline")
        decision = self._schedule.decide(self._room_to_admit())
        if decision.decode:
            self._decode()
        if decision.read is not None:
            row = self._rows[decision.read]
            if row.cache is None:
                self._admit(row)
            if not row.is_ended:
                self._read(row, Pauses(self.clock, partial(self._pause, news)))
        elif decision == Decision() and self._rows:
            self._refuse_largest()

    def _refuse_largest(self) -> None:
        """Nothing runs, and there is no room for the next row in the line: there never will be, unless rows in the line
        hold prompts for later."""
        waiting = [self._rows[key] for key in self._schedule.waiting]
        if any(row.nodes for row in waiting):
            for row in waiting:
                self._hold(row, [])
                self._schedule.revise(row.key, *self._cost_of(row))
            return
        row = max(waiting, key=self._model.pages_of)
        error = InputError(
            f"the prompt has {len(row.ids):,} tokens and up to {row.max_new_tokens:,} will be generated; there is "
            f"memory for {self._room() * self._model.page_size:,} in all. Shorten the prompt, or generate fewer."
        )
        self._end(row, "error", error)

    def _cost_of(self, row: Row) -> tuple[int, int]:
        """Tokens of a prompt that are to be read, and pages to be reserved, beside the chunks that the row holds."""
        shared = sum(node.num_pages for node in row.nodes)
        return len(row.ids) - self.grid * len(row.nodes), self._model.pages_of(row) - shared

    def _room(self) -> int:
        """Pages that could be reserved now."""
        beside = self._model.room(self.kv)
        if beside is None:
            beside = max(map(self._model.pages_of, self._rows.values()), default=0)
        return self.kv.pages.num_free + self._num_allocated() + self.tree.droppable() + beside

    def _room_to_admit(self) -> int:
        """``_room``; where it cannot be told, the rows that wait for it end with the reason, and the others go on."""
        waiting = self._schedule.waiting
        try:
            return self._room() if waiting else 0
        except Exception as error:
            for key in waiting:
                failure = RuntimeError(f"the memory that there is cannot be told ({type(error).__name__}: {error})")
                failure.__cause__ = error
                self._end(self._rows[key], "error", failure)
            return 0

    def _num_allocated(self) -> int:
        """Pages that are allocated, and not in the pool yet."""
        allocated = min((pool.keys.shape[1] for pool in self.kv.layers.values()), default=0)
        return max(allocated - self.kv.pages.num_pages, 0)

    def _found(self, row: Row) -> list[Node]:
        """Chunks that a row begins with; its last token is read in any case."""
        return [] if row.no_reuse else self.tree.find(row.root, row.ids[: len(row.ids) - 1])

    def _hold(self, row: Row, nodes: Sequence[Node]) -> None:
        """Keep these chunks for a row, instead of those that it has held."""
        before, after = row.nodes, set(nodes)
        row.nodes = list(dict.fromkeys([*before, *nodes]))  # an interrupt leaves none held that are not among these
        self.tree.hold(nodes, row, self.clock())
        self.tree.let_go([node for node in before if node not in after], row)
        row.nodes = list(nodes)

    def _admit(self, row: Row) -> None:
        row.state = "reading"
        self._hold(row, self._found(row))
        nodes, length = row.nodes, self.grid * len(row.nodes)
        table = PageTable(1, self.kv) if row.in_pool else None
        try:
            if table is not None:
                self._fill(table, nodes, self._model.pages_of(row))
            row.cache = self._model.open(row, table)
            row.cache.stats.observer = row.observer
            if nodes:
                kinds = frozenset(row.plan.summaries)
                stale = any(kinds - node.kinds for node in nodes)
                self._model.adopt(row.cache, length, stale, self.grid, nodes[-1].sealed)
                for node in nodes:
                    node.kinds |= kinds
                self.tree.kinds |= kinds
                self._maintain(row.cache)
            elif row.source is not None:
                length = self._restore(row)
            row.num_cached = row.num_reused = length
            row.output.read(length)
        except BaseException as error:
            if table is not None:
                table.close(0)
            row.cache = None
            if not isinstance(error, Exception):  # the thread that takes the step is interrupted: the next one admits
                raise
            self._end(row, "error", error)  # of this row alone

    def _restore(self, row: Row) -> int:
        """Begin with tokens from elsewhere, and share them; returns how many. The end of the prompt is read again."""
        assert row.cache is not None
        self._model.restore(row)
        length = (len(row.ids) - 1) // self.grid * self.grid
        row.cache.undo(length)
        for row.num_cached in range(self.grid, length + 1, self.grid):
            self._seal(row)
        return length

    def _fill(self, table: PageTable, nodes: Sequence[Node], num_pages: int) -> None:
        """Begin a table with chunks, and reserve so many pages: if there is less memory than it seemed, those of old
        prompts."""
        runs = [run for node in nodes for run in node.runs]
        table.adopt(0, runs)
        try:
            self._reserve(table, num_pages)
        except OUT_OF_MEMORY:
            if not self.tree.drop(num_pages, self.clock()):
                raise
            table.adopt(0, runs)
            self._reserve(table, num_pages, grows=False)

    def _reserve(self, table: PageTable, num_pages: int, grows: bool = True) -> None:
        """Reserve the pages of a row, and the memory for them, for which old prompts may have to go. Others will follow
        if the pool ``grows``."""
        room = self._model.room(self.kv)
        missing = num_pages - table.num_pages(0)
        present = self.kv.pages.num_free + self._num_allocated()
        self.tree.drop(missing - present - (missing if room is None else room), self.clock())
        pools = list(self.kv.layers.values())
        try:
            table.reserve(0, num_pages)
            if not all(pool.has_room for pool in pools):
                self._model.release(self.kv)  # or there would be two pools for a while
            try:
                self._fit(pools, self._model.spare(self.kv) if grows else 0)
            except OUT_OF_MEMORY:
                self._fit(pools, 0)
        except BaseException:  # or the rows that run would be the next to fail
            table.close(0)
            self.kv.pages.trim(min((pool.keys.shape[1] for pool in pools), default=0))
            raise

    def _fit(self, pools: Sequence[LayerPool], spare: int) -> None:
        for pool in pools:
            with pool.lock:
                pool.fit(exactly=True, spare=spare)

    def _read(self, row: Row, pauses: Pauses) -> None:
        """Read the next chunk of a prompt, and with the last one choose the first token."""
        started, cache, last = self.clock(), row.cache, len(row.ids) - 1
        assert cache is not None
        before = row.num_cached
        alone = not self._schedule.decoding and not self._schedule.waiting and row.plan.prefill is None
        chunks = max(self._model.most_read // self.grid, 1) if alone else 1
        stop = min(before - before % self.grid + chunks * self.grid, last)
        counters, logits = cache.stats.snapshot(), None
        try:
            if stop > before:
                if stop == last:
                    cache.prepare_after_next()
                self._model.read(cache, row.ids[before:stop], pauses)
                counters = cache.stats.snapshot()
                for row.num_cached in (*range(before - before % self.grid + self.grid, stop, self.grid), stop):
                    if row.num_cached % self.grid == 0 and not row.no_reuse:
                        self._seal(row)
            if before <= last == stop:
                cache.prepare()
                logits = self._model.read(cache, row.ids[last:])
                cache.prepare()
            self._tell(row, logits)
        except OUT_OF_MEMORY as error:
            if not self._undo(row, counters) or not self.tree.drop(self.kv.pages.num_pages, self.clock()):
                self._end(row, "error", error)  # else it is read again, in the next step
        except Exception as error:
            self._end(row, "error", error)
        except BaseException as error:  # the thread that takes the step is interrupted, and the row may be another's
            if row.num_cached <= last and not self._undo(row, counters):
                self._end(row, "error", _told(error))
            raise
        finally:
            read_s = self.clock() - started - pauses.seconds
            self._schedule.has_read(row.key, row.num_cached - before, read_s, done=row.num_cached > last)
            if pauses.seconds:
                self._schedule.has_decoded(pauses.seconds)  # of what decoding is owed now
        if row.num_cached > last:
            self._look_again()

    def _pause(self, news: Callable[[], None] | None) -> bool:
        """Decode a token of every row that decodes, in the middle of a chunk; returns whether there are any."""
        if not self._schedule.decoding:
            return False
        self._decode()
        if news is not None:
            news()
        return True

    def _look_again(self) -> None:
        """Let the line hold what it has in common with a prompt that was read."""
        for row in [self._rows[key] for key in self._schedule.waiting]:
            found = self._found(row)
            if len(found) > len(row.nodes):
                self._hold(row, found)
                self._schedule.revise(row.key, *self._cost_of(row))

    def _seal(self, row: Row) -> None:
        """Share the chunk that was just read, and those before it of which an interrupt came first."""
        cache, pages = row.cache, self.grid // self._model.page_size
        assert cache is not None
        if not cache.can_undo:
            row.no_reuse = "the model has layers that drop tokens"
            return
        kinds = frozenset(row.plan.summaries)
        for stop in range(self.grid * (len(row.nodes) + 1), row.num_cached + 1, self.grid):
            first, ids = stop // self._model.page_size - pages, row.ids[stop - self.grid : stop]
            before = row.nodes[-1] if row.nodes else None
            runs, sealed = cache.table.runs_between(0, first, first + pages), cache.sealed(stop)
            row.nodes.append(self.tree.seal(row.root, before, ids, runs, kinds, self.clock(), sealed))
            self.tree.hold(row.nodes[-1:], row, self.clock())  # what it holds is always among its nodes
        self._maintain(cache)

    def _maintain(self, cache: SparseCache) -> None:
        """Keep the summaries of shared pages when the rows that wrote them are gone."""
        for attention in cache.attentions:
            self.kv.layers[attention.shape.layer].maintain(self.tree, self.tree.kinds)

    def _decode(self) -> None:
        started = self.clock()
        rows = [self._rows[key] for key in self._schedule.decoding]
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
        except BaseException as error:
            if len(group) == 1 and isinstance(error, Exception):
                self._end(group[0], "error", error)
                return
            for row, num_cached, counters in zip(group, before, counted):
                is_told = row.is_ended or (row.exact is None and row.num_cached > num_cached)
                if not is_told and not self._undo(row, counters):
                    self._end(row, "error", _told(error))
            if not isinstance(error, Exception):
                raise
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
        except BaseException as error:
            self._end(row, "error", _told(error))
            if not isinstance(error, Exception):
                raise

    def _undo(self, row: Row, counters: Snapshot | None) -> bool:
        """Forget what a failed pass has stored and counted; False if the row cannot."""
        if counters is None:
            self._model.recall(row)
            return True
        if row.cache is None or not row.plan.can_undo or not row.cache.can_undo:
            return False
        row.cache.stats.set_back(counters)
        row.cache.undo(row.num_cached)
        return True

    def _end(self, row: Row, reason: FinishReason, error: BaseException | None = None) -> None:
        if row.key in self._rows:  # else it has ended, or was never in the line
            try:
                self._finish(row, reason, error)
            except BaseException:
                self._finish(row, reason, error)  # an interrupt comes once, and what was done is not done again
                raise

    def _finish(self, row: Row, reason: FinishReason, error: BaseException | None) -> None:
        self._rows.pop(row.key, None)
        with suppress(KeyError):
            self._schedule.remove(row.key)
        cache = row.cache
        if cache is not None:
            try:
                self._model.leave(row)
                row.report = CacheReport.of(cache)
            except Exception as failure:  # of a method that describes itself
                reason, error = "error", error or failure
            if cache.run.table is not None:
                cache.run.table.close(0)
            row.cache = None
        self._trim()
        row.finish_reason, row.error = reason, error
        row.state = "ended"  # last, since whoever waits for it goes on now

    def _trim(self) -> None:
        """Drop prompts beyond those that are kept; an idle loop without any gives its memory back."""
        excess = self.tree.droppable() - self._keep_pages
        if excess > 0:
            self.tree.drop(excess, self.clock())
        if not self._rows and not len(self.tree) and not self._model.holds_pool:
            self._begin()


def _told(error: BaseException) -> Exception:
    """The error of a row; an interrupt is that of whichever thread took the step."""
    if isinstance(error, Exception):
        return error
    told = RuntimeError(f"the step of this row was interrupted ({type(error).__name__}), and it cannot be repeated")
    told.__cause__ = error
    return told
