"""The prompt as passages of whole words, and how much attention each word got."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvsift.eval.explanation import Passage

LONGEST = 16  # tokens of one character; more are bytes that are none
NO_SPACES = 0x2E80  # from here on, scripts write without them: every character may begin a word

Decode = Callable[[Sequence[int]], str]


def pieces_of(decode: Decode, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text. A character of several tokens comes with the last of them."""
    pieces, begin, known = [], 0, 0  # decoded again are ids[begin:known], since some tokenizers join words
    for stop in range(1, len(ids) + 1):
        before, text = decode(ids[begin:known]), decode(ids[begin:stop])
        if text.endswith("\ufffd") and stop < len(ids) and stop - known < LONGEST:
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        begin, known = known, stop
    return pieces


def word_starts(pieces: Sequence[str]) -> list[bool]:
    """Whether a word begins with each token."""
    starts, last = [], " "
    for piece in pieces:
        first = piece[:1]
        starts.append(bool(first) and (first.isspace() or last.isspace() or max(ord(first), ord(last)) >= NO_SPACES))
        last = piece[-1:] or last
    return starts


def passages_of(pieces: Sequence[str], spans: tuple[int, int], size: int) -> list[Passage]:
    """Sinks, passages of at most ``size`` tokens, and the window. A passage ends before a word rather than inside it,
    unless that would take more than half of it; ``spans`` are (stop of the sinks, start of the window)."""
    starts, (sinks, window) = word_starts(pieces), spans
    edges, start = [(0, sinks, "sinks")], sinks
    while start < window:
        stop = min(start + size, window)
        if stop < window:
            stop = next((at for at in range(stop, start + size // 2, -1) if starts[at]), stop)
        edges.append((start, stop, "text"))
        start = stop
    edges.append((window, len(pieces), "window"))
    return [Passage(start, stop, kind, "".join(pieces[start:stop])) for start, stop, kind in edges if start < stop]


def words_of(
    pieces: Sequence[str], shares: Sequence[float], passages: Sequence[Passage]
) -> list[list[tuple[str, float]]]:
    """The words of every passage with the attention that their tokens got together."""
    starts = word_starts(pieces)
    found = []
    for passage in passages:
        words: list[tuple[str, float]] = []
        for at in range(passage.start, passage.stop):
            text, share = words.pop() if words and not starts[at] else ("", 0.0)
            words.append((text + pieces[at], share + shares[at]))
        found.append(words)
    return found
