"""What followed the last tokens of a text when they occurred before: proposals that cost nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

SHORTEST = 3  # tokens that must occur again
PLACES = 32  # latest occurrences of them that are compared
LONGEST = 64  # tokens of a comparison


class Repeats:
    """The places of all runs of ``SHORTEST`` tokens in a prompt and its answer.

    The longest repeat is sought among the latest ``PLACES``; an automaton of suffixes would find it among all, and
    takes twenty times as long to build, which a long prompt pays whether its text repeats or not.

    Args:
        ids: tokens of the prompt.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids: list[int] = []
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # of the token after each run
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Add tokens at the end of the text."""
        start = max(len(self._ids), SHORTEST - 1)
        self._ids += ids
        for stop in range(start, len(self._ids)):  # a run is entered once a token follows it
            if stop >= SHORTEST:
                self._places[tuple(self._ids[stop - SHORTEST : stop])].append(stop)

    def find(self, most: int) -> tuple[int, list[int]]:
        """How many of the last tokens the longest repeat has, and up to ``most`` tokens that followed it; the latest
        of equals."""
        places = self._places.get(tuple(self._ids[-SHORTEST:]), ())[-PLACES:]
        if not places or most < 1:
            return 0, []
        length, place = max((self._length(place), place) for place in places)
        return length, self._ids[place : place + most]

    def _length(self, place: int) -> int:
        """Tokens before a place that the text ends with."""
        ids, length, most = self._ids, SHORTEST, min(LONGEST, place)
        while length < most and ids[place - 1 - length] == ids[-1 - length]:
            length += 1
        return length
