"""Tokens of texts that share a prefix, such as prompts about one document: of the next one only the end is encoded.

Fast tokenizers cut a text into words by what stands before and a little behind, and the tokens of a word depend on the
word alone. The end of a text is encoded from ``OVERLAP`` characters before it differs from an earlier one. Where words
and tokens of both have become the same, the end goes on as the whole text would. A tokenizer that cuts no words off
encodes whole texts.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

LEAST = 16_384  # characters: shorter texts take a millisecond or two
OVERLAP, MARGIN = 4096, 1024  # characters that are encoded again, and of them at both ends those that may differ
LEAST_WORDS = 64  # that must be the same
KEPT_END = 16_384  # characters at the end of a text whose tokens are compared with those of the next
NOWHERE = -1  # where tokens are that the tokenizer adds


class PlacedToken(NamedTuple):
    """A token in a text."""

    start: int
    id: int
    begins_word: bool


class KnownText(NamedTuple):
    """A text, its tokens, and those of its end, from number ``first`` on."""

    text: str
    special: bool
    ids: array[int]
    first: int
    end: list[PlacedToken]


class GrowingText:
    """Encodes texts, by one tokenizer, of which most begin as the first or the last one before."""

    def __init__(self) -> None:
        self._known: list[KnownText] = []  # at most two

    def encode(self, tokenizer: Any, text: str, special: bool) -> list[int]:
        """Return the tokens of a text as the tokenizer of transformers encodes all of it, with its special tokens if
        asked for."""
        if len(text) < LEAST or not getattr(tokenizer, "is_fast", False):
            ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
            return ids
        tried = (_go_on(tokenizer, text, special, before) for before in reversed(self._known))
        found = next(filter(None, tried), None) or _whole(tokenizer, text, special)
        self._known = [*self._known[:1], found]
        return found.ids.tolist()


def _whole(tokenizer: Any, text: str, special: bool) -> KnownText:
    encoding = _encoding(tokenizer, text, special)
    first, end = _placed(encoding, 0, len(text) - KEPT_END)
    return KnownText(text, special, array("I", encoding.ids), first, end)


def _go_on(tokenizer: Any, text: str, special: bool, before: KnownText) -> KnownText | None:
    """Encode the end of a text that begins like another one; None if its other tokens are not certain."""
    common = common_length(before.text, text)
    begin = common - OVERLAP
    if begin < len(before.text) - KEPT_END or special != before.special:
        return None
    encoding = _encoding(tokenizer, text[begin:], special)
    _, tokens = _placed(encoding, begin, begin)
    same = range(begin + MARGIN, common - MARGIN)
    old, new = ([token for token in each if token.start in same] for each in (before.end, tokens))
    words = [token for token in new if token.begins_word]
    if old != new or len(words) < LEAST_WORDS:
        return None
    ids, end = before.ids[:], before.end[: before.end.index(words[0])]
    del ids[before.first + len(end) :]
    more = tokens[tokens.index(words[0]) :]
    ids.extend(encoding.ids[-len(more) :])
    end += more
    drop = next((number for number, token in enumerate(end) if token.start >= len(text) - KEPT_END), len(end))
    return KnownText(text, special, ids, before.first + drop, end[drop:])


def _encoding(tokenizer: Any, text: str, special: bool) -> Any:
    [encoding] = tokenizer(text, add_special_tokens=special, verbose=False).encodings
    return encoding


def _placed(encoding: Any, begin: int, limit: int) -> tuple[int, list[PlacedToken]]:
    """Tokens of a text that begins at ``begin`` in another one, from the first one that starts at ``limit`` on, and the
    number of that one."""
    ids, words, places = encoding.ids, encoding.word_ids, encoding.offsets
    starts = [begin + start if start or stop else NOWHERE for start, stop in places]
    first = next((number for number, start in enumerate(starts) if start >= limit), len(ids))
    begun = [word is not None and word != before for word, before in zip(words, [None, *words])]
    return first, [PlacedToken(*token) for token in zip(starts[first:], ids[first:], begun[first:])]


def common_length(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
