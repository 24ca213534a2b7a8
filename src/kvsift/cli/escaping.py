"""Text of users and models as a terminal may show it: nothing in it is obeyed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

# Control characters but newline and tab, escapes of terminals among them; what turns the direction of writing; halves
# of characters, which stand for bytes that are no UTF-8.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """The text with everything that a terminal would obey, or could not show, written out: ``\\x1b``."""
    return OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def cell(text: str, style: str = "") -> Text:
    """The same for rich, which takes [x] in a string for markup."""
    from rich.text import Text

    return Text(plain(text), style=style)
