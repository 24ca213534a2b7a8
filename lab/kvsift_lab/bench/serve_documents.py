"""Documents of given lengths, and questions about them, for servers under load."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

STEP = 128  # tokens by which documents of clients differ, so that the ends of their last chunks differ
PLACES = "Oslo", "Genoa", "Porto", "Leith", "Varna", "Cadiz", "Turku", "Split"
GOODS = "salt", "copper wire", "paper", "clay tiles", "wool", "lamp oil", "glass", "barley"


class DocumentMaker:
    """Reports of a harbour, as long as wanted.

    Args:
        tokenizer: of the model.
        seed: of all texts.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer, self._seed = tokenizer, seed

    def make(self, name: str, num_tokens: int) -> str:
        """Return the text of this name, of at least so many tokens and at most a sentence more."""
        lines, total = [], 0
        for line in self._lines(name):
            lines.append(line)
            total += self._count(line)
            if total >= num_tokens:
                return "".join(lines)
        raise AssertionError("there is always another sentence")

    def own(self, client: int, context: int) -> str:
        """Return the document of a client."""
        return self.make(f"client {client}", context + STEP * client)

    def other(self, context: int, unread: int, turn: str) -> str:
        """Return a document that begins as that of client 0, and ends with ``unread`` tokens of its own."""
        return self.make("client 0", context - unread) + self.make(turn, unread)

    def _lines(self, name: str) -> Iterator[str]:
        rng = random.Random(f"{self._seed} {name}")
        yield f"Report of the harbour for {name}.\n"
        while True:
            crate, weight, place, goods = (
                rng.randrange(10_000),
                rng.randrange(900),
                rng.choice(PLACES),
                rng.choice(GOODS),
            )
            yield f"Crate {crate} from {place} holds {weight} kilograms of {goods}.\n"

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def question(number: int) -> str:
    """Return a question; no two are alike."""
    place = PLACES[number % len(PLACES)]
    return f"\n\nQuestion {number}: Which crates came from {place}, and what do they hold?\nAnswer: Crate"
