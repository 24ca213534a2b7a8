"""Escaping of text of users and models, so that a terminal executes nothing in it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

# Control characters except newline and tab, which include terminal escapes; marks of writing direction; surrogates,
# which stand for bytes that are not UTF-8.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """Return the text with unsafe characters written out: ``\\x1b``."""
    return UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def cell(text: str, style: str = "") -> Text:
    """Return the same for rich, which reads [x] in a string as markup."""
    from rich.text import Text

    return Text(plain(text), style=style)
