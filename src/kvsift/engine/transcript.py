"""The transcript of a request: tokens, text, streamed pieces, stops and times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.engine.request import Request
from kvsift.engine.sampling import ConstrainedChooser
from kvsift.engine.sequence import FinishReason
from kvsift.tokenization.growing_text import common_length
from kvsift.tokenization.token_text import INCOMPLETE, AnswerText, TokenDecoder, TokenLabel


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at temperature 1, of the token that was chosen and of the likeliest ones."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest first

    @classmethod
    def of(cls, token: int, logits: Tensor, num_top: int) -> TokenLogprobs:
        """Make them of logits [vocabulary]. NaN and infinite logits, which settings may have replaced since, have
        no probability, or all."""
        finite = logits.double().nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        logprobs = finite.log_softmax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        values, tokens = logprobs.topk(min(num_top, len(logprobs)))
        return cls(token, float(logprobs[token]), list(zip(tokens.tolist(), values.tolist())))


class Transcript:
    """The answer to a request so far.

    Attributes:
        offsets: characters of the text before each token, if log-probabilities are kept and text is decoded.
        stop: the stop of the request that has ended the text; None: none has.
    """

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self.request = request
        self.new_ids: list[int] = []
        self.times: list[float] = []
        self.logprobs: list[TokenLogprobs] = []
        self.offsets: list[int] = []
        self.done = False
        self.finish_reason: FinishReason = "stop"
        self.stop: str | None = None
        self._tokenizer, self._decoder = tokenizer, TokenDecoder.of(tokenizer)
        left_out = self._decoder.left_out(request.skip_special_tokens, request.ends)
        self._answer = AnswerText(self._decoder, request.ids, left_out)
        self._starts_text = self._answer.is_first
        self._num_decoded = 0  # tokens
        self._pieces: list[str] = []  # that were returned
        self._num_returned = 0  # characters
        self._waiting = ""  # certain text that may begin a stop
        self._has_begun = False  # more than white space was returned
        self._is_ended, self._is_cut = False, False  # all text was returned; before a stop

    @property
    def text(self) -> str:
        """All text so far, stop excluded."""
        self._decode_new()
        return "".join([*self._pieces, self._waiting, "" if self._is_ended else self._answer.rest()])

    @property
    def itl_s(self) -> list[float]:
        """Seconds between tokens."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def num_decided(self) -> int:
        """Tokens, of those with an offset, that are certain to have text before the stop."""
        if self.done and not self._is_cut:
            return len(self.offsets)
        return bisect_left(self.offsets, self._num_returned)

    def label(self, token: int, index: int) -> TokenLabel:
        """The text and the bytes of a token in place of the one with this index."""
        return self._decoder.label(token, index == 0 and self._starts_text)

    def take(self, token: int, time: float, logits: Tensor | None = None, is_last: bool = False) -> str:
        """Add a token that was chosen at ``time``, from logits [vocabulary] if they are at hand; nothing may follow one
        that ``is_last``. Returns the new text that is certain."""
        request = self.request
        self.times.append(time)
        if token in request.ending_tokens:
            self.done = True
            return self._new_text() if request.stops or request.streamed else ""
        self.new_ids.append(token)
        if request.logprobs is not None:
            assert logits is not None, "the caller has refused logprobs"
            self.logprobs.append(TokenLogprobs.of(token, logits, request.logprobs))
        is_late = request.deadline is not None and time >= request.deadline
        self.done = is_last or is_late or len(self.new_ids) >= request.max_new_tokens
        self.finish_reason = "stop" if is_last or not self.done else "deadline" if is_late else "length"
        return self._new_text() if request.stops or request.streamed else ""

    def end(self, reason: FinishReason) -> str:
        """End the text as it is, unless it has ended by itself. Returns the text that was not certain before."""
        if self.done:
            return ""
        self.done, self.finish_reason = True, reason
        return self._new_text() if self.request.stops or self.request.streamed else ""

    def _new_text(self) -> str:
        """Return what is certain now: no later token changes it, and no stop begins in it."""
        self._decode_new()
        if self.done:
            self._waiting += self._answer.rest()
        count, self.stop = self._find_stop(self._waiting)
        if self.stop is not None:
            self.done, self.finish_reason, self._is_cut = True, "stop", True
        self._is_ended = self.done
        if not self.done:
            count -= undecided(self._waiting, self.request.stops)
        piece, self._waiting = self._waiting[:count], "" if self.done else self._waiting[count:]
        self._pieces.append(piece)
        self._num_returned += len(piece)
        self._has_begun = self._has_begun or bool(piece.strip())
        return piece

    def _decode_new(self) -> None:
        """Decode the tokens that were not decoded yet."""
        new, self._num_decoded = self.new_ids[self._num_decoded :], len(self.new_ids)
        if self.request.logprobs is None or not (self.request.streamed or self.request.stops):
            self._waiting += self._answer.add(new)
            return
        for token in new:
            begin, before = self._num_returned + len(self._waiting), self._answer.rest()
            self._waiting += self._answer.add([token])
            after = self._waiting[begin - self._num_returned :] + self._answer.rest()
            num_same = common_length(before, after)
            # a part of a character that is still incomplete: it stands where the character begins
            num_same -= num_same == len(after) and after.endswith(INCOMPLETE)
            self.offsets.append(max(begin + num_same, self.offsets[-1] if self.offsets else 0))

    def _find_stop(self, text: str) -> tuple[int, str | None]:
        """Return where the first stop begins in what was not returned yet, or where that ends, and the stop."""
        if not (self._has_begun or text.strip()):
            return len(text), None
        # White space before any other text is no stop: formats differ in what an answer begins with.
        begin = 0 if self._has_begun else len(text) - len(text.lstrip())
        found = [(text.find(stop, 0 if stop.strip() else begin), stop) for stop in self.request.stops]
        return min(((at, stop) for at, stop in found if at >= 0), key=itemgetter(0), default=(len(text), None))


def undecided(text: str, stops: Sequence[str] = ()) -> int:
    """Return how many characters at the end of a text may begin a stop."""
    starts = [n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])]
    return max(starts, default=0)


class TextOutput:
    """A ``SequenceOutput`` that keeps a transcript.

    Attributes:
        transcript: transcript of the answer.
        num_prefilled: tokens of the prompt that are cached.
        notify: called with every new piece of text, and "" when more of the prompt was prefilled; None: nobody waits
            for them.
    """

    def __init__(self, request: Request, tokenizer: Any, device: torch.device) -> None:
        self.transcript = Transcript(request, tokenizer)
        self.num_prefilled = 0
        self.notify: Callable[[str], None] | None = None
        self._chooser = request.chooser(device)

    @property
    def constraint(self) -> ConstrainedChooser | None:
        return self._chooser if isinstance(self._chooser, ConstrainedChooser) else None

    def note_prefilled(self, num_tokens: int) -> None:
        if self.notify is not None and num_tokens != self.num_prefilled and not self.transcript.new_ids:
            self.num_prefilled = num_tokens
            self.notify("")
        self.num_prefilled = num_tokens

    def foresee(self, logits: Tensor, ahead: int) -> int:
        return self._chooser.foresee(logits, ahead)

    def take(self, logits: Tensor | int, probe_s: float) -> tuple[int, FinishReason]:
        token, time = self.choose(logits), perf_counter() - probe_s
        kept, is_last = None if isinstance(logits, int) else logits, self._chooser.is_complete
        piece = self.transcript.take(token, time, kept, is_last)
        self.pass_on(token, piece)
        return token, self.transcript.finish_reason if self.transcript.done else ""

    def choose(self, logits: Tensor | int, given: int | None = None) -> int:
        """Choose the next token from logits [vocabulary], or take one that was chosen, or was ``given`` before."""
        return self._chooser(logits, given)

    def pass_on(self, token: int, piece: str) -> None:
        """Give the client a token of the transcript, and the text that is certain since then."""
        if piece and self.notify is not None:
            self.notify(piece)
