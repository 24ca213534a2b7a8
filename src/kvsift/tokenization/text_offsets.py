"""Where the tokens of a prompt stand in a text: the prompt itself, or the document in it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from kvsift.errors import UnsupportedPrompt

Span = tuple[int, int, float]  # first character, the one after the last, share
DECIMALS = 3  # of a share


class TextOffsets:
    """Tokens of a prompt as spans of characters (Unicode code points) of a text.

    Tokens that are parts of one character share its span; white space belongs to the token after it.

    Args:
        offsets: (start, stop) in the text of each token of the prompt; before, after and beyond it where there is none.
        characters: number of characters of the text.
    """

    def __init__(self, offsets: Sequence[tuple[int, int]], characters: int) -> None:
        self.characters, self.num_tokens = characters, len(offsets)
        edges, cells = [0], list[int]()  # cell i is from edge i to edge i + 1; of tokens outside of the text: -1
        for start, stop in offsets:
            start, stop = max(start, 0), min(stop, characters)
            if start >= stop:
                cells.append(-1)
                continue
            if len(edges) == 1 or start >= edges[-1]:
                edges.append(stop)
            else:  # more of a character, or of characters, that begin before
                edges[-1] = max(edges[-1], stop)
            cells.append(len(edges) - 2)
        self._cells, self._edges = torch.tensor(cells, dtype=torch.int64), edges

    def shifted(self, tokens: int) -> TextOffsets:
        """The same if the prompt began with more or fewer tokens."""
        if not tokens:
            return self
        other, cells = copy(self), self._cells
        other.num_tokens += tokens
        other._cells = torch.cat([cells.new_full((tokens,), -1), cells]) if tokens > 0 else cells[-tokens:]
        return other

    def spans(self, shares: Tensor) -> list[Span]:
        """Spans with a share above 0: in order, not empty, not overlapping, those of equal shares merged.

        shares float32 [num_tokens], from 0 to 1; of several tokens in a character the largest counts.
        """
        inside = self._cells >= 0
        of_cells = torch.zeros(len(self._edges) - 1)
        of_cells.scatter_reduce_(0, self._cells[inside], shares[inside].float(), "amax")
        steps = (of_cells * 10**DECIMALS).ceil().to(torch.int64)  # ceil: what was selected at all is not 0
        values, counts = steps.unique_consecutive(return_counts=True)
        spans, cell = [], 0
        for value, count in zip(values.tolist(), counts.tolist()):
            if value:
                spans.append((self._edges[cell], self._edges[cell + count], value / 10**DECIMALS))
            cell += count
        return spans


def offsets_of(tokenizer: Any, text: str) -> TextOffsets:
    """Return where the tokens of a text are in it.

    Raises:
        InputError: if the tokenizer does not say.
    """
    require_spans(tokenizer)
    return TextOffsets(tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"], len(text))


def require_spans(tokenizer: Any) -> None:
    """Refuse a tokenizer that does not say where its tokens stand in a text."""
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedPrompt(
            f"passages need a tokenizer that says where its tokens stand in a text, and {type(tokenizer).__name__} "
            "does not. Leave them out."
        )
