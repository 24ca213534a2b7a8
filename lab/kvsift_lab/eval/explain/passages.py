"""Passages of whole words of a prompt, and the attention to each word."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from kvsift_lab.eval.explain.explanation import Passage

LONGEST = 16  # tokens of one character; longer runs are bytes that encode no character
NO_SPACES = 0x2E80  # scripts from this code point on have no spaces: every character may begin a word

Decode = Callable[[Sequence[int]], str]


def pieces_of(decode: Decode, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds. A character of several tokens belongs to the last of them."""
    pieces, begin, decoded = [], 0, 0  # ids[begin:decoded] are decoded again, since some tokenizers join words
    for stop in range(1, len(ids) + 1):
        before, text = decode(ids[begin:decoded]), decode(ids[begin:stop])
        if text.endswith("\ufffd") and stop < len(ids) and stop - decoded < LONGEST:
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        begin, decoded = decoded, stop
    return pieces


def word_starts(pieces: Sequence[str]) -> list[bool]:
    """Return for each token whether a word begins with it."""
    starts, last = [], " "
    for piece in pieces:
        first = piece[:1]
        starts.append(bool(first) and (first.isspace() or last.isspace() or max(ord(first), ord(last)) >= NO_SPACES))
        last = piece[-1:] or last
    return starts


def passages_of(pieces: Sequence[str], spans: tuple[int, int], size: int, document: str = "") -> list[Passage]:
    """Return the sinks, passages of at most ``size`` tokens, and the window.

    A passage ends before a word, unless it would lose more than half of its tokens, and at the ends of the document.

    Args:
        pieces: texts of the tokens of the prompt.
        spans: (stop of the sinks, start of the window).
        size: the most tokens of a passage.
        document: a part of the prompt; if it is not found, all passages count as parts of it.
    """
    starts, (sinks, window) = word_starts(pieces), spans
    offsets = list(accumulate(map(len, pieces), initial=0))  # of tokens in the text of the prompt
    prompt = "".join(pieces)
    begin = max(prompt.find(document.strip()), 0)
    end = begin + len(document.strip()) if document and document.strip() in prompt else len(prompt)
    first, last = bisect_right(offsets, begin) - 1, bisect_left(offsets, end)  # tokens of the document
    edges, start = [(0, sinks, "sinks")], sinks
    while start < window:
        inside = first <= start < last
        limit = min(window, last if inside else first if start < first else window)
        stop = min(start + size, limit)
        if stop < limit:
            stop = next((at for at in range(stop, start + size // 2, -1) if starts[at]), stop)
        edges.append((start, stop, "text" if inside else "prompt"))
        start = stop
    edges.append((window, len(pieces), "window"))
    passages = []
    for start, stop, kind in edges:
        line = prompt.count("\n", begin, max(offsets[start], begin)) + 1 if first <= start < last else 0
        passages.append(Passage(start, stop, kind, "".join(pieces[start:stop]), line))
    return [passage for passage in passages if passage.start < passage.stop]


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
