"""A sequence's answer in the engine process: events for the server, after tokens that it received before a crash."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvsift.api.answer import Answer
from kvsift.engine.request import Request
from kvsift.engine.transcript import TextOutput, TokenLogprobs
from kvsift.tokenization.token_text import AnswerText, TokenDecoder, TokenLabel


class Reply(TextOutput):
    """An output that keeps events until they are sent.

    Args:
        request: request of the sequence.
        tokenizer, device: those of the model.
        sent: tokens that were sent before the engine was restarted. They are decoded again, as they were, so what
            follows is what would have followed.
        strips: leave out white space before the text.
        echoes: begin with the prompt.
        is_empty: generate nothing; the one token that the engine chooses is left out.

    Attributes:
        events: for each step that was not sent its token (None for one that ends the text), the text that is certain
            since then, and the log-probabilities of the tokens that text begins in: for each its label, bytes,
            log-probability, offset in the text and likeliest tokens.
    """

    def __init__(
        self, request: Request, tokenizer: Any, device: torch.device, sent: Sequence[int] = (), strips: bool = False,
        echoes: bool = False, is_empty: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(request, tokenizer, device)
        self.events: deque[list[Any]] = deque()
        self._sent, self._strips, self._num_described = deque(sent), strips, 0
        self._is_sent = False  # the token that was chosen last
        self._tokenizer, self._echoes, self._is_empty = tokenizer, echoes, is_empty
        self._prompt_logprobs = list[TokenLogprobs]()  # of its tokens after the first
        self._shift = 0  # characters of the prompt

    def score(self, start: int, logits: Tensor) -> None:
        """Keep the log-probabilities of the prompt's tokens behind some from a position on."""
        request = self.transcript.request
        following = request.ids[start + 1 : start + 1 + len(logits)]  # none behind the last
        scored = [TokenLogprobs.of(token, row, request.logprobs or 0) for token, row in zip(following, logits)]
        self._prompt_logprobs[start:] = scored

    def choose(self, logits: Tensor | int, given: int | None = None) -> int:
        """Choose a token, or repeat the one that was sent."""
        self._is_sent = bool(self._sent)
        return super().choose(logits, self._sent.popleft() if self._is_sent else given)

    def pass_on(self, token: int, piece: str) -> None:
        """Keep an event, unless the token was sent before."""
        if self._strips:
            piece = piece.lstrip()
            self._strips = not piece
        prompt, before = self._prompt() if self._echoes else ("", [])
        self._echoes = False
        if self._is_empty:
            self.transcript.new_ids.clear()
            self.transcript.finish_reason = "length"
            self.events.append([None, prompt, before])
            return
        first, self._num_described = self._num_described, self.transcript.num_decided
        if not self._is_sent:
            logprobs = [self._described(index) for index in range(first, self._num_described)]
            is_text = len(self.transcript.new_ids) == len(self.transcript.times)
            self.events.append([token if is_text else None, prompt + piece, before + logprobs])

    def _prompt(self) -> tuple[str, list[list[Any]]]:
        """The text of the prompt, and what is known of its tokens; the first has no log-probability."""
        request, decoder = self.transcript.request, TokenDecoder.of(self._tokenizer)
        answer = AnswerText(decoder, [], decoder.left_out(request.skip_special_tokens, request.ends))
        text, described = "", list[list[Any]]()
        for index, token in enumerate(request.ids):
            offset = len(text) + len(answer.rest())
            text += answer.add([token])
            if index and self._prompt_logprobs:
                described.append(
                    _shown(self._prompt_logprobs[index - 1], partial(decoder.label, is_first=False), offset)
                )
            elif self.transcript.request.logprobs is not None:
                described.append([*decoder.label(token, True), None, offset, []])
        self._shift = len(text) + len(answer.rest())
        return text + answer.rest(), described

    def _described(self, index: int) -> list[Any]:
        """The token with an index and the likeliest ones in its place."""
        transcript = self.transcript
        label, offset = partial(transcript.label, index=index), transcript.offsets[index]
        return _shown(transcript.logprobs[index], label, offset + self._shift)


def _shown(logprobs: TokenLogprobs, label: Callable[[int], TokenLabel], offset: int) -> list[Any]:
    """A token and the likeliest ones in its place; -inf has no JSON."""
    tokens = [(logprobs.token, logprobs.logprob), *logprobs.top]
    own, *top = [[*label(token), max(value, -9999.0), token] for token, value in tokens]
    return [*own[:3], offset, top]


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
