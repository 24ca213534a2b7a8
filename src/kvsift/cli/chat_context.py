"""The texts of a chat, joined, with the lines of their files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from kvsift.cli import options as o
from kvsift.errors import InputError

BETWEEN = "\n\n"  # files, as o.read_texts joins them
MOST_CHARACTERS = 300  # of a line that is shown as one passage


class Place(NamedTuple):
    """A part of a line.

    Attributes:
        file: its name; empty if there is one file only.
        line: its number in the file, from 1.
        start, stop: its characters in the context.
    """

    file: str
    line: int
    start: int
    stop: int


class ChatContext:
    """What a chat is about.

    Args:
        files: names and texts.

    Attributes:
        text: of all files.
    """

    def __init__(self, files: Sequence[tuple[str, str]] = ()) -> None:
        self.names = [name for name, _ in files]
        several = len(files) > 1
        texts = [text.strip("\n") if several else text for _, text in files]
        self.text = BETWEEN.join(texts)
        self._begins = list(accumulate((len(text) + len(BETWEEN) for text in texts[:-1]), initial=0))
        self._skipped = [len(text) - len(text.lstrip("\n")) if several else 0 for _, text in files]

    @classmethod
    def read(cls, names: Sequence[str]) -> ChatContext:
        """Read files; - is standard input.

        Raises:
            InputError: if one is no text, or a saved document.
        """
        if (saved := o.saved_document(names)) is not None:
            raise InputError(f"{saved} is a saved document, and a chat reads texts. Give the text, or use kvsift ask.")
        return cls([(name, o.read_texts([name], "context")) for name in names])

    def places(self, start: int, stop: int) -> list[Place]:
        """Return the parts of lines that characters from ``start`` to ``stop`` are in."""
        places = []
        while start < stop:
            place = self._place(start)
            if self.text[place.start : place.stop].strip():
                places.append(place)
            start = place.stop + 1
        return places

    def _place(self, at: int) -> Place:
        """Return the line of a character, or the part of it if it is long."""
        number = bisect_right(self._begins, at) - 1
        begin = self._begins[number]
        first = max(self.text.rfind("\n", 0, at) + 1, begin)
        last = self.text.find("\n", at)
        last = len(self.text) if last < 0 else last
        first += (at - first) // MOST_CHARACTERS * MOST_CHARACTERS
        last = max(min(last, first + MOST_CHARACTERS - 1), at)
        line = self.text.count("\n", begin, at) + 1 + self._skipped[number]
        return Place(self.names[number] if len(self.names) > 1 else "", line, first, last)
