"""A request and its transcript: tokens, text, streamed pieces, stops and times."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.batching.row import FinishReason
from kvsift.engine.sampling import Chooser, ConstrainedChooser, Sampling
from kvsift.engine.text_offsets import TextOffsets
from kvsift.models.transformers_generation import GenerationSettings

FOLD_TOKENS = 64  # text before the last of these tokens is not decoded again with every token
CONTEXT_TOKENS = 8  # tokens of that text that are decoded again, since some tokenizers join words


@dataclass(frozen=True)
class Request:
    """A prompt with its resolved options.

    Attributes:
        ids: tokens of the prompt.
        max_new_tokens: maximum number of tokens to generate.
        sampling: how to choose them.
        ends: tokens that end the text and are not part of it.
        stops: texts that end it likewise.
        streamed: whether pieces of text are returned as they are generated.
        logprobs: of how many of the likeliest tokens log-probabilities are kept, besides the chosen one; None: of none.
        deadline: time at which the answer ends as it is.
        exact: it is to be that of dense decoding.
        offsets: where the tokens of the prompt stand in its text, if passages are wanted.
        settings: of the model's generation_config.json, which change its logits; None: nothing does.
    """

    ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    ends: Collection[int] = ()
    stops: tuple[str, ...] = ()
    streamed: bool = False
    logprobs: int | None = None
    deadline: float | None = None
    exact: bool = False
    offsets: TextOffsets | None = None
    settings: GenerationSettings | None = None

    def chooser(self, device: torch.device) -> Chooser | ConstrainedChooser:
        """Return what chooses the tokens of the answer from logits on a device."""
        chooser = self.sampling.chooser(device)
        if self.settings is None or not self.settings.applied:
            return chooser
        return ConstrainedChooser(chooser, self.settings, self.ids, self.max_new_tokens, device)

    @property
    def length(self) -> int:
        """Final number of cached tokens; the last generated token is not fed."""
        return len(self.ids) + self.max_new_tokens - 1


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at temperature 1, of the token that was chosen and of the likeliest ones."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest first

    @classmethod
    def of(cls, token: int, logits: Tensor, num_top: int) -> TokenLogprobs:
        """Those of logits [vocabulary]."""
        logprobs = logits.double().log_softmax(-1)
        values, tokens = logprobs.topk(min(num_top, len(logprobs)))
        return cls(token, float(logprobs[token]), list(zip(tokens.tolist(), values.tolist())))


class Transcript:
    """The answer to a request so far."""

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self.request = request
        self.new_ids: list[int] = []
        self.times: list[float] = []
        self.logprobs: list[TokenLogprobs] = []
        self.done = False
        self.finish_reason: FinishReason = "stop"
        self._tokenizer = tokenizer
        self._folded, self._context, self._open = "", 0, 0  # text of the first ``_open`` tokens; first token to decode
        self._text: str | None = None
        self._num_returned = 0  # characters

    @property
    def text(self) -> str:
        """All text so far, stop excluded."""
        return self._decode(self.new_ids) if self._text is None else self._text

    @property
    def itl_s(self) -> list[float]:
        """Seconds between tokens."""
        return [after - before for before, after in pairwise(self.times)]

    def take(self, token: int, time: float, logits: Tensor | None = None) -> str:
        """Add a token that was chosen at ``time``, from logits [vocabulary] if they are at hand. Returns the new text
        that is certain."""
        request = self.request
        self.times.append(time)
        if token in request.ends:
            self.done = True
            return self._piece(self.text) if request.streamed else ""
        self.new_ids.append(token)
        if request.logprobs is not None:
            assert logits is not None, "the caller has refused logprobs"
            self.logprobs.append(TokenLogprobs.of(token, logits, request.logprobs))
        is_late = request.deadline is not None and time >= request.deadline
        self.done = is_late or len(self.new_ids) >= request.max_new_tokens
        self.finish_reason = "stop" if not self.done else "deadline" if is_late else "length"
        if not request.stops and not request.streamed:
            return ""
        text = self._extended_text()
        # White space before any other text is no stop: formats differ in what an answer begins with.
        begin = len(text) - len(text.lstrip())
        found = [text.find(stop, 0 if stop.strip() else begin) for stop in request.stops if text.strip()]
        positions = [position for position in found if position >= 0]
        if positions:
            text, self.done, self.finish_reason = text[: min(positions)], True, "stop"
        if self.done:
            self._text = text
        return self._piece(text if self.done else text[: len(text) - undecided(text, request.stops)])

    def end(self, reason: FinishReason) -> str:
        """End the text as it is, unless it has ended by itself. Returns the text that was not certain before."""
        if self.done:
            return ""
        self.done, self.finish_reason = True, reason
        return self._piece(self.text) if self.request.streamed else ""

    def _piece(self, ready: str) -> str:
        piece, self._num_returned = ready[self._num_returned :], max(self._num_returned, len(ready))
        return piece

    def _extended_text(self) -> str:
        """Return the whole text; only its last tokens are decoded again."""
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
    """Return how many characters at the end of a text may still change or begin a stop."""
    whole = text.rstrip("\ufffd")  # behind it are characters with missing bytes, which may go on with a stop
    starts = [n for stop in stops for n in range(1, min(len(stop), len(whole) + 1)) if whole.endswith(stop[:n])]
    return len(text) - len(whole) + max(starts, default=0)
