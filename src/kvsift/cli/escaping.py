"""Text of users, files and packages, made fit for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text without control characters, which a terminal would obey."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)


def escaped(text: str) -> str:
    """The same for rich, which would read square brackets as markup."""
    from rich.markup import escape

    return escape(printable(text))
