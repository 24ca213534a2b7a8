"""A sequence's answer in the engine process: events for the server, after tokens that it received before a crash."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvsift.api.answer import Answer
from kvsift.engine.request import Request
from kvsift.engine.transcript import TextOutput


class Reply(TextOutput):
    """An output that keeps events until they are sent.

    Args:
        request: request of the sequence.
        tokenizer, device: those of the model.
        sent: tokens that were sent before the engine was restarted. They are decoded again, as they were, so what
            follows is what would have followed.
        strips: leave out white space before the text.

    Attributes:
        events: for each step that was not sent its token (None for one that ends the text), the text that is certain
            since then, and the log-probabilities of the tokens that text begins in: for each its label, bytes,
            log-probability, offset in the text and likeliest tokens.
    """

    def __init__(
        self, request: Request, tokenizer: Any, device: torch.device, sent: Sequence[int] = (), strips: bool = False
    ) -> None:
        super().__init__(request, tokenizer, device)
        self.events: deque[list[Any]] = deque()
        self._sent, self._strips, self._num_described = deque(sent), strips, 0
        self._is_sent = False  # the token that was chosen last

    def choose(self, logits: Tensor | int, given: int | None = None) -> int:
        """Choose a token, or repeat the one that was sent."""
        self._is_sent = bool(self._sent)
        return super().choose(logits, self._sent.popleft() if self._is_sent else given)

    def pass_on(self, token: int, piece: str) -> None:
        """Keep an event, unless the token was sent before."""
        if self._strips:
            piece = piece.lstrip()
            self._strips = not piece
        first, self._num_described = self._num_described, self.transcript.num_decided
        if not self._is_sent:
            logprobs = [self._described(index) for index in range(first, self._num_described)]
            is_text = len(self.transcript.new_ids) == len(self.transcript.times)
            self.events.append([token if is_text else None, piece, logprobs])

    def _described(self, index: int) -> list[Any]:
        """The token with an index and the likeliest ones in its place; -inf has no JSON."""
        transcript = self.transcript
        logprobs = transcript.logprobs[index]
        tokens = [(logprobs.token, logprobs.logprob), *logprobs.top]
        own, *top = [[*transcript.label(token, index), max(value, -9999.0), token] for token, value in tokens]
        return [*own[:3], transcript.offsets[index], top]


def usage_of(answer: Answer, num_reused: int) -> dict[str, Any]:
    """Return the counters of an answer for its client."""
    return {
        "completion_tokens": len(answer.token_ids),
        "cached_tokens": num_reused,
        "plan": answer.plan,
        "density": answer.decode("density"),
        "visible_tokens": answer.decode("visible_tokens"),
        "bytes_read": answer.decode("kv_bytes_read"),
        "bytes_dense": answer.decode("kv_bytes_dense"),
        "recovery": answer.decode("recovery"),
        "guard_events": len(answer.guard),
        "no_reuse": answer.no_reuse,
        "exact": answer.exact,
        "passages": None if answer.passages is None else answer.passages.as_dict(),
    }
