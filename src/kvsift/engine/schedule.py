"""Scheduler of the engine loop: what runs next, a decode step or a chunk of one prompt, and whose.

It neither reads a clock nor runs anything, so the same history gives the same decisions. Sequences are never preempted:
admission reserves the pages of prompt and answer. Whatever is said of a client holds for all its requests together.

**Prefill.** Clients take turns chunk by chunk (``Turns``). A turn costs the tokens of the chunk, but at least
1 / ``overtakes`` of a full one. A client prefills its prompts one after the other, in order of arrival, except that its
requests of at most one chunk pass its longer ones, at most ``overtakes`` times between two chunks of these.

**Wait for the first token.** A request of one chunk, ahead of which its client has nothing, waits for each other client
that prefills: for as many tokens as it has itself and one chunk, thus at most two chunks, at the depth that the prompt
of that client has reached and the chunk that runs included; and for the decode steps that these chunks owe, one or
those of the decode share. In general, let w be what the client of a request pays from the arrival of the request to its
last chunk: every other client pays at most w and two chunks meanwhile. Time in which the client lacks a place or pages
comes on top.

**Places.** ``max_seqs`` sequences decode in a step. Up to twice as many are open, so that clients find a place beside
long answers: a client opens a further sequence only if more places are free than it has sequences. If more sequences
decode than a step takes, clients take turns at its places, and each places those of its sequences first that have
paused longest. A place is taken for ``PLACED_STEPS`` steps. A sequence that has none keeps its pages.

**Calls.** The sequences of one call decode once all of them are prefilled, or as many as find places and pages: before,
few of them would take steps that cost as much as those of all.

**Pages.** A client that has a sequence is admitted again only if an eighth of all pages is free afterwards. A client
without a sequence whose pages are not free is passed by ``overtakes`` requests of others; then nobody is admitted
before it.

**Decode share.** After a chunk of T seconds, decode steps run until they have taken T * share / (1 - share) seconds,
and at least one step does. In every window in which a sequence decodes, therefore,

    decode seconds >= (prefill seconds - those of the longest chunk) * share / (1 - share)

and a gap between two steps is at most one chunk and one step; ``pauses.py`` makes it shorter. Without a sequence that
decodes, chunks run back to back; without a prompt to prefill, steps do.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from kvsift.engine.clients import Account, ScheduledRequest, Turns

OPEN_SEQUENCES = 2  # for one that decodes in a step; a captured group has as many (``engine.graphs.session``)
PLACED_STEPS = 16  # as captured steps are assigned anew where sequences change
LEFT_PAGES = 8  # one of so many pages is left to clients without a sequence


class Decision(NamedTuple):
    """The next launch: a chunk, a decode step, or neither when there is nothing to do; never both.

    Whether decoding has had its share is known only after a step, so a chunk is decided after it.

    Attributes:
        admit: the request that gets a sequence before the launch; always also ``prefill``.
        prefill: the sequence whose next chunk is prefilled.
        decode: whether sequences decode one token.
    """

    admit: int | None = None
    prefill: int | None = None
    decode: bool = False


class Schedule:
    """Requests from arrival to end: waiting, prefilling, decoding.

    Every decision is carried out and reported, by ``has_prefilled`` or ``has_decoded``, before the next one is asked
    for.

    Args:
        max_seqs: sequences that decode in one step.
        grid: tokens of a chunk. A request with at most as many tokens to compute is prefilled in one chunk.
        decode_share: share of the time that decoding is owed while prompts are prefilled, below 1.
        max_waiting: requests that may wait.
        overtakes: short requests that may pass a longer one of their client between two of its chunks, and requests of
            others that may pass one which lacks pages.
    """

    def __init__(
        self, max_seqs: int, grid: int, decode_share: float = 0.5, max_waiting: int = 4096, overtakes: int = 4
    ) -> None:
        if min(max_seqs, grid, max_waiting, overtakes) < 1 or not 0 <= decode_share < 1:
            raise ValueError(
                f"{max_seqs=}, {grid=}, {max_waiting=} and {overtakes=} must be at least 1, "
                f"and {decode_share=} in [0, 1)"
            )
        self._max_seqs = max_seqs
        self._grid = grid
        self._max_waiting = max_waiting
        self._overtakes = overtakes
        self._decode_per_prefill = decode_share / (1 - decode_share)  # seconds owed per second of a chunk
        self._owed = 0.0  # seconds
        self._must_decode = False  # before the next chunk, if a sequence decodes
        self._accounts: dict[str, Account] = {}
        self._waiting: dict[int, Account] = {}  # by key; and so on
        self._prefilling: dict[int, Account] = {}
        self._decoding: dict[int, Account] = {}
        self._prefill_turns, self._place_turns = Turns(), Turns()
        self._held: set[int] = set()  # of the sequences that decode, those that wait for others of their call
        self._placed: set[int] = set()  # of the sequences that decode, if not all
        self._steps_left = 0  # before places are taken anew

    @property
    def waiting(self) -> tuple[int, ...]:
        """Keys in order of arrival."""
        return tuple(self._waiting)

    @property
    def prefilling(self) -> tuple[int, ...]:
        """Keys of the sequences whose prompts are partly prefilled, in order of admission."""
        return tuple(self._prefilling)

    @property
    def decoding(self) -> tuple[int, ...]:
        """Keys in the order in which prompts were complete."""
        return tuple(self._decoding)

    @property
    def running(self) -> bool:
        """Whether a step has sequences."""
        return len(self._decoding) > len(self._held)

    def add(self, key: int, client: str, tokens: int, pages: int, call: object = None) -> bool:
        """Put a request in the queue, unless that is full.

        Args:
            key: unique among the requests that have not been removed.
            client: who shares fairly with other clients.
            tokens: prompt tokens to compute, at least 1.
            pages: pages that admission reserves. A request that fits no empty pool must not be added: it blocks others.
            call: what it came with; None: it came alone.

        Returns:
            False if the queue is full; the request is then unknown to the scheduler.
        """
        assert tokens >= 1, "the last token of a prompt is always computed"
        known = self._waiting, self._prefilling, self._decoding
        assert not any(key in keys for keys in known), f"request {key} has been added before"
        if len(self._waiting) >= self._max_waiting:
            return False
        account = self._waiting[key] = self._accounts.setdefault(client, Account(client))
        account.waiting[key] = ScheduledRequest(key, tokens, pages, call)
        return True

    def revise(self, key: int, tokens: int, pages: int) -> None:
        """Change what a waiting request costs, when more or less of its prompt can be reused; its place stays."""
        assert tokens >= 1, "the last token of a prompt is always computed"
        request = self._waiting[key].waiting[key]
        request.tokens, request.pages = tokens, pages

    def decide(self, room: int) -> Decision:
        """Decide the next launch; an admitted request has left the queue.

        Args:
            room: pages that could be reserved now, free ones and those that the prefix cache would give up.
        """
        requests = self._candidates(room) if self._waiting or self._prefilling else {}
        coming = {request.call for request in requests.values()} - {None}
        self._held = {key for key, account in self._decoding.items() if account.decoding[key].call in coming}
        if not requests or (self._must_decode and self.running):
            return Decision(decode=self.running)
        least = -(-self._grid // self._overtakes)
        costs = {name: min(max(request.tokens, least), self._grid) for name, request in requests.items()}
        client = self._prefill_turns.choose(costs)
        account, request = self._accounts[client], requests[client]
        if not account.prefills(request):
            return Decision(prefill=request.key)
        self._prefilling[request.key] = self._waiting.pop(request.key)
        for other in self._accounts.values():
            if other.name not in requests and other.head is not None and not other.num_open:
                other.head.passed += 1
        return Decision(admit=request.key, prefill=request.key)

    def has_prefilled(self, key: int, tokens: int, seconds: float, done: bool) -> None:
        """Record a chunk.

        Args:
            key: the sequence; one that was removed while its chunk ran still costs the time.
            tokens: prompt tokens by which the sequence advanced, reused ones included.
            done: the prompt is complete: the sequence decodes from the next step on.
        """
        self._owed = seconds * self._decode_per_prefill
        self._must_decode = True
        if (account := self._prefilling.get(key)) is None:
            return
        if done:
            self._decoding[key] = self._prefilling.pop(key)
            account.decoding[key] = account.prefilling.pop(key)
        else:
            account.prefilling[key].tokens -= tokens

    def step_sequences(self) -> tuple[int, ...]:
        """Place sequences for a decode step; returns their keys in the order of ``decoding``."""
        present = [key for key in self._decoding if key not in self._held]
        if len(present) <= self._max_seqs:
            self._placed.clear()
            self._steps_left = 0
            return tuple(present)
        if not self._steps_left:
            self._placed.clear()
            self._steps_left = PLACED_STEPS
        self._steps_left -= 1
        while len(self._placed) < self._max_seqs:
            paused = {self._decoding[key].name: 1 for key in present if key not in self._placed}
            account = self._accounts[self._place_turns.choose(paused)]
            key = next(key for key in account.decoding if key in present and key not in self._placed)
            account.decoding[key] = account.decoding.pop(key)
            self._placed.add(key)
        return tuple(key for key in present if key in self._placed)

    def has_decoded(self, seconds: float) -> None:
        """Record a decode step."""
        self._owed -= seconds
        self._must_decode = self._owed > 0

    def remove(self, key: int) -> None:
        """Forget a request that ended, failed or was cancelled, in any state.

        Raises:
            KeyError: the request is unknown, or has been removed before.
        """
        keys = next((keys for keys in (self._waiting, self._prefilling) if key in keys), self._decoding)
        account = keys.pop(key)
        self._placed.discard(key)
        self._held.discard(key)
        if not account.remove(key):
            del self._accounts[account.name]
        if not self._accounts:  # nobody owes anything to anybody
            self._prefill_turns, self._place_turns = Turns(), Turns()

    def _candidates(self, room: int) -> dict[str, ScheduledRequest]:
        """The request of each client that could be prefilled next."""
        accounts = self._accounts.values()
        heads = (account.head for account in accounts if not account.num_open)
        first = next((head for head in heads if head is not None and head.passed >= self._overtakes), None)
        free = OPEN_SEQUENCES * self._max_seqs - len(self._prefilling) - len(self._decoding)
        left = (room + sum(account.open_pages for account in accounts)) // LEFT_PAGES

        def fits(account: Account, request: ScheduledRequest) -> bool:
            kept = left if account.num_open else 0
            return first in (None, request) and free > account.num_open and room >= request.pages + kept

        found = {each.name: each.next_prefill(self._grid, self._overtakes, partial(fits, each)) for each in accounts}
        return {name: request for name, request in found.items() if request is not None}
