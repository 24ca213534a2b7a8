"""Clients of the engine loop: the requests of each, and whose turn it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


class Turns:
    """Fair queueing: clients that want turns pay equal amounts for them, whatever each turn costs.

    What a client pays is counted from its start. The client whose next turn would bring it to the lowest count has its
    turn; of equal ones, that whose last turn is longest ago. A client that comes, or comes back, starts at the present
    count, but at no less than it has reached before. The present advances with each turn, by an equal share of its
    cost, to no less than the count before that turn and no more than the count after it.

    So each other client pays at most the costs of two turns before the next one of a client that wants it: of that
    turn, and of one of its own.
    """

    def __init__(self) -> None:
        self._present = self._number = 0
        self._counts: dict[str, tuple[int, int]] = {}  # and the number of the last turn

    def choose(self, costs: Mapping[str, int]) -> str:
        """Return the client that has its turn, of those that want one at these costs."""
        self._counts = {
            name: count for name, count in self._counts.items() if name in costs or count[0] > self._present
        }
        for client in costs:
            if client not in self._counts:
                self._count(client, self._present)
        chosen = min(costs, key=lambda client: (self._counts[client][0] + costs[client], self._counts[client][1]))
        before, cost = self._counts[chosen][0], costs[chosen]
        self._present = min(max(self._present, before) + cost // (len(costs) + 1), before + cost)
        self._count(chosen, before + cost)
        return chosen

    def _count(self, client: str, count: int) -> None:
        self._number += 1
        self._counts[client] = count, self._number


@dataclass(eq=False, slots=True)
class ScheduledRequest:
    """A request by what it costs.

    Attributes:
        tokens: prompt tokens still to be computed.
        pages: number of pages that its admission reserves.
        call: what it came with; None: it came alone.
        passed: requests of other clients that were admitted while it lacked its pages.
    """

    key: int
    tokens: int
    pages: int
    call: object = None
    passed: int = 0


@dataclass(eq=False, slots=True)
class Account:
    """The requests of a client by state and key.

    Attributes:
        waiting: requests that wait, in order of arrival.
        prefilling: requests in order of admission; the last one is prefilled next. At most one has more than a chunk.
        decoding: those that have paused longest come first.
        overtaken: requests that were admitted before a longer one since the last chunk of that.
    """

    name: str
    waiting: dict[int, ScheduledRequest] = field(default_factory=dict)
    prefilling: dict[int, ScheduledRequest] = field(default_factory=dict)
    decoding: dict[int, ScheduledRequest] = field(default_factory=dict)
    overtaken: int = 0

    @property
    def num_open(self) -> int:
        """Sequences that it has."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def open_pages(self) -> int:
        """Pages that its sequences have reserved."""
        return sum(request.pages for request in (*self.prefilling.values(), *self.decoding.values()))

    @property
    def head(self) -> ScheduledRequest | None:
        """The request that has waited longest."""
        return next(iter(self.waiting.values()), None)

    def next_prefill(
        self, chunk: int, overtakes: int, fits: Callable[[ScheduledRequest], bool]
    ) -> ScheduledRequest | None:
        """Return the request that is prefilled in the client's next turn, in its sequence or from the queue.

        That is the sequence that is partly prefilled, or else the head; but a request of at most a chunk passes it, so
        many times between two chunks.
        """
        seq, head = next(reversed(self.prefilling.values()), None), self.head
        if head is not None and len(self.prefilling) < 2 and self.overtaken < overtakes:
            short = next((request for request in self.waiting.values() if request.tokens <= chunk), None)
            if short is not None and fits(short):
                return short
        if seq is not None:
            return seq
        return head if head is not None and fits(head) else None

    def prefills(self, request: ScheduledRequest) -> bool:
        """Record a turn of ``next_prefill``; returns whether the request is admitted for it."""
        is_new = request.key in self.waiting
        self.overtaken = self.overtaken + 1 if is_new and (self.prefilling or request is not self.head) else 0
        if is_new:
            self.prefilling[request.key] = self.waiting.pop(request.key)
        return is_new

    def remove(self, key: int) -> bool:
        """Remove a request in any state; returns whether others are left."""
        for requests in (self.waiting, self.prefilling, self.decoding):
            requests.pop(key, None)
        return bool(self.waiting or self.num_open)
