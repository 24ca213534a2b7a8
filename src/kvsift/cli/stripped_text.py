"""A streamed text without white space at both ends."""

from __future__ import annotations


class StrippedText:
    """Pieces of a text as they come.

    Attributes:
        text: of all pieces so far, with all white space.
    """

    def __init__(self) -> None:
        self.text = ""

    def add(self, piece: str) -> str:
        """Add a piece. Returns what can be shown now: white space waits for the text after it."""
        before, self.text = self.text, self.text + piece
        return self.text.strip()[len(before.strip()) :]
