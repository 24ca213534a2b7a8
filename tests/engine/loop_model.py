"""An engine loop without an engine: it carries out decisions, counts pages for itself, and checks each decision."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from kvsift.engine.schedule import Decision, Schedule


@dataclass(eq=False, slots=True)
class Tracked:
    """What the model knows of a request."""

    key: int
    client: str
    tokens: int  # still to be computed
    pages: int
    answer: int  # tokens still to be decoded
    paid: dict[str, int]  # what each client had paid for prefill when it arrived
    passed: int = 0  # times, by short requests of its client since its last chunk
    paused: int = 0  # steps in a sequence without a place


class LoopModel:
    """A loop whose steps last what its caller says.

    Args:
        pages: what sequences may reserve in all; ``pages_lent`` of them are out of reach for now.
    """

    def __init__(
        self,
        max_seqs: int = 4,
        grid: int = 8,
        decode_share: float = 0.5,
        max_waiting: int = 64,
        overtakes: int = 4,
        pages: int = 1000,
    ) -> None:
        self.schedule = Schedule(max_seqs, grid, decode_share, max_waiting, overtakes)
        self.max_seqs, self.grid, self.share = max_seqs, grid, decode_share
        self.max_waiting, self.overtakes, self.pages = max_waiting, overtakes, pages
        self.pages_lent = 0
        self.waiting: dict[str, dict[int, Tracked]] = defaultdict(dict)
        self.prefilling: dict[int, Tracked] = {}
        self.decoding: dict[int, Tracked] = {}
        self.ends: Counter[int] = Counter()
        self.paid: Counter[str] = Counter()  # for prefill, by client
        self.turns: Counter[str] = Counter()
        self.has_waited = False  # somebody, for a place or pages
        self.refused: set[int] = set()
        self.keys = self.computed = self.steps = 0
        self.balance = self.highest = self.longest_chunk = 0.0  # of the decode share
        self.owed, self.stepped = 0.0, True
        self.read_s = self.decode_s = 0.0

    @property
    def reserved(self) -> int:
        return sum(seq.pages for seqs in (self.prefilling, self.decoding) for seq in seqs.values())

    @property
    def room(self) -> int:
        return max(0, self.pages - self.pages_lent - self.reserved)

    @property
    def queue(self) -> list[Tracked]:
        return [request for requests in self.waiting.values() for request in requests.values()]

    def arrive(self, client: str, tokens: int, pages: int = 1, answer: int = 1) -> int:
        key, self.keys = self.keys, self.keys + 1
        added = self.schedule.add(key, client, tokens, pages)
        assert added == (sum(map(len, self.waiting.values())) < self.max_waiting)
        if not added:
            self.refused.add(key)
            return key
        request = Tracked(key, client, tokens, pages, answer, dict(self.paid))
        self.waiting[client][key] = request
        return key

    def revise(self, request: Tracked, tokens: int, pages: int) -> None:
        self.schedule.revise(request.key, tokens, pages)
        request.tokens, request.pages = tokens, pages

    def remove(self, key: int) -> None:
        """An end, a failure or a cancellation."""
        self.schedule.remove(key)
        for requests in (*self.waiting.values(), self.prefilling, self.decoding):
            requests.pop(key, None)
        self.ends[key] += 1

    def step(
        self, seconds_per_token: float = 0.01, decode_seconds: float = 0.02, meanwhile: Callable[[], object] = int
    ) -> Decision:
        """Ask for a decision, check it and carry it out; ``meanwhile`` is called while it runs."""
        room = self.room
        decision = self.schedule.decide(room)
        self.steps += 1
        assert decision.prefill is None or not decision.decode
        assert decision.admit is None or decision.prefill == decision.admit
        self.has_waited |= decision.admit is None and bool(self.queue) and self._lacks(room)
        if decision.admit is not None:
            self._admit(decision.admit, room)
        if decision.prefill is not None:
            self._read(decision.prefill, seconds_per_token, meanwhile)
        else:
            self._check_nothing_to_read(room, decision)
            meanwhile()
        if decision.decode:
            self._decode(decode_seconds)
        return decision

    def open_rows(self, client: str) -> list[Tracked]:
        return [seq for seqs in (self.prefilling, self.decoding) for seq in seqs.values() if seq.client == client]

    def _fits(self, request: Tracked, room: int) -> bool:
        """By the rules of the scheduler's docstring."""
        free = 2 * self.max_seqs - len(self.prefilling) - len(self.decoding)
        own = len(self.open_rows(request.client))
        left = (room + self.reserved) // 8 if own else 0
        return free > own and room >= request.pages + left

    def _lacks(self, room: int) -> bool:
        """Whether a client has its turn and is kept back."""
        heads = [next(iter(requests.values())) for requests in self.waiting.values() if requests]
        return not all(self._fits(head, room) for head in heads)

    def _admit(self, key: int, room: int) -> None:
        client = next(client for client, requests in self.waiting.items() if key in requests)
        request = self.waiting[client][key]
        assert self._fits(request, room)
        del self.waiting[client][key]
        short = request.tokens <= self.grid
        own = [seq for seq in self.prefilling.values() if seq.client == client]
        assert not own or short, "one long prompt of a client after the other"
        older = [other for other in self.waiting[client].values() if other.key < key]
        assert not older or (short and all(other.tokens > self.grid for other in older))
        for passed in own or older[:1]:
            passed.passed += 1
            assert passed.passed <= self.overtakes
        self.prefilling[key] = request

    def cost(self, tokens: int) -> int:
        """What a chunk of a request with so many tokens left costs its client."""
        return min(max(tokens, -(-self.grid // self.overtakes)), self.grid)

    def _read(self, key: int, seconds_per_token: float, meanwhile: Callable[[], object]) -> None:
        seq = self.prefilling[key]
        tokens, seq.passed = min(self.grid, seq.tokens), 0
        if tokens == seq.tokens and not self.has_waited:
            self.check_waited(seq)
        seconds = tokens * seconds_per_token
        meanwhile()  # before this chunk is paid: for those who come now it counts
        self.paid[seq.client] += self.cost(seq.tokens)
        self.turns[seq.client] += 1
        seq.tokens -= tokens
        self.computed += tokens
        self.read_s += seconds
        if self.decoding:  # in every window, decoding has its share up to the longest chunk
            assert self.stepped
            assert self.owed < 1e-9
            self.longest_chunk = max(self.longest_chunk, seconds)
            self.balance -= seconds * self.share
            assert self.highest - self.balance <= self.longest_chunk * self.share + 1e-6
        else:
            self.balance = self.highest = self.longest_chunk = 0.0
        self.owed, self.stepped = seconds * self.share / (1 - self.share), False
        self.schedule.has_prefilled(key, tokens, seconds, done=not seq.tokens)
        if not seq.tokens:
            self.decoding[key] = self.prefilling.pop(key)

    def check_waited(self, seq: Tracked) -> None:
        """The bound of the scheduler's docstring, before the last chunk of a sequence."""
        own = self.paid[seq.client] - seq.paid.get(seq.client, 0)
        for client, paid in self.paid.items():
            if client != seq.client:
                assert paid - seq.paid.get(client, 0) <= own + self.cost(seq.tokens) + self.grid

    def _check_nothing_to_read(self, room: int, decision: Decision) -> None:
        """Decoding is owed the step, or nothing could be read."""
        assert decision.decode == bool(self.decoding)
        if self.decoding and not (self.stepped and self.owed < -1e-9):
            return
        assert not self.prefilling
        assert not self.queue or self._lacks(room)

    def _decode(self, seconds: float) -> None:
        self.owed, self.stepped = self.owed - seconds, True
        self.balance += seconds * (1 - self.share)
        self.highest = max(self.highest, self.balance)
        self.decode_s += seconds
        self.schedule.has_decoded(seconds)
        placed = self.schedule.step_sequences()
        self._check_places(placed)
        for seq in [self.decoding[key] for key in placed]:
            seq.answer -= 1
            if seq.answer <= 0:
                self.remove(seq.key)

    def _check_places(self, placed: Sequence[int]) -> None:
        assert list(placed) == [key for key in self.decoding if key in placed]
        assert len(placed) == min(len(self.decoding), self.max_seqs)
        for seq in self.decoding.values():
            seq.paused = 0 if seq.key in placed else seq.paused + 1
            assert seq.paused <= 16 * 2 * self.max_seqs, "every sequence has a place in the end"

    def check_states(self) -> None:
        """The scheduler has the same requests in the same states."""
        assert self.schedule.waiting == tuple(sorted(request.key for request in self.queue))
        assert self.schedule.prefilling == tuple(self.prefilling)
        assert self.schedule.decoding == tuple(self.decoding)

    def finish(self) -> None:
        """Run until all requests have ended, each exactly once, with all pages."""
        self.pages_lent = 0
        most = self.steps + sum(r.answer + r.tokens for r in (*self.queue, *self.prefilling.values())) * 100 + 10_000
        while any((self.decoding, self.prefilling, self.queue)):
            self.step()
            assert self.steps < most
        assert self.schedule.decide(self.room) == Decision()
        assert set(self.ends.values()) <= {1}
        assert set(self.ends) | self.refused == set(range(self.keys))
        self.check_states()


def run_random(model: LoopModel, seed: int, steps: int, clients: int) -> list[Decision]:
    """Arrivals, cancellations, revisions and changes of room between steps of random length, calm and busy by turns."""
    random = Random(seed)
    decisions = []
    load = 0.1
    while model.steps < steps:
        chance = random.random()
        if chance < load:
            tokens = random.choice((1, model.grid, model.grid + 1, random.randint(1, 12 * model.grid)))
            pages = random.choice((1, 1, random.randint(1, model.pages)))
            model.arrive(f"client {int(random.random() ** 2 * clients)}", tokens, pages, random.randint(1, 12))
        elif chance < load + 0.03:
            event = random.random()
            queue = model.queue
            if event < 0.3 and queue:
                model.remove(random.choice(queue).key)
            elif event < 0.4 and model.prefilling:
                model.remove(random.choice(list(model.prefilling)))
            elif event < 0.5 and model.decoding:
                model.remove(random.choice(list(model.decoding)))
            elif event < 0.8 and queue:
                request = random.choice(queue)
                tokens = random.choice((1, request.tokens // 2 + 1, request.tokens + random.randint(0, 30)))
                model.revise(request, tokens, random.randint(1, model.pages))
            elif event < 0.9:
                model.pages_lent = random.choice((0, random.randint(0, model.pages)))
            else:
                load = random.choice((0.01, 0.05, 0.1, 0.3))
        decisions.append(model.step(0.01 * random.choice((0.5, 1, 3)), random.choice((0.001, 0.02, 0.3))))
        if model.steps % 1000 == 0:
            model.check_states()
    return decisions
