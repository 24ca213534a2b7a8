"""A row's answer in the engine process: events for the server, after tokens that it received before a crash."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvsift.api.answer import Answer
from kvsift.engine.row import FinishReason
from kvsift.engine.transcript import Request, Transcript


class Reply:
    """A ``RowOutput`` that keeps events until they are sent.

    Args:
        request: of the row.
        tokenizer, device: of the model.
        sent: tokens that were sent before the engine was restarted. They are decoded again, as they were, so what
            follows is what would have followed.
        strips: leave out white space before the text.

    Attributes:
        events: of each step that was not sent its token (None for one that ends the text), the text that is certain
            since then, and the log-probabilities of the tokens that text begins in: for each its label, bytes,
            log-probability, offset in the text and likeliest tokens.
        num_prefilled: tokens of the prompt that are cached; None: the row waits.
    """

    def __init__(
        self, request: Request, tokenizer: Any, device: torch.device, sent: Sequence[int] = (), strips: bool = False
    ) -> None:
        self.transcript = Transcript(request, tokenizer)
        self.events: deque[list[Any]] = deque()
        self.num_prefilled: int | None = None
        self._sent, self._strips, self._num_described = sent, strips, 0
        self._choose = request.chooser(device)

    def read(self, num_tokens: int) -> None:
        """Keep the progress of prefill."""
        self.num_prefilled = num_tokens

    def foresee(self, logits: Tensor, ahead: int) -> int:
        """Return the token that would be chosen ``ahead`` tokens from now."""
        return self._choose.foresee(logits, ahead)

    def take(self, logits: Tensor | int, probe_s: float) -> tuple[int, FinishReason]:
        """Choose a token, or repeat the one that was sent."""
        transcript, position = self.transcript, len(self.transcript.new_ids)
        token = self._choose(logits)  # in any case: it counts random draws
        if is_sent := position < len(self._sent):
            token = self._sent[position]
        piece = transcript.take(token, perf_counter() - probe_s, None if isinstance(logits, int) else logits)
        if self._strips:
            piece = piece.lstrip()
            self._strips = not piece
        first, self._num_described = self._num_described, transcript.num_decided
        if not is_sent:
            logprobs = [self._described(index) for index in range(first, self._num_described)]
            self.events.append([token if len(transcript.new_ids) > position else None, piece, logprobs])
        return token, transcript.finish_reason if transcript.done else ""

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
