"""Queue of requests that wait for a row: fair among clients, and short prompts need not wait for long ones.

Deficit round robin with a quantum of one prompt token: in each round every waiting client earns one token, and the
first that has earned the tokens of its next request has its turn. Rounds are computed, not walked: a client whose
account was at ``spent`` when its last request left has its turn in round ``spent + tokens``. A client that has nothing
waiting earns nothing, and one whose next request was cancelled keeps at most what its following request costs.

A short request, of at most one chunk, may overtake long ones. While no prompt is partly prefilled:

- those of its own client, whatever their turn;
- those of other clients while its own turn is at most one chunk of rounds away, so that nobody lives on overtaking.

A waiting long request is then overtaken at most ``overtakes`` times in all. Between two chunks of a long prompt no
other long request could start, so the short ones pass all that wait, in their own order; the schedule counts them. What
they cost is on the account of their client in any case.

Short requests are never overtaken out of turn. A request whose turn has come and whose pages are not available keeps
its turn: only short requests pass it, as above.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from operator import attrgetter
from typing import NamedTuple


@dataclass(eq=False, slots=True)
class WaitingRequest:
    """A request by what its admission costs.

    Attributes:
        tokens: prompt tokens still to be computed.
        pages: pages that its admission reserves.
        arrival: its place in the order of arrival.
        overtaken: times that requests of other clients overtook it while it waited; once it has left the queue, times
            that a request was admitted since its last chunk.
    """

    key: int
    client: str
    tokens: int
    pages: int
    arrival: int
    overtaken: int = 0


BY_ARRIVAL = attrgetter("arrival")


@dataclass(eq=False, slots=True)
class Account:
    """Waiting requests of a client and the round up to which it has spent what it earned."""

    spent: int
    requests: list[WaitingRequest] = field(default_factory=list)  # by arrival
    short: list[WaitingRequest] = field(default_factory=list)  # those of at most one chunk, by arrival
    jumps: list[int] = field(default_factory=list)  # heap of the latest arrivals among those that overtook within it


class Turn(NamedTuple):
    """The next request of a client and the round in which it has its turn."""

    round: int
    arrival: int
    request: WaitingRequest


class WaitingQueue:
    """Requests that wait, by key.

    Args:
        chunk: tokens of a chunk; requests of at most as many are short.
        overtakes: how often short requests may overtake a waiting long one.
    """

    def __init__(self, chunk: int, overtakes: int) -> None:
        self._chunk = chunk
        self._overtakes = overtakes
        self._round = 0
        self._arrivals = 0
        self._refused_room = -1  # nothing that waits is admitted with so few pages
        self._requests: dict[int, WaitingRequest] = {}
        self._accounts: dict[str, Account] = {}  # of clients that wait, or have spent what they have not earned

    @property
    def requests(self) -> dict[int, WaitingRequest]:
        """The waiting requests by key, in order of arrival; to be read only."""
        return self._requests

    def add(self, key: int, client: str, tokens: int, pages: int) -> None:
        request = WaitingRequest(key, client, tokens, pages, self._arrivals)
        self._arrivals += 1
        self._requests[key] = request
        self._insert(self._accounts.setdefault(client, Account(self._round)), request)

    def remove(self, key: int) -> None:
        request = self._requests.pop(key)
        self._delete(self._accounts[request.client], request)
        self._settle(request.client)

    def revise(self, key: int, tokens: int, pages: int) -> None:
        """Change what a request costs; its place among the requests of its client stays."""
        request = self._requests[key]
        account = self._accounts[request.client]
        self._delete(account, request)
        request.tokens, request.pages = tokens, pages
        self._insert(account, request)
        self._settle(request.client)

    def take(self, room: int, short_only: bool = False) -> WaitingRequest | None:
        """Remove and return the request that is admitted next; None if there is none.

        Args:
            room: pages that may be reserved.
            short_only: a long prompt is partly prefilled, between whose chunks only a short request is admitted.
        """
        if room <= self._refused_room:
            return None
        turns = [self._turn(account, room) for account in self._accounts.values() if account.requests]
        if not turns:
            return None
        head = min(turns)
        if not short_only:
            self._advance(head.round)
        if self._is_short(head.request):
            turn: Turn | None = head
        elif short_only:
            turn = self._first_short(room)
        else:
            turn = self._passing(turns, room) or head
        if turn is None or turn.request.pages > room:
            self._refused_room = self._refused_room if short_only else room
            return None
        if turn is head:
            self._advance(head.round)
        for other in turns:
            if other < turn:
                other.request.overtaken += 1
        self._leave(turn)
        return turn.request

    def _turn(self, account: Account, room: int) -> Turn:
        request = account.requests[0]
        if not self._is_short(request) and account.short and account.short[0].pages <= room and self._yields(request):
            request = account.short[0]
        return Turn(account.spent + request.tokens, request.arrival, request)

    def _first_short(self, room: int) -> Turn | None:
        """The turn of the first short request that fits."""
        short = [account.short[0] for account in self._accounts.values() if account.short]
        turns = (Turn(self._accounts[each.client].spent + each.tokens, each.arrival, each) for each in short)
        return min((turn for turn in turns if turn.request.pages <= room), default=None)

    def _passing(self, turns: list[Turn], room: int) -> Turn | None:
        """The turn of the short request that overtakes the head, if one may."""
        latest = self._round + self._chunk
        short = (turn for turn in turns if self._is_short(turn.request))
        passing = min((turn for turn in short if turn.round <= latest and turn.request.pages <= room), default=None)
        if passing and all(self._yields(turn.request) for turn in turns if turn < passing):
            return passing
        return None

    def _is_short(self, request: WaitingRequest) -> bool:
        return request.tokens <= self._chunk

    def _yields(self, request: WaitingRequest) -> bool:
        """Whether a request may be overtaken once more."""
        return not self._is_short(request) and self._times_overtaken(request) < self._overtakes

    def _times_overtaken(self, request: WaitingRequest) -> int:
        # Whatever left out of turn after this request had arrived, and arrived later, has overtaken it. The latest
        # `overtakes` arrivals are enough to tell whether there were as many.
        jumps = self._accounts[request.client].jumps
        return request.overtaken + sum(arrival > request.arrival for arrival in jumps)

    def _leave(self, turn: Turn) -> None:
        request = turn.request
        account = self._accounts[request.client]
        del self._requests[request.key]
        self._delete(account, request)
        account.spent = turn.round
        if account.requests and account.requests[0].arrival < request.arrival:
            if len(account.jumps) < self._overtakes:
                heappush(account.jumps, request.arrival)
            else:
                heappushpop(account.jumps, request.arrival)
        self._settle(request.client)

    def _insert(self, account: Account, request: WaitingRequest) -> None:
        self._refused_room = -1
        insort(account.requests, request, key=BY_ARRIVAL)
        if self._is_short(request):
            insort(account.short, request, key=BY_ARRIVAL)

    def _delete(self, account: Account, request: WaitingRequest) -> None:
        self._refused_room = -1
        for requests in (account.requests, account.short) if self._is_short(request) else (account.requests,):
            del requests[bisect_left(requests, request.arrival, key=BY_ARRIVAL)]

    def _advance(self, rounds: int) -> None:
        self._round = max(self._round, rounds)
        for client in [client for client, account in self._accounts.items() if not account.requests]:
            self._settle(client)

    def _settle(self, client: str) -> None:
        """Take back what a client has earned beyond the cost of its next request, and close accounts that are even."""
        account = self._accounts[client]
        if account.requests:
            account.spent = max(account.spent, self._round - account.requests[0].tokens)
        elif account.spent <= self._round:
            del self._accounts[client]
