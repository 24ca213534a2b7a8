"""The loop of the engine: sequences are admitted, prefilled chunk by chunk, decode together, and leave.

It runs in a thread of its own (``engine.thread``), from the first request on; other threads are its clients. What a
sequence answers does not depend on the others: it is prefilled on a fixed grid of chunks, attended by itself, and
shares with others only pages that are full and were written by the same pass over the same tokens.
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

from kvsift.engine.executor import Executor
from kvsift.engine.pages import OUT_OF_MEMORY, Pages
from kvsift.engine.pauses import Pauses
from kvsift.engine.pinned_prefix import PinnedPrefix, PrefixSpoiled
from kvsift.engine.schedule import Decision, Schedule
from kvsift.engine.sequence import OPEN_STATES, CacheReport, EngineSequence, FinishReason
from kvsift.engine.speculative.exact_step import Logits, step_exactly
from kvsift.engine.thread import EngineThread
from kvsift.errors import NotEnoughMemory, Unavailable
from kvsift.layer.accounting import Snapshot
from kvsift.models.hf.cache import SparseCache
from kvsift.plan.plan import Plan
from kvsift.stores.page_table import PageTable

MOST_OPEN = 4096  # requests that wait or run
STATE_BYTES = 1 << 30  # seven states of 48 layers with 48 heads of 128 x 128 in float32 (Qwen3.6-27B)
WARM_SEQUENCES = 8  # for which memory is allocated and steps are captured ahead


class Loop(EngineThread):
    """Sequences over one pool of pages.

    Args:
        executor: runs the passes.
        grid: prompt tokens of a chunk, of which a lone prompt takes several at once; a multiple of the page size.
        max_seqs: sequences that decode in one step.
        keep_tokens: number of tokens of prompts that no sequence needs any more, kept for later prompts.
        state_bytes: see ``LLM``.
        turn: held during a step.
        clock: seconds.
    """

    def __init__(
        self, executor: Executor, grid: int, max_seqs: int = 8, keep_tokens: int = 0,
        state_bytes: int = STATE_BYTES, turn: AbstractContextManager[object] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:  # fmt: skip
        super().__init__(turn)
        assert grid % executor.page_size == 0, f"a grid of {grid} tokens splits pages of {executor.page_size}"
        self._executor, self.grid, self.max_seqs, self.clock = executor, grid, max_seqs, clock
        self.pages = Pages(executor, grid, keep_tokens, state_bytes)
        self._entering: deque[EngineSequence] = deque()  # submitted, in their order
        self._num_threads = 0  # of torch, as the client that came last has set them; 0: not asked yet
        self._keys = itertools.count(1)
        self._begin()

    def _begin(self) -> None:
        self._schedule = Schedule(self.max_seqs, self.grid)
        self._seqs: dict[int, EngineSequence] = {}  # that have not ended
        self.pages.renew()

    @property
    def seqs(self) -> list[EngineSequence]:
        """Sequences that have not ended."""
        return list(self._seqs.values())

    def counts(self) -> dict[str, dict[str, int]]:
        """Count sequences by state, and pages and bytes of states by owner, without waiting for a step: the numbers may
        be a moment apart."""
        states = Counter(seq.state for seq in self.seqs)
        return {
            "sequences": {state: states[state] for state in OPEN_STATES},
            "pages": self.pages.counts(),
            "state_bytes": self.pages.num_state_bytes(),
        }

    def submit(self, seq: EngineSequence) -> None:
        """Queue a sequence for admission.

        Raises:
            InputError: if too many requests wait.
        """
        if len(self._seqs) + len(self._entering) >= MOST_OPEN:
            raise Unavailable(FULL)
        seq.key = next(self._keys)
        if self._num_threads and (number := torch.get_num_threads()) != self._num_threads:
            self._num_threads = number
            self.post(partial(torch.set_num_threads, number))
        self._num_threads = torch.get_num_threads()
        self._entering.append(seq)
        self.post(self._enter_next)

    def cancel(self, seq: EngineSequence) -> None:
        """End a sequence, if it has not ended, after the present step."""
        self.post(partial(self._close, seq, False))

    def close(self, seq: EngineSequence) -> None:
        """As ``cancel``, and let go of the prompt that it holds, if it does. Safe in a finalizer."""
        self.post(partial(self._close, seq, True))

    def step(self) -> None:
        if self._thread is not None and not self.is_own_thread:
            return self.call(lambda: None)  # waits for a step of the thread
        with self._stepping():
            self._end_late_sequences()
            decision = self._schedule.decide(self._room_to_admit() if self._schedule.waiting else 0)
            if decision.decode:
                self._decode()
            if decision.prefill is not None:
                self._advance(self._seqs[decision.prefill])
            elif decision == Decision() and self._schedule.waiting:
                self._refuse_largest()

    @property
    def has_work(self) -> bool:
        return bool(self._seqs)

    def _cancel_all(self) -> None:
        for seq in self.seqs:
            self._end(seq, "cancelled")

    def _fail(self, error: BaseException) -> None:
        """End all sequences after a fault that none of them explains, and begin with an empty pool."""
        failure = RuntimeError(f"the engine failed ({type(error).__name__}: {error})")
        failure.__cause__ = error
        seqs = self.seqs
        for prefix in list(self.pages.pinned):
            prefix.fail()
        self._executor.fail()
        self._begin()
        for seq in seqs:
            seq.cache, seq.nodes, seq.finish_reason, seq.error = None, [], "error", failure
            seq.state = "ended"
            seq.on_end()

    def _enter_next(self) -> None:
        self._try_to_enter(self._entering.popleft())

    def _try_to_enter(self, seq: EngineSequence) -> None:
        try:
            self._enter(seq)
        except Exception as error:  # of this sequence alone
            self._seqs[seq.key] = seq
            self._end(seq, "error", error)

    def _enter(self, seq: EngineSequence) -> None:
        if self._is_closed:
            self._finish(seq, "cancelled", None)
            return
        self._seqs[seq.key] = seq
        if seq.prefix is not None and not seq.prefix.take(seq, partial(self._try_to_enter, seq)):
            return  # it waits for the prefix
        apart = self._executor.reason_apart(seq)
        seq.in_pool = apart is None
        own = SCORED if seq.score is not None else "" if seq.prefix is None else DOCUMENT
        seq.no_reuse = apart or own or seq.request.plan.not_shared or ""
        seq.root = b"" if seq.no_reuse else self._executor.root(seq)
        self.pages.hold(seq, self.pages.found(seq))
        if not self._schedule.add(seq.key, seq.request.client, *self.pages.cost_of(seq), seq.call):
            raise Unavailable(FULL)

    def _close(self, seq: EngineSequence, lets_go: bool) -> None:
        self._end(seq, "cancelled")
        self.pages.hold(seq, [] if lets_go else seq.nodes)
        self._trim()

    def release(self) -> None:
        """Give the memory of the pool back, if no sequence needs it and no prompt is kept."""
        self.call(self._release)

    def _release(self) -> None:
        self._executor.forget()
        self._trim()

    def rewound(self, prefix: PinnedPrefix, plan: Plan) -> SparseCache:
        """The cache of a pinned prefix under a plan, for a client that has the prefix to itself.

        Raises:
            PrefixSpoiled: if the prefix must be prefilled again.
        """
        assert not isinstance(prefix.user, EngineSequence), "a sequence continues in this cache"
        assert prefix.cache is not None, "the prefix was prefilled"
        if prefix.is_spoiled or not self._executor.rewind(prefix.cache):
            raise PrefixSpoiled
        prefix.is_lent = True
        self._replan(prefix, prefix.cache, plan)
        return prefix.cache

    def restore_prefix(self, seq: EngineSequence, rotation: int | None, fill: Callable[[SparseCache], None]) -> None:
        """Pin the prompt of a sequence, whose cache is filled by ``fill`` instead of a prefill."""
        self.call(partial(self._restore_prefix, seq, rotation, fill))

    def _restore_prefix(self, seq: EngineSequence, rotation: int | None, fill: Callable[[SparseCache], None]) -> None:
        assert seq.pins is not None
        table = PageTable(1, self.pages.kv) if self._executor.reason_apart(seq) is None else None
        try:
            if table is not None:
                self.pages.reserve(table, self._executor.pages_of(seq))
            seq.cache = self._executor.open(seq, table)
            seq.cache.rotation = rotation
            seq.source = fill
            self._executor.fill_from_source(seq)
            seq.cache.prepare()
            self.pages.pin(seq.pins, seq.cache, self._let_go)
        except BaseException:
            if table is not None:
                table.close(0)
            self._trim()
            raise

    @contextmanager
    def leased(self, prefix: PinnedPrefix, plan: Plan) -> Iterator[SparseCache]:
        """The cache of a pinned prefix under a plan, which no sequence continues in meanwhile."""
        granted: SimpleQueue[None] = SimpleQueue()
        lease = object()
        self.start()
        try:
            self.post(partial(prefix.lease, lease, partial(granted.put, None)))
            granted.get()
            yield self.call(partial(self.rewound, prefix, plan))
        finally:
            self.post(partial(prefix.give_back, lease))

    def prepare(self, plan: Plan, exact_plan: Plan, kinds: Iterable[str], num_pages: int | None = None) -> int:
        """Allocate pages with these kinds of summary, and let the model capture the steps of a plan, and of exact
        sequences, whose plan is the other one; returns how many steps. Some sequence must have decoded in captured
        steps.

        ``num_pages`` are by default what ``WARM_SEQUENCES`` sequences need at most, with the prompts that are kept.
        There may be room for fewer.
        """
        return self.call(partial(self._prepare, plan, exact_plan, frozenset(kinds), num_pages))

    def _prepare(self, plan: Plan, exact_plan: Plan, kinds: frozenset[str], num_pages: int | None) -> int:
        num_seqs = min(self.max_seqs, WARM_SEQUENCES)
        self.pages.allocate(kinds, num_seqs, num_pages)
        return self._executor.prepare(self.pages.kv, plan, exact_plan, num_seqs)

    def check(self) -> None:
        """Check that every page has an owner, and as many references as owners (``AssertionError``), for tests."""
        faults = self.call(lambda: self.pages.faults(self.seqs))
        assert not faults, faults[:5]

    def _end_late_sequences(self) -> None:
        now = self.clock()
        for seq in list(self._seqs.values()):  # one that continues a document has a first token in any case
            if seq.request.deadline is not None and now >= seq.request.deadline and seq.prefix is None:
                self._end(seq, "deadline")

    def _advance(self, seq: EngineSequence) -> None:
        """Prefill the next chunk of a sequence, which is admitted with the first one."""
        if seq.cache is None:
            self._admit(seq)
        if not seq.is_ended:
            self._prefill(seq, Pauses(self.clock, self._pause))

    def _refuse_largest(self) -> None:
        """Nothing runs, and there is no room for the next sequence in the queue: there never will be, unless sequences
        in the queue hold prompts for later."""
        waiting = [self._seqs[key] for key in self._schedule.waiting]
        if any(seq.nodes for seq in waiting):
            for seq in waiting:
                self.pages.hold(seq, [])
                self._schedule.revise(seq.key, *self.pages.cost_of(seq))
            return
        seq = max(waiting, key=self._executor.pages_of)
        length, more = len(seq.request.ids), seq.request.max_new_tokens
        room = self.pages.room(self.seqs) * self._executor.page_size
        error = NotEnoughMemory(
            f"the prompt has {length:,} tokens and up to {more:,} will be generated; there is memory for {room:,} in "
            "all. Shorten the prompt, or generate fewer."
        )
        self._end(seq, "error", error)

    def _room_to_admit(self) -> int:
        """Number of pages that could be reserved. If it cannot be determined, the sequences that wait for pages end
        with the reason, and the others continue."""
        try:
            return self.pages.room(self.seqs)
        except Exception as error:
            for key in self._schedule.waiting:
                failure = RuntimeError(f"the free memory cannot be determined ({type(error).__name__}: {error})")
                failure.__cause__ = error
                self._end(self._seqs[key], "error", failure)
            return 0

    def _admit(self, seq: EngineSequence) -> None:
        seq.state = "prefilling"
        if seq.prefix is not None and seq.prefix.cache is not None:
            self._continue(seq, seq.prefix)
            return
        self.pages.hold(seq, self.pages.found(seq))
        length, table = self.grid * len(seq.nodes), PageTable(1, self.pages.kv) if seq.in_pool else None
        try:
            if table is not None:
                self.pages.fill(table, seq)
            seq.cache = self._executor.open(seq, table)
            seq.cache.stats.observer = seq.observer
            if seq.nodes:
                self.pages.adopt(seq, seq.cache)
            elif seq.source is not None:
                length = self._begin_from_source(seq)
            seq.num_cached = seq.num_reused = length
            seq.output.note_prefilled(length)
        except Exception as error:  # of this sequence alone
            if table is not None:
                table.close(0)
            seq.cache = None
            self._end(seq, "error", error)

    def _continue(self, seq: EngineSequence, prefix: PinnedPrefix) -> None:
        """Let a sequence begin with a pinned prefix: in its cache, or in a copy that shares its full pages."""
        assert prefix.cache is not None
        try:
            if prefix.is_spoiled:
                raise PrefixSpoiled
            cache = prefix.cache
            if prefix.user is not seq:
                cache = self._executor.fork(cache, seq)
            elif prefix.is_lent:
                self._executor.rewind(cache)
                prefix.is_lent = False
            try:
                if cache.run.table is not None and cache.run.table.kv is self.pages.kv:
                    self.pages.reserve(cache.run.table, self._executor.pages_of(seq))
                seq.build_s = self._replan(prefix, cache, seq.request.plan)
                self._executor.begin(seq, cache)
            except BaseException:
                if cache is not prefix.cache and cache.run.table is not None:
                    cache.run.table.close(0)
                raise
            seq.cache, seq.num_cached, seq.num_reused = cache, prefix.length, prefix.length
            cache.stats.observer = seq.observer
            seq.output.note_prefilled(prefix.length)
        except Exception as error:  # of this sequence alone
            self._end(seq, "error", error)

    def _replan(self, prefix: PinnedPrefix, cache: SparseCache, plan: Plan) -> float:
        """Let the cache of a pinned prefix go on under a plan; seconds in which that built what decode needs."""
        started, is_new = self.clock(), cache.run.plan != plan
        cache.replan(plan)
        if is_new:
            cache.prepare()  # now, and not in the first decode step
        return self.clock() - started if is_new else 0.0

    def _begin_from_source(self, seq: EngineSequence) -> int:
        """Begin with tokens from elsewhere, and share them; returns how many. The end of the prompt is prefilled
        again."""
        assert seq.cache is not None
        self._executor.fill_from_source(seq)
        length = (len(seq.request.ids) - 1) // self.grid * self.grid
        seq.cache.undo(length)
        for seq.num_cached in range(self.grid, length + 1, self.grid):
            self.pages.seal(seq)
        return length

    def _prefill(self, seq: EngineSequence, pauses: Pauses) -> None:
        """Prefill the next chunk of a prompt, and with the last one choose the first token."""
        started, cache, before = self.clock(), seq.cache, seq.num_cached
        assert cache is not None
        stop, end = self._next_stop(seq), len(seq.request.ids)
        counters, logits = cache.stats.snapshot(), None
        try:
            if stop > before:
                if stop >= end - 1 and seq.prefix is None:
                    cache.prepare_after_next()
                logits = self._executor.prefill(seq, seq.request.ids[before:stop], pauses)
                counters = cache.stats.snapshot()
                self._count(seq, before, stop)
            if stop == end - 1:  # the last token alone, so that its bits do not depend on what was reused before it
                cache.prepare()
                logits = self._executor.prefill(seq, seq.request.ids[stop:])
                seq.num_cached = end
            if seq.num_cached >= end:
                self._look_again()  # now: it may end with its first token, and let go of its chunks
            self._has_prefilled(seq, cache, logits)
        except OUT_OF_MEMORY as error:
            if not self._undo(seq, counters) or not self.pages.drop(self.pages.kv.pages.num_pages):
                self._end(seq, "error", error)  # else it is prefilled again, in the next step
        except Exception as error:
            self._end(seq, "error", error)
        finally:
            prefill_s = self.clock() - started - pauses.seconds
            self._schedule.has_prefilled(seq.key, seq.num_cached - before, prefill_s, done=seq.num_cached >= end)
            if pauses.seconds:
                self._schedule.has_decoded(pauses.seconds)  # of what decoding is owed now

    def _next_stop(self, seq: EngineSequence) -> int:
        """Where the next chunk of a prompt ends: on the grid, which begins anew behind a pinned prefix."""
        before, end = seq.num_cached, len(seq.request.ids)
        others = any(each.call is None or each.call is not seq.call for each in self._seqs.values() if each is not seq)
        alone = not others and seq.request.plan.prefill is None
        chunks = max(self._executor.most_prefilled // self.grid, 1) if alone else 1
        if seq.prefix is None:
            # Prompts of one call save the pass of a single token, which costs a small model as much as that of a chunk.
            is_saved = seq.call is not None and seq.observer is None and not self._executor.splits_freely
            last_apart = seq.pins is None and not is_saved
            stop = min(before - before % self.grid + chunks * self.grid, end - last_apart)
            whole = stop - stop % self.grid  # states of layers are shared as they are between two passes
            return whole if whole > before and seq.cache is not None and seq.cache.has_states else stop
        stop = min(before - (before - seq.prefix.length) % self.grid + chunks * self.grid, end)
        return stop - (stop == end - 1)  # the last token is not left over

    def _count(self, seq: EngineSequence, before: int, stop: int) -> None:
        """Note that a prompt is cached from one position to another, and share its chunks."""
        for seq.num_cached in (*range(before - before % self.grid + self.grid, stop, self.grid), stop):
            if seq.num_cached % self.grid == 0 and not seq.no_reuse:
                self.pages.seal(seq)

    def _has_prefilled(self, seq: EngineSequence, cache: SparseCache, logits: Tensor | None) -> None:
        """Tell the client what is cached, and once the prompt is, let it choose a token or pin it."""
        if seq.num_cached < len(seq.request.ids):
            self._note_prefilled(seq)
            return
        if seq.pins is not None:
            self._end_as_prefix(seq, seq.pins, cache)
            return
        cache.prepare()
        self._note_prefilled(seq)
        if not seq.is_ended:
            assert logits is not None
            self._choose(seq, logits)

    def _end_as_prefix(self, seq: EngineSequence, prefix: PinnedPrefix, cache: SparseCache) -> None:
        """End a sequence that has read a prefix, which keeps its cache."""
        started = self.clock()
        cache.prepare()
        prefix.build_s = self.clock() - started
        seq.output.note_prefilled(seq.num_cached)
        seq.report = CacheReport.of(cache)
        self.pages.pin(prefix, cache, self._let_go)
        seq.cache = None
        self._end(seq, "stop")

    def _let_go(self, clear: Callable[[], None]) -> None:
        """Return the pages of a prefix that its owner has let go of."""
        self.post(clear)
        self.post(self._trim)

    def _pause(self) -> bool:
        """Decode a token of every sequence that decodes, in the middle of a chunk; returns whether there are any."""
        if not self._schedule.running:
            return False
        self._decode()
        if self.after_step is not None:
            self.after_step()
        return True

    def _look_again(self) -> None:
        """Let waiting sequences share the pages of a prompt that was prefilled meanwhile."""
        for seq in [self._seqs[key] for key in self._schedule.waiting]:
            found = self.pages.found(seq)
            if len(found) > len(seq.nodes):
                self.pages.hold(seq, found)
                self._schedule.revise(seq.key, *self.pages.cost_of(seq))

    def _decode(self) -> None:
        started = self.clock()
        seqs = [self._seqs[key] for key in self._schedule.step_sequences()]
        for group in self._groups(seqs):
            self._decode_together(group)
        self._schedule.has_decoded(self.clock() - started)

    def _groups(self, seqs: Sequence[EngineSequence]) -> Sequence[Sequence[EngineSequence]]:
        try:
            return self._executor.groups(seqs)
        except Exception as error:
            failed = next((seq for seq in seqs if not seq.path), None)  # they begin in order
            if failed is None:
                raise
            self._end(failed, "error", error)
            return self._groups([seq for seq in seqs if not seq.is_ended])

    def _decode_together(self, seqs: Sequence[EngineSequence]) -> None:
        counted = [
            None if seq.group is not None or seq.cache is None else seq.cache.run.stats.snapshot("decode")
            for seq in seqs
        ]
        before = [seq.num_cached for seq in seqs]
        try:
            if seqs[0].decoder is not None:
                step_exactly(self._executor, seqs, self._chosen)
            else:
                for seq, logits in zip(seqs, self._executor.decode_sequences(seqs)):
                    seq.num_cached += 1
                    self._choose(seq, logits)
        except Exception as error:
            if len(seqs) == 1:
                self._end(seqs[0], "error", error)
                return
            for seq, num_cached, counters in zip(seqs, before, counted):
                is_notified = seq.is_ended or (seq.decoder is None and seq.num_cached > num_cached)
                if not is_notified and not self._undo(seq, counters):
                    self._end(seq, "error", error)
            for seq in seqs:  # the one that fails again ends
                if not seq.is_ended:
                    self._decode_together([seq])

    def _chosen(self, seq: EngineSequence, logits: Logits) -> int | None:
        """The token that the client chooses after one more is cached; None if the sequence has ended."""
        seq.num_cached += 1
        self._choose(seq, logits)
        return None if seq.is_ended else seq.token

    def _note_prefilled(self, seq: EngineSequence) -> None:
        """Tell the client how much of the prompt is cached."""
        try:
            seq.output.note_prefilled(seq.num_cached)
        except Exception as error:
            self._end(seq, "error", error)

    def _choose(self, seq: EngineSequence, logits: Logits) -> None:
        """Let the client choose the next token from the logits of the last one that is cached."""
        assert seq.cache is not None
        try:
            seq.state = "decoding"
            seq.token, reason = seq.output.take(logits, seq.cache.run.stats.probe_s)
            if reason:
                self._end(seq, reason)
        except Exception as error:
            self._end(seq, "error", error)

    def _undo(self, seq: EngineSequence, counters: Snapshot | None) -> bool:
        """Forget what a failed pass has stored and counted; False if the sequence cannot."""
        if counters is None:
            self._executor.recall(seq)
            return True
        if seq.cache is None or not seq.request.plan.can_undo:
            return False
        state = seq.nodes[-1].state if seq.nodes and seq.cache.has_states else None
        if state is not None and state.length == seq.num_cached:
            seq.cache.return_to(state)
        elif seq.cache.can_undo:
            seq.cache.undo(seq.num_cached)
        else:
            return False
        seq.cache.stats.set_back(counters)
        return True

    def _end(self, seq: EngineSequence, reason: FinishReason, error: BaseException | None = None) -> None:
        if self._seqs.pop(seq.key, None) is not None:  # else it has ended, or was never queued
            self._finish(seq, reason, error)

    def _finish(self, seq: EngineSequence, reason: FinishReason, error: BaseException | None) -> None:
        with suppress(KeyError):
            self._schedule.remove(seq.key)
        if seq.cache is not None:
            try:
                self._executor.leave(seq)
                seq.report = CacheReport.of(seq.cache)
            except Exception as failure:  # of a method that describes itself
                reason, error = "error", error or failure
            self._give_back(seq, seq.cache)
        if seq.prefix is not None:
            seq.prefix.give_back(seq)
        if not seq.holds:
            self.pages.hold(seq, [])
        self._trim()
        seq.finish_reason, seq.error = reason, error
        seq.state = "ended"  # last, since whoever waits for it goes on now
        seq.on_end()

    def _give_back(self, seq: EngineSequence, cache: SparseCache) -> None:
        """Return the pages of a sequence, but those of a pinned prefix."""
        seq.cache = None
        if seq.prefix is None or seq.prefix.user is not seq or seq.prefix.cache is not cache:
            if cache.run.table is not None:
                cache.run.table.close(0)
            return
        try:
            seq.prefix.is_spoiled = not self._executor.rewind(cache)
        except Exception:
            seq.prefix.is_spoiled = True

    def _trim(self) -> None:
        """Drop prompts beyond those that are kept; an idle loop without any gives its memory back."""
        self.pages.trim(not self._seqs)


FULL = "too many requests are waiting. Try again when some of them have ended."
DOCUMENT = "it continues a document"
SCORED = "all tokens of its prompt are scored"
