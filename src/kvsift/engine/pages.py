"""The pages of all sequences: the pool, the prefix cache over it, and the memory for both.

Every page has an owner (a sequence, a pinned prefix, the prefix cache or the captured steps), and as many references as
it has owners (``Pages.faults``).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter

import torch

from kvsift.engine.executor import Executor
from kvsift.engine.pinned_prefix import PinnedPrefix
from kvsift.engine.prefix_tree import Node, PrefixTree
from kvsift.engine.sequence import EngineSequence
from kvsift.models.hf.cache import SparseCache
from kvsift.stores.kv_pool import KVPool, LayerPool
from kvsift.stores.page_pool import PagePool, Run
from kvsift.stores.page_table import PageTable

OUT_OF_MEMORY = MemoryError, torch.OutOfMemoryError


class Pages:
    """The pages of all sequences of a model. The thread of the engine alone changes them.

    Args:
        executor: says what a sequence needs, and what memory there is.
        grid: tokens of a chunk, which are shared as one.
        keep_tokens: number of tokens of prompts that no sequence needs any more, kept for later prompts.
        state_bytes: see ``LLM``.

    Attributes:
        kv: the pool.
        tree: the prefix cache: chunks of prompts over the pool.
        pinned: prefixes whose owners keep them.
    """

    def __init__(self, executor: Executor, grid: int, keep_tokens: int, state_bytes: int) -> None:
        self._executor, self._grid, self._keep_pages = executor, grid, keep_tokens // executor.page_size
        self._state_bytes, self._num_pinned_bytes = state_bytes, 0
        self.pinned: weakref.WeakSet[PinnedPrefix] = weakref.WeakSet()
        self.renew()

    def renew(self) -> None:
        """Begin with an empty pool."""
        self.kv = KVPool(steady=self._executor.steady)
        self.tree = PrefixTree(self.kv.pages, self._grid, self._state_bytes)

    def counts(self) -> dict[str, int]:
        """Pages by owner: "free", "kept" (complete chunks of prompts, for those that share a prefix) or "unshared"
        (those that sequences alone own)."""
        pages, kept = self.kv.pages, self.tree.num_pages
        free, loose = pages.num_free, sum(run.num_pages for run in self._executor.runs(self.kv))
        return {"free": free, "kept": kept, "unshared": max(pages.num_pages - free - kept - loose, 0)}

    def num_state_bytes(self) -> dict[str, int]:
        """Bytes of the states of layers without pages by owner: "kept" (for those that share a prefix) or "pinned" (of
        documents)."""
        return {"kept": self.tree.num_state_bytes, "pinned": self._num_pinned_bytes}

    def cost_of(self, seq: EngineSequence) -> tuple[int, int]:
        """Tokens of a prompt that are to be prefilled, and pages to be reserved, beside the chunks that the sequence
        holds."""
        length, num_pages = len(seq.request.ids), self._executor.pages_of(seq)
        if seq.prefix is not None and seq.prefix.cache is not None:
            return length - seq.prefix.length, num_pages - seq.prefix.num_shared(seq)
        return length - self._grid * len(seq.nodes), num_pages - sum(node.num_pages for node in seq.nodes)

    def room(self, seqs: Iterable[EngineSequence]) -> int:
        """Pages that could be reserved now; where that is unknown, at least those that one of the sequences needs."""
        unused = self._executor.room(self.kv)
        if unused is None:
            unused = max(map(self._executor.pages_of, seqs), default=0)
        return self.kv.pages.num_free + self._num_allocated() + self.tree.droppable() + unused

    def _num_allocated(self) -> int:
        """Pages that are allocated, and not in the pool yet."""
        allocated = min((pool.keys.shape[1] for pool in self.kv.layers.values()), default=0)
        return max(allocated - self.kv.pages.num_pages, 0)

    def found(self, seq: EngineSequence) -> list[Node]:
        """Chunks that a sequence begins with; its last token is prefilled in any case."""
        return [] if seq.no_reuse else self.tree.find(seq.root, seq.request.ids[: len(seq.request.ids) - 1])

    def hold(self, seq: EngineSequence, nodes: Sequence[Node]) -> None:
        """Keep these chunks for a sequence, instead of those that it has held."""
        before, after = seq.nodes, set(nodes)
        self.tree.hold(nodes, seq, perf_counter())
        self.tree.let_go([node for node in before if node not in after], seq)
        seq.nodes = list(nodes)

    def seal(self, seq: EngineSequence) -> None:
        """Share the chunks that a sequence has completed."""
        cache, pages = seq.cache, self._grid // self._executor.page_size
        assert cache is not None
        kinds, ids = frozenset(seq.request.plan.summaries), seq.request.ids
        for stop in range(self._grid * (len(seq.nodes) + 1), seq.num_cached + 1, self._grid):
            first, chunk = stop // self._executor.page_size - pages, ids[stop - self._grid : stop]
            before = seq.nodes[-1] if seq.nodes else None
            runs, sealed, now = cache.table.runs_between(0, first, first + pages), cache.sealed(stop), perf_counter()
            seq.nodes.append(self.tree.seal(seq.root, before, chunk, runs, kinds, now, sealed))
            self.tree.hold(seq.nodes[-1:], seq, now)  # what it holds is always among its nodes
            if seq.nodes[-1].state is None and (state := cache.snapshot(stop)) is not None:
                self.tree.keep_state(seq.nodes[-1], state, now)
                if seq.nodes[-1].state is None:
                    seq.no_reuse = (
                        f"a state of its layers without pages takes {state.num_bytes:,} bytes, and state_bytes="
                        f"{self._state_bytes:,}"
                    )
        self.tree.thin(seq.nodes)
        self._maintain(cache)

    def adopt(self, seq: EngineSequence, cache: SparseCache) -> None:
        """Let the cache of a sequence begin with the chunks that it holds."""
        kinds = frozenset(seq.request.plan.summaries)
        is_stale = any(kinds - node.kinds for node in seq.nodes)
        last = seq.nodes[-1]
        assert last.state is not None, "chunks are found up to one with a state"
        self._executor.adopt(cache, last.state, is_stale, self._grid, last.sealed)
        for node in seq.nodes:
            node.kinds |= kinds
        self.tree.kinds |= kinds
        self._maintain(cache)

    def _maintain(self, cache: SparseCache) -> None:
        """Keep the summaries of shared pages when the sequences that wrote them are gone."""
        for attention in cache.attentions:
            self.kv.layers[attention.shape.layer].maintain(self.tree, self.tree.kinds)

    def fill(self, table: PageTable, seq: EngineSequence) -> None:
        """Begin a table with the chunks that a sequence holds, and reserve its pages: if there is less memory than it
        seemed, those of old prompts."""
        num_pages = self._executor.pages_of(seq)
        table.adopt(0, [run for node in seq.nodes for run in node.runs])
        try:
            self.reserve(table, num_pages)
        except OUT_OF_MEMORY:
            if not self.tree.drop(num_pages, perf_counter()):
                raise
            self.reserve(table, num_pages, grows=False)

    def reserve(self, table: PageTable, num_pages: int, grows: bool = True) -> None:
        """Reserve the pages of a sequence, and the memory for them, for which old prompts may have to go. Others will
        follow if the pool ``grows``."""
        room = self._executor.room(self.kv)
        missing = num_pages - table.num_pages(0)
        present = self.kv.pages.num_free + self._num_allocated()
        self.tree.drop(missing - present - (missing if room is None else room), perf_counter())
        pools = list(self.kv.layers.values())
        try:
            table.reserve(0, num_pages)
            if not all(pool.has_room for pool in pools):
                self._executor.release(self.kv)  # or there would be two pools for a while
            try:
                _fit(pools, self._executor.spare(self.kv) if grows else 0)
            except OUT_OF_MEMORY:
                _fit(pools, 0)
        except BaseException:  # or the sequences that run would be the next to fail
            table.release_spare(0)
            self.kv.pages.trim(min((pool.keys.shape[1] for pool in pools), default=0))
            raise

    def allocate(self, kinds: Iterable[str], max_seqs: int, num_pages: int | None) -> None:
        """Allocate pages with these kinds of summary: by default what so many sequences need at most, with the prompts
        that are kept. There may be room for fewer."""
        longest, room = self._executor.longest, self.room(())
        self.tree.kinds |= frozenset(kinds)
        for pool in self.kv.layers.values():
            pool.maintain(self.tree, self.tree.kinds)
        if num_pages is None:
            num_pages = room if longest is None else max_seqs * longest + self._keep_pages
        table = PageTable(1, self.kv)
        try:
            with suppress(*OUT_OF_MEMORY):  # the counts tell what there is
                self.reserve(table, min(num_pages, room), grows=False)
            for pool in self.kv.layers.values():  # steps are timed
                pool.write_noise(table.all_runs)
        finally:
            table.close(0)

    def drop(self, num_pages: int) -> int:
        """Drop old prompts of so many pages, or of all; the pages that are free now."""
        return self.tree.drop(num_pages, perf_counter())

    def pin(self, prefix: PinnedPrefix, cache: SparseCache, on_end: Callable[[Callable[[], None]], object]) -> None:
        """Keep a cache, whose tokens are those of a prefix, for sequences that begin with it. When the owner lets go of
        the prefix, ``on_end`` is given what returns its pages."""
        cache.restart_stats()
        cache.mark()
        prefix.cache, prefix.forks = cache, self._executor.forks(cache)
        self.pinned.add(prefix)
        self._num_pinned_bytes += cache.num_marked_bytes
        weakref.finalize(prefix, on_end, partial(self._unpin, cache)).atexit = False

    def _unpin(self, cache: SparseCache) -> None:
        """Return the pages of a cache, whose table may have been replaced since it was pinned."""
        self._num_pinned_bytes -= cache.num_marked_bytes
        if cache.run.table is not None:
            cache.run.table.clear()

    def trim(self, is_idle: bool) -> None:
        """Drop prompts beyond those that are kept; without a sequence and without any, the memory is given back."""
        excess = self.tree.droppable() - self._keep_pages
        if excess > 0:
            self.drop(excess)
        if is_idle and not len(self.tree) and not self._executor.holds_pool and not self._holds_prefix:
            self.renew()

    @property
    def _holds_prefix(self) -> bool:
        tables = [prefix.cache.run.table for prefix in self.pinned if prefix.cache is not None]
        return any(table is not None and table.kv is self.kv for table in tables)

    def faults(self, seqs: Iterable[EngineSequence]) -> list[str]:
        """What is wrong with the references to pages, given all sequences (``faults_of``)."""
        _ = self.kv.pages.num_free  # pages of owners that are gone are returned now
        caches = [seq.cache for seq in seqs] + [prefix.cache for prefix in self.pinned]
        tables = {id(cache): cache.run.table for cache in caches if cache is not None}.values()
        owned = [run for table in tables if table is not None and table.kv is self.kv for run in table.all_runs]
        return faults_of(self.kv.pages, [*owned, *self.tree.runs, *self._executor.runs(self.kv)])


def faults_of(pool: PagePool, owned: Iterable[Run]) -> list[str]:
    """What is wrong with the references to pages, given those of each owner; empty if every page has as many references
    as owners, and the others are free."""
    owners, free = _pages_of(owned), _pages_of(pool.free_runs)
    faults = [
        f"page {page} has {count} references and {owners[page]} owners"
        for page in range(pool.num_pages)
        if (count := pool.references(page)) != owners[page]
    ]
    faults += [f"page {page} is free and has an owner" for page in sorted(free.keys() & owners.keys())]
    faults += [f"page {page} is lost" for page in range(pool.num_pages) if not free[page] and not owners[page]]
    return faults


def _fit(pools: Sequence[LayerPool], spare: int) -> None:
    for pool in pools:
        with pool.lock:
            pool.fit(exactly=True, spare=spare)


def _pages_of(runs: Iterable[Run]) -> Counter[int]:
    return Counter(page for run in runs for page in range(*run))
