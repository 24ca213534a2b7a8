"""How many tokens to propose before the next verification, by what was measured so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, log2
from typing import NamedTuple

GAIN = 1.05  # over dense decoding, below which nothing is drafted
FIRST_DRAFTS = 3  # of a cycle that measures
FIRST_PAUSE, LONGEST_PAUSE = 64, 2048  # steps without drafts until they are tried again
WEIGHT = 0.2  # of a new time in the mean of a time
MEMORY = 0.985  # of earlier drafts, with each one: about 60 count, which tell shares of 0.90 and 0.95 apart
REPEAT_MEMORY = 0.97  # of earlier repeats, whose share changes from passage to passage
FIRST_TRIALS = 10.0  # that the share of earlier answers counts for in the next
DENSE_EVERY = 512  # steps, one is dense that is measured
MOST_KEPT = 256  # plans and lengths
STEPS_PER_OCTAVE = 4  # contexts that are nearly equally long share their times


class Amount(NamedTuple):
    """Tokens to propose: drafts, or tokens that followed a repeat; ``rate`` in tokens per second."""

    rate: float
    tokens: int = 0
    is_repeat: bool = False


NOTHING = Amount(0.0)


@dataclass
class Rate:
    """Share of trials that succeeded; later ones count more."""

    accepted: float
    offered: float
    memory: float = MEMORY

    @property
    def share(self) -> float:
        return min(self.accepted / self.offered, 0.999)

    def note(self, accepted: int, offered: int) -> None:
        """So many were accepted; what follows the first that was not is no trial."""
        for success in (1.0,) * accepted + (0.0,) * (accepted < offered):
            self.accepted, self.offered = self.accepted * self.memory + success, self.offered * self.memory + 1


@dataclass
class MeanTime:
    """Seconds of something that is measured again and again. Beyond twice the mean they do not count: the machine was
    busy with something else."""

    seconds: float = 0.0

    def note(self, seconds: float) -> None:
        mean = self.seconds or seconds
        self.seconds = mean + WEIGHT * (min(seconds, 2 * mean) - mean)


@dataclass
class Measured:
    """What answers under one plan after contexts of about one length have measured so far.

    Attributes:
        drafted: drafts that were accepted.
        draft: seconds of one token that is drafted.
        verify: number of tokens -> seconds of their verification.
        drafts: tokens that each sequence drafts in the next step.
        is_paused: drafts did not pay when they were last tried.
        pause: steps until the next try, once they have not paid.
        left: steps that are left of these.
        since_dense: steps since a dense one was measured.
    """

    drafted: Rate = field(default_factory=lambda: Rate(0.9 * FIRST_TRIALS, FIRST_TRIALS))
    draft: MeanTime = field(default_factory=MeanTime)
    verify: dict[int, MeanTime] = field(default_factory=dict)
    drafts: Amount = NOTHING
    is_paused: bool = False
    pause: int = FIRST_PAUSE
    left: int = 0
    since_dense: int = 0

    @property
    def is_due(self) -> bool:
        """Whether the time of a dense step is to be measured, first of all or again."""
        return 1 not in self.verify or (self.since_dense > 0 and self.since_dense % DENSE_EVERY == 0)

    def decide(self, shares: Sequence[float], most: int) -> None:
        """Decide how many tokens sequences draft in the next step.

        Args:
            shares: accepted share of the drafts of each sequence, as far as it is known.
            most: tokens that may be drafted; 0: none can be.
        """
        is_waiting, self.left = self.left > 0, max(self.left - 1, 0)
        self.drafts, self.since_dense = NOTHING, self.since_dense + 1
        if is_waiting or not most or self.is_due:
            return
        if not self.draft.seconds:
            self.drafts = Amount(inf, min(FIRST_DRAFTS, most))
            return
        drafts = self.best(shares, most, self.draft.seconds, False)
        if drafts.rate > GAIN / self.verify[1].seconds:
            self.drafts, self.is_paused, self.pause = drafts, False, FIRST_PAUSE
            return
        self.draft, self.verify = MeanTime(), {1: self.verify[1]}  # measured anew behind the pause
        self.is_paused, self.left, self.pause = True, self.pause, min(2 * self.pause, LONGEST_PAUSE)

    def best(self, shares: Sequence[float], most: int, draft_s: float, is_repeat: bool) -> Amount:
        """The number of proposals with the most tokens per second, each accepted with the probability of its
        sequence."""
        choices = []
        for count in range(1, most + 1):
            expected = sum((1 - share ** (count + 1)) / (1 - share) for share in shares) / len(shares)
            choices.append(Amount(expected / (count * draft_s + self._verify_s(count + 1)), count, is_repeat))
        return max(choices)

    def _verify_s(self, tokens: int) -> float:
        """Seconds of a verification, from the nearest that was measured and what more tokens cost."""
        known = {number: time.seconds for number, time in self.verify.items()}
        if tokens in known:
            return known[tokens]
        slopes = [(seconds - known[1]) / (number - 1) for number, seconds in known.items() if number > 1]
        slope = max(sum(slopes) / len(slopes), 0.0) if slopes else 0.1 * known[1]
        nearest = min(known, key=lambda number: abs(number - tokens))
        return max(known[nearest] + slope * (tokens - nearest), known[1])


class Paces:
    """Begins the pace of each answer with what earlier ones have measured, so that a short one need not try."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, int], Measured] = {}

    def begin(self, plan: str, tokens: int) -> Pace:
        """The pace of an answer whose prompt has so many tokens."""
        kind = plan, int(STEPS_PER_OCTAVE * log2(max(tokens, 1)))
        measured = self._measured.pop(kind, None) or Measured()
        self._measured[kind] = measured  # the last of those that are kept
        if len(self._measured) > MOST_KEPT:
            del self._measured[next(iter(self._measured))]
        return Pace(measured, Rate(FIRST_TRIALS * measured.drafted.share, FIRST_TRIALS))


@dataclass
class Pace:
    """Lengths of the proposals of one answer. Times decide, but change no token.

    Attributes:
        measured: what this answer and those like it have measured.
    """

    measured: Measured
    _drafted: Rate  # of this answer
    _repeated: dict[int, Rate] = field(default_factory=dict)  # by the size of the repeat's length

    def choose(self, repeat: int, repeated: int, most: int) -> Amount:
        """What to propose, once ``decide_together`` has decided.

        Args:
            repeat: tokens of the longest repeat.
            repeated: tokens that followed it.
            most: tokens that may be drafted; 0: none can be.
        """
        known = self.measured
        if 1 not in known.verify:
            return NOTHING
        best = Amount(1 / known.verify[1].seconds)
        if repeated:
            best = max(best, known.best([self._rate(repeat).share], repeated, 0.0, True))
        drafts = known.drafts._replace(tokens=min(known.drafts.tokens, most))
        return max(drafts, best) if drafts.tokens else best

    def note_drafts(self, tried: int, accepted: int, seconds: float) -> None:
        """Note how many drafts were tried and accepted, and the seconds that drafting one took."""
        for rate in (self._drafted, self.measured.drafted):
            rate.note(accepted, tried)
        self.measured.draft.note(seconds)

    def note_repeats(self, repeat: int, tried: int, accepted: int) -> None:
        """Note how many tokens after a repeat of this length were tried and accepted."""
        self._rate(repeat).note(accepted, tried)

    def note_verified(self, tokens: int, seconds: float) -> None:
        """A verification of so many tokens took so long."""
        if tokens == 1:
            self.measured.since_dense = 0
        self.measured.verify.setdefault(tokens, MeanTime()).note(seconds)

    @property
    def drafted_share(self) -> float:
        """The accepted share of this answer's drafts."""
        return self._drafted.share

    def _rate(self, repeat: int) -> Rate:
        return self._repeated.setdefault(min(repeat.bit_length(), 6), Rate(1.0, 2.0, REPEAT_MEMORY))


def decide_together(paces: Sequence[Pace], most: Sequence[int]) -> None:
    """Decide how much the sequences of the next step draft; ``most``: tokens that each of them may draft.

    Those that measure together draft together: the step takes as long for all as for one.
    """
    kinds: dict[int, list[int]] = {}
    for index, pace in enumerate(paces):
        kinds.setdefault(id(pace.measured), []).append(index)
    for indices in kinds.values():
        paces[indices[0]].measured.decide(
            [paces[index].drafted_share for index in indices], max(most[index] for index in indices)
        )
