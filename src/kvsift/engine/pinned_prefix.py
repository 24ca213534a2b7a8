"""A pinned prefix: tokens at the beginning of prompts, cached until their owner lets go, for instance a document."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from kvsift.models.hf.cache import SparseCache


class PrefixSpoiled(Exception):
    """An answer has evicted tokens of the prefix for good (evict=true), or the engine has failed; it must be prefilled
    again."""


class PinnedPrefix:
    """Cached tokens with which sequences begin. The thread of the loop alone changes it.

    One sequence at a time continues in the prefix's own cache, which is rolled back when the sequence ends. Others
    continue in copies, which share its full pages, where the cache can be copied (``forks``), and wait for it
    elsewhere.

    Attributes:
        length: tokens of the prefix.
        cache: cache of the prefix; None until it is prefilled.
        user: the sequence that continues in the cache, or a lease; None if it is free.
        forks: sequences may continue in copies.
        is_spoiled: no sequence can begin with it any more (``PrefixSpoiled``).
        is_lent: a client has had the cache to itself, and may have gone on in it.
        build_s: seconds in which what decode needs was built when the prefix was prefilled.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.cache: SparseCache | None = None
        self.user: object | None = None
        self.forks = self.is_spoiled = self.is_lent = False
        self.build_s = 0.0
        self._waiting: deque[tuple[object, Callable[[], object]]] = deque()

    def take(self, seq: object, again: Callable[[], object]) -> bool:
        """Let a sequence continue in the cache or in a copy of it; False if it must wait, until ``again`` is called."""
        if self.user is None:
            self.user = seq
        elif self.user is not seq and not self.forks:
            self._waiting.append((seq, again))
            return False
        return True

    def lease(self, lease: object, granted: Callable[[], object]) -> None:
        """Give the cache to a client of the loop as soon as it is free."""
        if self.user is None:
            self.user = lease
            granted()
        else:
            self._waiting.append((lease, partial(self.lease, lease, granted)))

    def give_back(self, user: object) -> None:
        """Note that a sequence or a lease has ended, and let the next one begin that waits."""
        self._waiting = deque(each for each in self._waiting if each[0] is not user)
        if self.user is user:
            self.user = None
            if self._waiting:
                _, again = self._waiting.popleft()
                again()

    def fail(self) -> None:
        """End all waiting after a fault, which has ended all sequences: leases are granted, and find it spoiled."""
        self.is_spoiled, self.user = True, None
        waiting, self._waiting = self._waiting, deque()
        for _, again in waiting:
            if isinstance(again, partial) and again.func == self.lease:
                again()

    def num_shared(self, seq: object) -> int:
        """Pages of a sequence that are those of the prefix, or reserved behind them."""
        table = None if self.cache is None else self.cache.run.table
        if self.cache is None or table is None:
            return 0
        return table.rows[0].num_reserved if self.user is seq else self.length // self.cache.page_size
