"""One request as its tokens come: text, streamed pieces, stops, times."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvsift.engine.sampling import Sampling

FOLD_TOKENS = 64  # text older than this is not decoded again with every token
CONTEXT_TOKENS = 8  # but so many of its last tokens are, since some tokenizers join words


@dataclass(frozen=True)
class Request:
    """What to generate after a prompt.

    Attributes:
        ids: the prompt.
        max_new_tokens: at most so many tokens.
        sampling: how to choose them.
        ends: tokens that end the text and are no part of it.
        stops: texts that do.
        streamed: whether pieces of text are wanted as they come.
    """

    ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    ends: Collection[int] = ()
    stops: tuple[str, ...] = ()
    streamed: bool = False

    @property
    def length(self) -> int:
        """Tokens cached in the end; the last one generated is not fed."""
        return len(self.ids) + self.max_new_tokens - 1


class Transcript:
    """What a request has been answered so far."""

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self.request = request
        self.new_ids: list[int] = []
        self.times: list[float] = []
        self.done = False
        self.finish_reason = "stop"  # or "length", once max_new_tokens have come without one
        self._tokenizer = tokenizer
        self._folded, self._context, self._open = "", 0, 0  # text of the first ``_open`` tokens; where to decode from
        self._text: str | None = None
        self._shown = 0

    @property
    def text(self) -> str:
        """All of it, stop excluded."""
        return self._decode(self.new_ids) if self._text is None else self._text

    @property
    def itl_s(self) -> list[float]:
        """Seconds between tokens."""
        return [after - before for before, after in pairwise(self.times)]

    def take(self, token: int, time: float) -> str:
        """One more token, chosen at ``time``. Returns the text that can be shown now."""
        request = self.request
        self.times.append(time)
        if token in request.ends:
            self.done = True
            return self._piece(self.text) if request.streamed else ""
        self.new_ids.append(token)
        self.done = len(self.new_ids) >= request.max_new_tokens
        self.finish_reason = "length" if self.done else "stop"
        if not request.stops and not request.streamed:
            return ""
        text = self._grown()
        # A stop counts only after something was said: formats differ in the white space an answer begins with.
        begin = len(text) - len(text.lstrip())
        found = [place for stop in request.stops if text.strip() and (place := text.find(stop, begin)) >= 0]
        if found:
            text, self.done, self.finish_reason = text[: min(found)], True, "stop"
        if self.done:
            self._text = text
        return self._piece(text if self.done else text[: len(text) - undecided(text, request.stops)])

    def _piece(self, ready: str) -> str:
        piece, self._shown = ready[self._shown :], max(self._shown, len(ready))
        return piece

    def _grown(self) -> str:
        """The whole text, most of it remembered."""
        context = self._decode(self.new_ids[self._context : self._open])
        tail = self._decode(self.new_ids[self._context :])
        if not tail.startswith(context):
            return self._decode(self.new_ids)
        text = self._folded + tail[len(context) :]
        if len(self.new_ids) - self._open >= FOLD_TOKENS and not text.endswith("\ufffd"):
            self._folded, self._open = text, len(self.new_ids)
            self._context = self._open - CONTEXT_TOKENS
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def undecided(text: str, stops: Sequence[str] = ()) -> int:
    """How many characters at the end of a text may still change or turn out to begin a stop."""
    broken = len(text) - len(text.rstrip("\ufffd"))  # a character whose bytes have not all come
    begun = [n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])]
    return max([broken, *begun])
