"""Control tokens, such as ``<|im_end|>``, which a template writes and a document only spells: those that the tokenizer
calls special.

A tokenizer finds them anywhere in a text. A document, question or message that spells one would end its turn and begin
another in somebody else's name. Such a spelling is broken before the template is applied, and both sides are tokenized
apart, as ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from secrets import token_hex
from typing import Any

BREAK = f"\ue000{token_hex(16)}\ue000"  # no text has it, since nobody knows it


class ControlTokens:
    """The control tokens of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {*(str(token) for token in added if token.special), *tokenizer.all_special_tokens}
        self._tokens = sorted(token for token in special if len(token) > 1)  # some models pad with "!"

    def broken(self, content: str) -> str:
        """Return a text with a ``BREAK`` in everything that spells a control token."""
        spelled = [re.escape(token) for token in self._tokens if token in content]
        if not spelled:
            return content
        spelling = re.compile(f"(?=({'|'.join(spelled)})).", re.DOTALL)
        return spelling.sub(lambda first: first[0] + BREAK, content)  # where spellings overlap, in each


def parts(text: str) -> Iterator[tuple[str, int]]:
    """Yield what is tokenized apart, and where each part begins in the text without its breaks."""
    start = 0
    for part in text.split(BREAK):
        yield part, start
        start += len(part)


def unbroken(text: str) -> str:
    return text.replace(BREAK, "")
