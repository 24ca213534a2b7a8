"""Contexts assembled from front to back, and searches for the largest part that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvsift.errors import TooShort
from kvsift.texts.layout import Encode, Layout, cut_tail
from kvsift_lab.eval.sample import SampleRequest

ITEMS_AT_ONCE = 64
"""Items of a list in one piece."""


class Assembly:
    """A context that grows piece by piece to its length."""

    def __init__(self, request: SampleRequest, intro: str) -> None:
        self._request = request
        self._pieces = [intro]
        self._ids = [*request.prefix, *request.encode(intro)]
        self._tail_start = len(request.prefix)
        if self.room <= 0:
            raise TooShort(f"its introduction alone takes {len(self._ids)} tokens; ask for a longer context.")

    @property
    def room(self) -> int:
        """Missing tokens; negative if the last piece exceeds the length."""
        return self._request.length - len(self._ids)

    def add(self, text: str) -> float:
        """Append a piece with its separator in front; return the depth at which it begins."""
        assert self.room > 0, "a piece after the end"
        self._tail_start = len(self._ids)
        self._pieces.append(text)
        self._ids.extend(self._request.encode(text))
        return self._tail_start / self._request.length

    def cut(self) -> tuple[str, tuple[int, ...]]:
        """Return text and ids of exactly the length."""
        assert self.room <= 0, "too short"
        layout = Layout(self._pieces, self._ids, self._tail_start, [])
        context, ids = cut_tail(layout, self._request.length, self._request.encode)
        return context, tuple(ids)


def blocks(items: Sequence[str]) -> Iterator[str]:
    """Yield items joined by single spaces, ``ITEMS_AT_ONCE`` to a block, with a space in front of every block but the
    first."""
    rest = iter(items)
    separator = ""
    while block := list(islice(rest, ITEMS_AT_ONCE)):
        yield separator + " ".join(block)
        separator = " "


def num_tokens(items: Sequence[str], encode: Encode) -> int:
    return sum(len(encode(block)) for block in blocks(items))


def largest_that_fits(size: Callable[[int], int], room: int, least: int) -> int:
    """Return the largest count, ``least`` or more, with ``size(count) <= room``; size grows, about linearly.

    Raises:
        InputError: if ``least`` does not fit.
    """
    low, low_size = least, size(least)
    if low_size > room:
        raise TooShort(f"it needs {low_size} tokens beside its introduction and has {room}; ask for a longer context.")
    high, high_size = low + 1, size(low + 1)
    while high_size <= room:  # slightly beyond a linear extrapolation
        slope = max(1, high_size - low_size) / (high - low)
        low, low_size = high, high_size
        high += 1 + min(4 * high, int(1.02 * (room - high_size) / slope))
        high_size = size(high)
    while high - low > 1:
        share = (room - low_size) / (high_size - low_size)
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        middle_size = size(middle)
        if middle_size <= room:
            low, low_size = middle, middle_size
        else:
            high, high_size = middle, middle_size
    return low
