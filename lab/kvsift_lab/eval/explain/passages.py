"""Passages of whole words of a prompt, and the attention to each word."""

from __future__ import annotations

from collections.abc import Sequence

from kvsift_lab.eval.explain.explanation import Passage

NO_SPACES = 0x2E80  # scripts from this code point on have no spaces: every character may begin a word


def word_starts(pieces: Sequence[str]) -> list[bool]:
    """Return for each token whether a word begins with it."""
    starts, last = [], " "
    for piece in pieces:
        first = piece[:1]
        starts.append(bool(first) and (first.isspace() or last.isspace() or max(ord(first), ord(last)) >= NO_SPACES))
        last = piece[-1:] or last
    return starts


def passages_of(pieces: Sequence[str], spans: tuple[int, int], size: int) -> list[Passage]:
    """Return the sinks, passages of at most ``size`` tokens, and the window. A passage ends before a word, unless it
    would lose more than half of its tokens. ``spans`` are (stop of the sinks, start of the window)."""
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
    """Return the words of every passage, each with the sum of the attention to its tokens."""
    starts = word_starts(pieces)
    passage_words = []
    for passage in passages:
        words: list[tuple[str, float]] = []
        for at in range(passage.start, passage.stop):
            text, share = words.pop() if words and not starts[at] else ("", 0.0)
            words.append((text + pieces[at], share + shares[at]))
        passage_words.append(words)
    return passage_words
