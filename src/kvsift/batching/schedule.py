"""Scheduler of the engine loop: what runs next, a decode step of all rows or a chunk of one prompt.

It neither reads a clock nor runs anything, so the same history gives the same decisions.

Rows are never preempted: admission reserves the pages of prompt and answer. One row reads its prompt at a time, but
``overtakes`` requests of one chunk may be admitted and read between any two chunks of a longer row.

**Decode share.** After a chunk of T seconds, decode steps run until they have taken T * share / (1 - share) seconds,
and at least one step does. In every window in which a row decodes, therefore,

    decode seconds >= (read seconds - those of the longest chunk) * share / (1 - share)

and a gap between two tokens of a row is at most one chunk and one step; ``pauses.py`` makes it shorter. Without a row
that decodes, chunks run back to back; without a prompt to read, steps do.

**Wait of short requests.** While a long prompt is partly prefilled, a request of one chunk waits for the chunk that
runs, and for one more after every ``overtakes`` short requests that are ahead of it. Neither other long requests that
wait nor the client whose request it is make a difference. The last chunk of a prompt is not overtaken.

**Wait of long requests.** Between arrival and admission of a request r of client c, other requests have at most

    (1 + 4) * (L + A + 4 g + sum over the other clients d that wait meanwhile of (A + B[d] + tokens(r) + 6 g))

prompt tokens computed. g is the chunk; L the rest of the prompts in rows at the arrival; A the tokens ahead of r in
the queue of c, and those of later short requests of c that are admitted before r; B[d] those of the oldest request of d
at the arrival, 0 if d arrives later; 4 is ``overtakes``, and 6 two more. The factor 1 + 4 is for the short requests
between chunks; without any it is 1. Tokens that are revised count as when their request leaves the queue; A and
tokens(r), at their most. For seconds, divide by the rate of reading and by (1 - share), and add what the chunk before
the arrival is still owed and one decode step for each chunk. Time in which every row is taken, or in which the pages of
the request whose turn it is are not available, comes on top.
"""

from __future__ import annotations

from typing import NamedTuple

from kvsift.batching.waiting import WaitingQueue, WaitingRequest


class Decision(NamedTuple):
    """The next launch: a chunk, a decode step, or neither when there is nothing to do; never both.

    Whether decoding has had its share is known only after a step, so a chunk is decided after it.

    Attributes:
        admit: the request that gets a row before the launch; always also ``read``.
        read: the row whose next chunk is read.
        decode: whether all decoding rows decode one token.
    """

    admit: int | None = None
    read: int | None = None
    decode: bool = False


class Schedule:
    """Requests from arrival to end: waiting, reading, decoding.

    Every decision is carried out and reported, by ``has_read`` or ``has_decoded``, before the next one is asked for.

    Args:
        max_rows: rows that read or decode at once.
        grid: tokens of a chunk. A request with at most as many tokens to compute is read in one chunk.
        decode_share: share of the time that decoding is owed while prompts are read, below 1.
        max_waiting: requests that may wait.
        overtakes: how often short requests may pass a long one before its prompt is begun, and again between any two of
            its chunks; 0 for never, then no two rows are ever partly read.
    """

    def __init__(
        self, max_rows: int, grid: int, decode_share: float = 0.5, max_waiting: int = 4096, overtakes: int = 4
    ) -> None:
        if min(max_rows, grid, max_waiting) < 1 or overtakes < 0 or not 0 <= decode_share < 1:
            raise ValueError(
                f"{max_rows=}, {grid=} and {max_waiting=} must be at least 1, {overtakes=} at least 0, and "
                f"{decode_share=} in [0, 1)"
            )
        self._max_rows = max_rows
        self._grid = grid
        self._max_waiting = max_waiting
        self._overtakes = overtakes
        self._decode_per_read = decode_share / (1 - decode_share)  # seconds owed per second of a chunk
        self._owed = 0.0  # seconds
        self._must_decode = False  # before the next chunk, if a row decodes
        self._queue = WaitingQueue(grid, overtakes)
        self._reading: dict[int, WaitingRequest] = {}  # the last one reads next; its tokens are those left
        self._decoding: dict[int, None] = {}

    @property
    def waiting(self) -> tuple[int, ...]:
        """Keys in order of arrival."""
        return tuple(self._queue.requests)

    @property
    def reading(self) -> tuple[int, ...]:
        """Keys of the rows whose prompts are partly read: one, or two while a short prompt is read between chunks."""
        return tuple(self._reading)

    @property
    def decoding(self) -> tuple[int, ...]:
        """Keys in the order in which prompts were complete."""
        return tuple(self._decoding)

    @property
    def backlog(self) -> int:
        """Prompt tokens still to be computed, of requests that wait or read."""
        requests = (*self._queue.requests.values(), *self._reading.values())
        return sum(request.tokens for request in requests)

    def add(self, key: int, client: str, tokens: int, pages: int) -> bool:
        """Put a request in the queue, unless that is full.

        Args:
            key: unique among the requests that have not been removed.
            client: who shares fairly with other clients.
            tokens: prompt tokens to compute, at least 1.
            pages: pages that admission reserves. A request that fits no empty pool must not be added: it blocks others.

        Returns:
            False if the queue is full; the request is then unknown to the scheduler.
        """
        assert tokens >= 1, "the last token of a prompt is always computed"
        assert not self._is_known(key), f"request {key} has been added before"
        if len(self._queue.requests) >= self._max_waiting:
            return False
        self._queue.add(key, client, tokens, pages)
        return True

    def revise(self, key: int, tokens: int, pages: int) -> None:
        """Change what a waiting request costs, when more or less of its prompt can be reused; its place stays."""
        assert tokens >= 1, "the last token of a prompt is always computed"
        self._queue.revise(key, tokens, pages)

    def decide(self, room: int) -> Decision:
        """Decide the next launch; an admitted request has left the queue.

        Args:
            room: pages that could be reserved now, free ones and those that the prefix cache would give up.
        """
        if self._decoding and self._must_decode:
            return Decision(decode=True)
        admitted = self._admit(room)
        if self._reading:
            return Decision(admit=admitted, read=next(reversed(self._reading)))
        return Decision(decode=bool(self._decoding))

    def has_read(self, key: int, tokens: int, seconds: float, done: bool) -> None:
        """Record a chunk.

        Args:
            key: the row; one that was removed while its chunk ran still costs the time.
            tokens: prompt tokens by which the row advanced, reused ones included.
            done: the prompt is complete: the row decodes from the next step on.
        """
        self._owed = seconds * self._decode_per_read
        self._must_decode = True
        if key not in self._reading:
            return
        if done:
            del self._reading[key]
            self._decoding[key] = None
        else:
            request = self._reading[key]
            request.tokens -= tokens
            request.overtaken = 0

    def has_decoded(self, seconds: float) -> None:
        """Record a decode step."""
        self._owed -= seconds
        self._must_decode = self._owed > 0

    def remove(self, key: int) -> None:
        """Forget a request that ended, failed or was cancelled, in any state.

        Raises:
            KeyError: the request is unknown, or has been removed before.
        """
        if key in self._queue.requests:
            self._queue.remove(key)
        elif key in self._reading:
            del self._reading[key]
        else:
            del self._decoding[key]

    def _is_known(self, key: int) -> bool:
        return key in self._queue.requests or key in self._reading or key in self._decoding

    def _admit(self, room: int) -> int | None:
        if len(self._reading) + len(self._decoding) >= self._max_rows:
            return None
        if not self._reading:
            request = self._queue.take(room)
        else:
            row = self._reading[next(reversed(self._reading))]
            if row.tokens <= self._grid or row.overtaken >= self._overtakes:
                return None
            request = self._queue.take(room, short_only=True)
            row.overtaken += request is not None
        if request is None:
            return None
        self._reading[request.key] = request
        return request.key
